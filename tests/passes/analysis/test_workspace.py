"""The workspace of an op is what its kernel really allocates beside its result."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import autopar.runtime.collectives  # noqa: F401 - registers the ops
from autopar.passes.analysis.workspace import backward_workspace, forward_workspace

ops = torch.ops.autopar
X = torch.empty(8, 16, 32, device="meta")
BYTES = 8 * 16 * 32 * 4


def call(target: object, result: torch.Tensor, *args: object) -> fx.Node:
    """A node `target(x, *args)` whose operand is `X`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X if result.dim() != 0 else torch.empty(64, 128, device="meta")
    node = graph.call_function(target, (x, *args))  # type: ignore[arg-type]
    node.meta["val"] = result
    return node


@pytest.mark.parametrize(
    ("name", "dim", "factor", "forward", "backward"),
    [
        ("all_gather", 0, 4, 0, 0),
        ("all_gather", 1, 4, 4, 4),
        ("reduce_scatter", 1, 0.25, 1, 1),
        ("slice", 1, 0.25, 0, 1),
    ],
)
def test_pieces_along_other_dims_are_joined_by_a_copy(
    name: str, dim: int, factor: float, forward: float, backward: float
) -> None:
    shape = [8, 16, 32]
    shape[dim] = int(shape[dim] * factor)
    node = call(getattr(ops, name).default, torch.empty(shape, device="meta"), dim, 4, "tp")
    assert forward_workspace(node) == forward * BYTES
    assert backward_workspace(node) == backward * BYTES


def test_losses() -> None:
    loss = torch.empty((), device="meta")
    split = call(ops.vocab_cross_entropy.default, loss, "target", -100, 0.0, 4, "tp")
    assert forward_workspace(split) == 64 * 128 * 4 and backward_workspace(split) == 0
    whole = call(torch.ops.aten.cross_entropy_loss.default, loss, "target")
    assert forward_workspace(whole) == 0 and backward_workspace(whole) == 64 * 128 * 4


def test_a_softmax_to_a_wider_type_widens_its_operand_and_its_gradient() -> None:
    wide = torch.empty(8, 16, 32, dtype=torch.float64, device="meta")
    for op in (torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int):
        node = call(op, wide, -1, torch.float64)
        assert forward_workspace(node) == 2 * BYTES and backward_workspace(node) == BYTES
        same = call(op, X, -1)
        assert forward_workspace(same) == backward_workspace(same) == 0


def test_other_ops_need_none() -> None:
    node = call(torch.ops.aten.relu.default, X)
    assert forward_workspace(node) == backward_workspace(node) == 0
