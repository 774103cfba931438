"""Every rule is proven by execution: shard, run, combine, compare value and gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from autopar.experts import EXCHANGED
from autopar.rules import RULES, random, rule_for
from autopar.rules.rearrange import CONSTANTS
from tests.rules.cases import CASES
from tests.rules.execution import as_list, check_all, op_call_of, run

# Where one rule serves many ops a few examples of each are enough.
# Nothing of them can be sharded; their rules let the batch be followed.
WRITING = (name for name in random.NAMES if name.endswith("_"))
FOLLOWED = {*CONSTANTS, *WRITING, "masked_scatter", "affine_grid_generator"}
SHARED = Counter(RULES.values())


def may_be_random(name: str) -> bool:
    """As torch tags its overloads."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    tags = {tag for o in overloads for tag in getattr(packet, o).tags}
    return torch.Tag.nondeterministic_seeded in tags


def examples_of(name: str) -> int:
    served = SHARED[RULES[name]]
    return 3 if served > 20 else 6 if served > 4 else 14


# Each rank's result comes from the experts of others: on real ranks in `test_experts`.
ON_RANKS = {EXCHANGED}


def test_every_rule_has_a_case() -> None:
    assert not set(RULES) - set(CASES) - ON_RANKS, "rules without a case"
    assert not set(CASES) - set(RULES), "cases without a rule"


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_strategy_equals_the_whole_op(name: str) -> None:
    tried: set[str] = set()

    @seed(1)
    @settings(max_examples=examples_of(name), deadline=None, database=None)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        number = data.draw(st.integers(0, 2**16))
        torch.default_generator.manual_seed(number)
        made = CASES[name](data.draw)
        op, operands = op_call_of(made)
        assert op.op_name == name  # else the rule's name in the table matches no op
        tried.update(check_all(op, operands, number))

    examples()
    assert any(s.startswith("shard") for s in tried) != (name in FOLLOWED), tried


@pytest.mark.parametrize("name", sorted(n for n in CASES if may_be_random(n)))
def test_an_op_whose_result_follows_the_seed_is_random(name: str) -> None:
    @seed(1)
    @settings(max_examples=4, deadline=None, database=None)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        op, operands = op_call_of(CASES[name](data.draw))
        rule = rule_for(op)
        if rule is None:
            return
        drawn = [as_list(run(op.target, op.args, op.kwargs, operands, i))[0] for i in range(3)]
        assert rule.random or all(torch.equal(drawn[0], d) for d in drawn[1:])

    examples()
