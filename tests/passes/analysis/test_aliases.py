"""Writes in place: who shares memory, what a value is computed from, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.op_call import Bindings
from autopar.passes.analysis.aliases import ancestors, memory_roots, written
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import cut_shared
from autopar.program import Program


class Masked(nn.Module):
    """Builds a mask with a write into a view, outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 6, device=x.device)
        mask[:, 1:] = 3.0
        for layer in self.layers:
            x = layer(x) + mask
        return x.square().mean()


def _program(model: nn.Module) -> Program:
    return capture(model, {"x": torch.randn(4, 6)})


class Diagonal(Masked):
    """A write through a view that capture leaves as it is."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(6, 6, device=x.device)
        mask.diagonal().fill_(3.0)
        for layer in self.layers:
            x = layer(x) @ mask
        return x.square().mean()


def test_writes_are_ancestors_of_what_they_change() -> None:
    program = _program(Diagonal())
    writes = [n for n in program.graph.nodes if written(n)]
    assert writes and all(not n.users for n in writes)
    base = memory_roots(program.graph)[written(writes[0])[0]]
    assert set(writes) <= ancestors(program.graph, [base])


def test_shared_values_hold_what_was_written() -> None:
    program = _program(Masked())
    blocks = analyse_blocks(program)
    shared = cut_shared(program, blocks, Bindings(program.symbols, {**program.sizes, "batch": 2}))
    assert shared is not None
    for node in shared.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", torch.device("cpu"))
    shared.recompile()
    inputs = [torch.randn(2, 6) for _ in shared.graph.find_nodes(op="placeholder")]
    values = shared(*inputs)
    expected = torch.tensor([0.0, 3, 3, 3, 3, 3]).expand(2, 6)
    assert any(v.shape == expected.shape and torch.equal(v, expected) for v in values)


class WritesInLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask.diagonal().fill_(3.0)
        return x + mask


def test_a_write_inside_a_block_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), WritesInLayer(), nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    with pytest.raises(CaptureError, match="in place"):
        analyse_blocks(_program(Model()))
