"""Every rule is proven by execution: shard, run, combine, compare value and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from autopar.rules import RULES
from tests.rules.cases import CASES
from tests.rules.execution import check_all, op_call_of
from tests.rules.pointwise_cases import POINTWISE

# One form and no strategy of its own: a few examples are enough.
PLAIN = set(POINTWISE) - {"add", "sub", "mul", "div", "where"}


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_strategy_equals_the_whole_op(name: str) -> None:
    tried: set[str] = set()

    @seed(1)
    @settings(max_examples=8 if name in PLAIN else 25, deadline=None, database=None)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        number = data.draw(st.integers(0, 2**16))
        torch.manual_seed(number)
        made = CASES[name](data.draw)
        op, operands = op_call_of(made)
        assert op.op_name == name  # else the rule's name in the table matches no op
        tried.update(check_all(op, operands, number))

    examples()
    assert any(s.startswith("shard") for s in tried), tried
