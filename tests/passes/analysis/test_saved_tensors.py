"""What an op keeps for its backward is what autograd keeps on real tensors."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from autopar.op_call import OpCall
from autopar.passes.analysis.saved_tensors import Saved, saved_by
from tests.rules.cases import CASES
from tests.rules.draws import real
from tests.rules.execution import as_list, call, op_call_of, run

aten = torch.ops.aten
NO_OP = {operator.getitem}
# Attention has a rule of its own, below. Norms without the batch's statistics keep nothing on CPU
# where the meta device counts two numbers a channel.
ELSEWHERE = {"scaled_dot_product_attention", "getitem", "batch_norm", "instance_norm"}


def seen(op: OpCall, operands: list[torch.Tensor]) -> tuple[set[int], bool, int]:
    """On real tensors: saved operands, whether the result is saved, bytes of other memory."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in operands]
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = as_list(run(op.target, op.args, op.kwargs, leaves))
    if not any(r.requires_grad for r in results):
        return set(), False, 0  # intermediate steps kept something, and it is gone with them
    of_operand = {t.untyped_storage().data_ptr(): i for i, t in enumerate(leaves)}
    of_result = {r.untyped_storage().data_ptr() for r in results} - set(of_operand)
    other = set(kept) - set(of_operand) - of_result
    size = sum(kept[p].untyped_storage().nbytes() for p in other)
    return {of_operand[p] for p in kept if p in of_operand}, bool(of_result & set(kept)), size


def claimed(saved: Saved) -> tuple[set[int], bool, int]:
    return set(saved.operands), saved.result, saved.extra_bytes


@pytest.mark.parametrize("name", sorted(set(CASES) - ELSEWHERE))
def test_saved_tensors_are_those_that_hooks_see(name: str) -> None:
    @seed(2)
    @settings(max_examples=6, deadline=None, database=None)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        op, operands = op_call_of(CASES[name](data.draw))
        assert claimed(saved_by(op)) == seen(op, operands), (op.op_name, op.types, op.args)

    examples()


def test_a_norm_keeps_the_statistics_of_the_batch() -> None:
    affine, rest = (real(8), real(8), None, None), (True, 0.1, 1e-5, False)
    op, operands = op_call_of(call(aten.batch_norm.default, real(4, 8, 3), *affine, *rest))
    assert claimed(saved_by(op)) == seen(op, operands) == ({0, 1}, False, 2 * 8 * 8)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_keeps_what_the_fused_cpu_kernel_keeps(causal: bool) -> None:
    # The CPU kernel runs for float32 without a mask. Its log-sum-exp is float32, one for a row and
    # head.
    q, k, v = (real(2, 4, 8, 16).detach().float().requires_grad_() for _ in range(3))
    op, operands = op_call_of(
        call(aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, causal)
    )
    assert claimed(saved_by(op)) == seen(op, operands) == ({0, 1, 2}, True, 4 * 2 * 4 * 8)


def test_attention_keeps_a_floating_mask_and_turns_a_boolean_one_into_it() -> None:
    q, k, v = (real(2, 4, 8, 16).detach().float().requires_grad_() for _ in range(3))
    rows = 4 * 2 * 4 * 8
    for mask, kept, extra in (
        (torch.zeros(8, 8), {0, 1, 2, 3}, rows),
        (torch.ones(8, 8, dtype=torch.bool), {0, 1, 2}, rows + 8 * 8 * 4),
    ):
        op, operands = op_call_of(call(aten.scaled_dot_product_attention.default, q, k, v, mask))
        assert claimed(saved_by(op)) == (kept, True, extra)
        assert seen(op, operands) == (kept, True, extra)


def test_nothing_is_kept_without_gradients_or_for_collectives() -> None:
    import autopar.runtime.collectives  # noqa: F401 - registers the ops

    def nothing(made: Any) -> bool:
        op, _ = op_call_of(made)
        return claimed(saved_by(op)) == (set(), False, 0)

    assert nothing(call(aten.mul.Tensor, real(4, grad=False), real(4, grad=False)))
    assert nothing(call(torch.ops.autopar.copy.default, real(4), "tp"))


def test_answers_are_remembered_by_call_not_by_node() -> None:
    op, _ = op_call_of(call(aten.mul.Tensor, real(4), real(4)))
    assert saved_by(op) is saved_by(op)
    frozen, _ = op_call_of(call(aten.mul.Tensor, real(4), real(4, grad=False)))
    assert claimed(saved_by(op)) == ({0, 1}, False, 0)
    assert claimed(saved_by(frozen)) == ({1}, False, 0)
