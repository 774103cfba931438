"""What another axis may do with the ops that splitting the sequence puts into a graph."""

from __future__ import annotations

import pytest
import torch

from autopar.op_call import OpCall, Operand
from autopar.program import TensorType
from autopar.reshard import RESHARDS
from autopar.rules import rule_for
from autopar.rules.sequence import COLLECTIVES
from autopar.rules.strategy import strategies
from autopar.runtime import collectives  # noqa: F401 - registers the ops

SHAPE = (4, 8, 16)


def call(name: str, *args: object, result: tuple[int, ...] = SHAPE) -> OpCall:
    target = getattr(torch.ops.autopar, name).default
    types = (TensorType(SHAPE, torch.float32, True),)
    results = (TensorType(result, torch.float32, True),)
    return OpCall(name, target, (Operand(0), *args), {}, ("x",), types, results)


def legal(op: OpCall) -> set[str]:
    rule = rule_for(op)
    assert rule is not None
    return {s.name for s in strategies(op, rule, 2)}


def test_every_reshard_has_a_rule() -> None:
    assert set(RESHARDS) - {""} <= set(COLLECTIVES)


@pytest.mark.parametrize(
    ("op", "shards"),
    [
        (call("copy", "cp"), {"shard d0", "shard d1", "shard d2"}),
        (call("all_gather", 1, 2, "cp", result=(4, 16, 16)), {"shard d0", "shard d2"}),
        (call("slice_pad", 1, 2, "cp", result=(4, 4, 16)), {"shard d0", "shard d2"}),
        (call("all_to_all", 1, 2, 2, "cp", result=(4, 16, 8)), {"shard d0"}),
    ],
    ids=lambda value: value.op_name if isinstance(value, OpCall) else "",
)
def test_moved_dims_are_whole_and_sums_pass(op: OpCall, shards: set[str]) -> None:
    assert legal(op) == {"replicate", "replicate*", "partial 0", *shards}


def test_rows_of_attention_keep_heads_free() -> None:
    q, k = (TensorType((2, 4, n, 6), torch.float32, True) for n in (8, 16))
    args = (Operand(0), Operand(1), Operand(2), None, False, 2, "cp")
    target = torch.ops.autopar.attention_rows.default
    op = OpCall("rows", target, args, {}, ("q", "k", "v"), (q, k, k), (q,))
    rule = rule_for(op)
    assert rule is not None and rule.flops == 2.0 * 2 * 4 * 8 * 16 * 12
    assert {s.name for s in strategies(op, rule, 2)} == {
        "replicate", "replicate*", "shard b", "shard g",
    }  # fmt: skip


def test_a_share_of_the_loss_is_linear_in_it() -> None:
    loss, target = TensorType((), torch.float32, True), TensorType((8,), torch.int64)
    args = (Operand(0), Operand(1), -100, 2, "cp")
    made = torch.ops.autopar.loss_share.default
    op = OpCall("share", made, args, {}, ("loss", "target"), (loss, target), (loss,))
    assert legal(op) == {"replicate", "replicate*", "partial 0"}
