"""Prices of single ops: which bytes and FLOPs they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster import Cluster
from autopar.cost.compute import op_time
from autopar.cost.op_cost import OpCost, is_view, op_cost, op_flops
from autopar.op_call import Fusion, OpCall
from autopar.rules import rule_for
from tests.rules.draws import real
from tests.rules.execution import Call, call, op_call_of

aten = torch.ops.aten
DEVICE = Cluster.parse("h100:1x8").device


def op_of(made: Call) -> OpCall:
    op, _ = op_call_of(made)
    return op


def price(made: Call) -> OpCost:
    op = op_of(made)
    rule = rule_for(op)
    return op_cost(op, rule.flops if rule else 0.0, DEVICE)


def f32(*shape: int, grad: bool = True) -> torch.Tensor:
    return real(*shape, grad=False).float().requires_grad_(grad)


def test_views_cost_nothing_and_copies_do() -> None:
    view = op_of(call(aten.view.default, f32(4, 6), [24]))
    assert is_view(view) and op_cost(view, 0.0, DEVICE).forward_seconds == 0.0
    moved = replace(op_of(call(aten.reshape.default, f32(4, 6), [24])), copies=True)
    assert not is_view(moved) and op_cost(moved, 0.0, DEVICE).bytes_moved == 2 * 96


def test_a_product_has_one_product_for_each_gradient() -> None:
    flops = 2.0 * 8 * 16 * 4
    for x, w, products in ((True, True, 2), (False, True, 1), (True, False, 1), (False, False, 0)):
        found = price(call(aten.linear.default, f32(8, 16, grad=x), f32(4, 16, grad=w)))
        assert (found.forward_flops, found.backward_flops) == (flops, products * flops)
        assert (found.backward_seconds > 0) == (products > 0)


@pytest.mark.parametrize(
    "made",
    [
        call(aten.mm.default, f32(8, 16), f32(16, 4)),
        call(aten.addmm.default, f32(4), f32(8, 16), f32(16, 4)),
        call(aten.bmm.default, f32(2, 8, 16), f32(2, 16, 4)),
        call(aten.matmul.default, f32(2, 8, 16), f32(16, 4)),
    ],
    ids=["mm", "addmm", "bmm", "matmul"],
)
def test_every_product_is_twice_forward_in_the_backward(made: Call) -> None:
    found = price(made)
    batch = made.args[-1].dim() == 3 or made.args[0].dim() == 3
    assert found.forward_flops == 2 * 8 * 16 * 4 * (2 if batch else 1)
    assert found.backward_flops == 2 * found.forward_flops


def test_attention_repeats_its_scores_and_a_causal_one_does_half_the_work() -> None:
    q = [f32(1, 8, 4096, 64) for _ in range(3)]
    whole = price(call(aten.scaled_dot_product_attention.default, *q))
    causal = price(call(aten.scaled_dot_product_attention.default, *q, None, 0.0, True))
    assert whole.forward_flops == causal.forward_flops == 4 * 8 * 4096 * 4096 * 64
    assert whole.backward_flops == 2.5 * whole.forward_flops
    assert 0.5 <= causal.forward_seconds / whole.forward_seconds < 0.6


def test_elementwise_ops_are_their_bytes() -> None:
    x, y = f32(1024, 1024), f32(1024, 1024)
    found = price(call(aten.mul.Tensor, x, y))
    assert found.bytes_moved == 3 * 4 * 2**20 and found.bound == "memory"
    assert found.forward_seconds == op_time(0.0, found.bytes_moved, DEVICE).seconds
    assert price(call(aten.mul.Tensor, f32(4), f32(4))).bound == "launch"


def test_a_lookup_reads_only_its_rows_but_its_gradient_is_dense() -> None:
    table, ids = f32(50000, 64), torch.zeros(4, 8, dtype=torch.int64)
    found = price(call(aten.embedding.default, table, ids))
    assert found.bytes_moved == 2 * 4 * 32 * 64 + 8 * 32
    assert found.backward_seconds > found.forward_seconds


def test_what_needs_no_gradient_has_no_backward() -> None:
    found = price(call(aten.mul.Tensor, f32(8, grad=False), f32(8, grad=False)))
    assert found.backward_seconds == found.backward_flops == 0.0


def test_flops_need_no_device() -> None:
    op = op_of(call(aten.linear.default, f32(8, 16), f32(4, 16)))
    assert op_flops(op, 100.0) == (100.0, 200.0)
    assert op_flops(op_of(call(aten.neg.default, f32(8))), 0.0) == (0.0, 0.0)
    frozen = op_of(call(aten.linear.default, f32(8, 16, grad=False), f32(4, 16, grad=False)))
    assert op_flops(frozen, 100.0) == (100.0, 0.0)


def test_the_gradient_of_a_weight_is_told_apart() -> None:
    x, w = f32(4096, 1024), f32(512, 1024)
    both = price(call(aten.linear.default, x, w))
    values = price(call(aten.linear.default, x, f32(512, 1024, grad=False)))
    assert values.weight_seconds == 0.0
    assert both.weight_seconds == pytest.approx(both.backward_seconds - values.backward_seconds)
    # Both factors of a batched product are activations.
    assert price(call(aten.bmm.default, f32(2, 8, 16), f32(2, 16, 4))).weight_seconds == 0.0
    assert price(call(aten.matmul.default, f32(2, 8, 16), f32(16, 4))).weight_seconds > 0.0


def test_an_op_of_a_fused_kernel_moves_what_the_kernel_moves() -> None:
    op = op_of(call(aten.mul.Tensor, f32(1024, 1024), f32(1024, 1024)))
    whole = 4 * 2**20
    compiled = replace(DEVICE, execution="compile")
    inner = replace(op, fusion=Fusion((), False, False))
    assert op_cost(inner, 0.0, compiled) == OpCost(0.0, 0.0, 0.0, 0.0, 0.0, "memory")
    first = op_cost(replace(op, fusion=Fusion((1,), False, True)), 0.0, compiled)
    assert first.bytes_moved == whole
    assert first.forward_seconds == op_time(0.0, whole, DEVICE).seconds
    # Backward: the operand again, and its gradient.
    assert first.backward_seconds == op_time(0.0, 2.0 * whole, DEVICE).seconds
    last = op_cost(replace(op, fusion=Fusion((), True, False)), 0.0, compiled)
    assert last.forward_seconds == op_time(0.0, whole, DEVICE, starts=False).seconds
    # Eager runs one kernel for each op, whatever could be fused.
    assert op_cost(inner, 0.0, DEVICE) == op_cost(op, 0.0, DEVICE)
