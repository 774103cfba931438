"""The rule language: text to factors, and what no rule describes."""

from __future__ import annotations

import pytest
import torch

from autopar.rules import rule_for
from autopar.rules.language import NoRuleError, parse
from tests.rules.draws import real
from tests.rules.execution import call, op_call_of

aten = torch.ops.aten


def test_a_rule_names_dims_groups_and_the_rest() -> None:
    op, _ = op_call_of(call(aten.linear.default, real(2, 3, 8), real(4, 8)))
    rule = parse("b* k, n k -> b* n", op, contraction=True)
    assert str(rule) == "b0 b1 k, n k -> b0 b1 n"
    assert rule.sizes == {"b0": 2, "b1": 3, "k": 8, "n": 4}
    assert rule.flops == 2 * 2 * 3 * 8 * 4


def test_an_unnamed_dim_is_whole() -> None:
    op, _ = op_call_of(call(aten.neg.default, real(2, 3)))
    rule = parse("a _ -> a _", op)
    assert rule.whole == {"_0.1", "_1.1"}


def test_a_text_that_does_not_fit_the_call_is_refused() -> None:
    op, _ = op_call_of(call(aten.mm.default, real(2, 3), real(3, 4)))
    with pytest.raises(NoRuleError, match="names 1 operands"):
        parse("m k -> m k", op)
    with pytest.raises(NoRuleError, match="factor m has sizes 2 and 4"):
        parse("m k, n m -> m n", op)
    with pytest.raises(NoRuleError, match="names 3 dims for a tensor of shape"):
        parse("m k j, k n -> m n", op)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: call(aten.mm.default, x, x),
        lambda x: call(aten.baddbmm.default, *[x[None]] * 3),
        lambda x: call(aten.linear.default, x, x),
        lambda x: call(aten.linear.default, x, x[0]),
        lambda x: call(aten.addmm.default, x, x, x),
        lambda x: call(aten.matmul.default, x, x),
    ],
    ids=["mm", "baddbmm", "linear", "linear vector", "addmm", "matmul"],
)
def test_an_unusual_form_is_replicated_not_an_error(made) -> None:  # type: ignore[no-untyped-def]
    op, _ = op_call_of(made(real(4, 4)))
    assert rule_for(op) is None


def test_keys_of_one_head_broadcast_in_attention() -> None:
    q, k, v = real(4, 2, 4, 8), real(4, 1, 4, 8), real(1, 1, 4, 8)
    op, _ = op_call_of(call(aten.scaled_dot_product_attention.default, q, k, v))
    assert str(rule_for(op)) == "b g q e, b 1 k e, 1 1 k f -> b g q f"


def test_an_unknown_op_has_no_rule() -> None:
    op, _ = op_call_of(call(aten.special_i0.default, real(4)))
    assert rule_for(op) is None
