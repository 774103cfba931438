"""Rules from outside: a user's own op is sharded like one of ours, and texts are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError
from autopar.op_call import OpCall
from autopar.rules import rule_for
from autopar.rules.language import Rule, parse
from autopar.rules.registration import forget_rule, register_rule
from autopar.rules.strategy import strategies
from tests.rules.draws import real
from tests.rules.execution import call, check_all, op_call_of

NAME = "autopar_tests::scaled_rows"


@torch.library.custom_op(NAME, mutates_args=())
def scaled_rows(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (x @ weight.mT)


@scaled_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.scale = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    rows = grad.flatten(0, -2)
    return ctx.scale * (grad @ weight), ctx.scale * (rows.mT @ x.flatten(0, -2)), None


scaled_rows.register_autograd(_backward, setup_context=_setup)


class Model(nn.Module):
    """The op and a product of torch's, wide in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4096, 1024) / 32)
        self.down = nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(scaled_rows(x, self.up, 0.5))
        return self.down(y).square().mean()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for op in (NAME, f"{NAME}.default", "aten::erfinv"):
        forget_rule(op)


def planned() -> autopar.Plan:
    inputs = {"x": torch.randn(64, 1024)}
    return autopar.plan(
        Model(), "h100:1x2", example_inputs=inputs, global_batch_size=64, pins="tp=2,pp=1,dp=1"
    )


def of_the_op(plan: autopar.Plan) -> str:
    found = [b["scaled_rows"] for b in plan.placements.values() if "scaled_rows" in b]
    return found[0] if found else "replicate"


def test_a_custom_op_is_planned_sharded_once_it_has_a_rule() -> None:
    before = planned()
    assert of_the_op(before) == "replicate"
    assert any("scaled_rows" in note for note in before.notes)
    register_rule(scaled_rows, "b* k, n k -> b* n", linear=[{0}, {1}], contraction=True)
    after = planned()
    assert of_the_op(after) == "shard n"
    assert not any("scaled_rows" in note for note in after.notes)


def test_its_strategies_are_proven_like_ours() -> None:
    register_rule(NAME, "b* k, n k -> b* n", linear=[{0}, {1}], contraction=True)
    made = call(torch.ops.autopar_tests.scaled_rows.default, real(4, 2, 8), real(4, 8), 0.5)
    op, operands = op_call_of(made)
    rule = rule_for(op)
    assert rule is not None and rule.flops == 2 * 4 * 2 * 8 * 4
    names = check_all(op, operands)
    assert {"shard b0", "shard b1", "shard k", "shard n", "partial 0", "partial 1"} <= names


def test_a_function_may_refuse_a_call() -> None:
    def rule(op: OpCall) -> Rule | None:
        return parse("d* -> d*", op) if op.types[0].shape[0] > 2 else None

    register_rule("aten::erfinv", rule)
    large, _ = op_call_of(call(torch.ops.aten.erfinv.default, real(4, low=-0.5, high=0.5)))
    small, _ = op_call_of(call(torch.ops.aten.erfinv.default, real(2, low=-0.5, high=0.5)))
    assert rule_for(large) is not None and rule_for(small) is None


def test_a_rule_of_an_overload_comes_before_that_of_the_op() -> None:
    op, _ = op_call_of(call(torch.ops.autopar_tests.scaled_rows.default, real(4, 8), real(4, 8), 1))
    register_rule(NAME, "b k, n k -> b n")
    register_rule(torch.ops.autopar_tests.scaled_rows.default, "b k, n k -> b n", whole=["b"])
    rule = rule_for(op)
    assert rule is not None and rule.whole == {"b"}
    forget_rule(f"{NAME}.default")
    rule = rule_for(op)
    assert rule is not None and not rule.whole


def test_an_op_that_shares_a_name_with_torchs_has_no_rule_by_that() -> None:
    with torch.library._scoped_library("autopar_tests", "FRAGMENT") as library:
        library.define("relu(Tensor x) -> Tensor")
        library.impl("relu", lambda x: x.flip(0), "CPU")
        op, _ = op_call_of(call(torch.ops.autopar_tests.relu.default, real(4, grad=False)))
        assert op.op_name == "relu" and rule_for(op) is None


def test_a_random_op_is_never_contracted() -> None:
    register_rule("aten::erfinv", "d e -> d e", whole=["e"], random=True)
    op, _ = op_call_of(call(torch.ops.aten.erfinv.default, real(4, 4, low=-0.5, high=0.5)))
    names = [s.name for s in strategies(op, rule_for(op), 2)]
    assert names == ["replicate", "replicate*", "shard d"]


def test_whole_may_name_a_list_of_dims_and_groups_are_measured() -> None:
    register_rule("aten::erfinv", "b* d -> b* d", whole=["b*"])
    op, _ = op_call_of(call(torch.ops.aten.erfinv.default, real(4, 2, 4, low=-0.5, high=0.5)))
    rule = rule_for(op)
    assert rule is not None and rule.whole == {"b0", "b1"}
    flat, _ = op_call_of(call(torch.ops.aten.reshape.default, real(4, 6), [24]))
    assert parse("a b -> (a b)", flat).sizes == {"a": 4, "b": 6}


@pytest.mark.parametrize(
    ("op", "text", "options", "why"),
    [
        ("rows", "a -> a", {}, "names no op"),
        ("my::rows", "a, b", {}, "needs one '->'"),
        ("my::rows", "a b, (c -> a", {}, r"'\(c' is no list of dims"),
        ("my::rows", "a-b -> a", {}, "'a-b' is no list of dims"),
        ("my::rows", "a a -> a", {}, "'a' occurs twice in one tensor"),
        ("my::rows", "a* b* -> a*", {}, "two lists of left-over dims"),
        ("my::rows", "a* a0 -> a*", {}, "'a0' has the name of a list"),
        ("my::rows", "a -> a n", {}, "factor 'n' is in no operand"),
        ("my::rows", "a b -> a b", {"whole": ["c"]}, "whole='c' is no factor"),
        ("my::rows", "a b -> a b", {"linear": [{1}]}, "no operand number 1"),
        ("my::rows", "a b -> a b", {"additive": [2]}, "no operand number 2"),
    ],
)
def test_a_text_that_can_be_no_rule_is_refused(
    op: str, text: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        register_rule(op, text, **options)
