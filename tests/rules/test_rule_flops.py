"""FLOPs of every product, forward and backward, equal what torch's counter sees when it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost.op_cost import op_flops
from autopar.op_call import OpCall
from autopar.rules import rule_for
from autopar.rules.language import Rule
from tests.rules.cases import CASES
from tests.rules.execution import as_list, call, op_call_of, run

PRODUCTS_TEXT = """
linear mm addmm bmm baddbmm matmul inner tensordot einsum conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d
"""


@pytest.mark.parametrize("name", PRODUCTS_TEXT.split())
def test_equal_to_torchs_counter(name: str) -> None:
    counted: list[float] = []

    @seed(2)
    @settings(max_examples=5, deadline=None, database=None)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        op, operands = op_call_of(CASES[name](data.draw))
        rule = rule_for(op)
        if rule is None or _as_elements(op, rule):
            return
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in operands]
        with FlopCounterMode(display=False) as forward:
            result = as_list(run(op.target, op.args, op.kwargs, leaves))[0]
        backward = 0
        if result.requires_grad:
            with FlopCounterMode(display=False) as counter:
                result.backward(torch.randn_like(result))
            backward = counter.get_total_flops()
        ours = op_flops(op, rule.flops)
        assert ours[0] == forward.get_total_flops()
        if op.named("groups", 1) == 1:  # see the test below
            assert ours[1] == backward
        counted.append(ours[0])

    examples()
    assert max(counted) > 0


def _as_elements(op: OpCall, rule: Rule) -> bool:
    """torch computes a product with a vector, or over dims of 1, by ops that its counter does not
    know."""
    vectors = op.op_name in ("matmul", "inner") and any(len(t.shape) == 1 for t in op.types)
    return vectors or not op.result.shape or 1 in rule.sizes.values() and "conv" not in op.op_name


def test_groups_divide_the_work_of_a_convolution() -> None:
    # torch's counter takes the gradient of a grouped weight for that of a whole one.
    x, w = torch.randn(2, 8, 6, requires_grad=True), torch.randn(4, 2, 3, requires_grad=True)
    op, _ = op_call_of(call(torch.ops.aten.conv1d.default, x, w, None, [1], [1], groups=4))
    rule = rule_for(op)
    assert rule is not None
    assert op_flops(op, rule.flops) == (2 * 2 * 4 * 6 * 2 * 3, 2 * 2 * 2 * 4 * 6 * 2 * 3)
