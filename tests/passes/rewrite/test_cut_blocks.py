"""Blocks as graphs of their own: one for each kind, with slots that name the placeholders."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import FileCheck

from autopar.parts import Parts
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import CutBlocks
from tests.passes import toys


def cut(name: str) -> Parts:
    return CutBlocks().run(toys.start(name, toys.plan(name)))


def test_one_graph_for_each_kind() -> None:
    parts = cut("mlp")
    assert list(parts.graphs) == ["embed", "layers.0", "head"]
    FileCheck().check("layer_norm").check("linear").check("gelu").check("linear").check("add").run(
        parts.graphs["layers.0"].code
    )
    assert "# block layers.0 (x2)" in parts.text()


def test_slots() -> None:
    parts = cut("mlp")
    assert [(s.kind, s.name) for s in parts.slots["head"]] == [
        ("parameter", "head.weight"),
        ("value", "add_1"),
        ("value", "view_1"),
    ]
    for kind, graph in parts.graphs.items():
        assert len(parts.slots[kind]) == len(graph.graph.find_nodes(op="placeholder"))


def test_shared_values_and_the_count_of_targets() -> None:
    parts = cut("mlp")
    assert parts.shared is not None and parts.count is not None
    labels = toys.batch()["labels"]
    labels[0, :3] = -100
    ids, view = parts.shared(labels=labels, ids=toys.batch()["ids"])
    assert view.shape == (toys.BATCH * toys.SEQUENCE,)
    torch.testing.assert_close(ids, toys.batch()["ids"])
    (count,) = parts.count(labels)
    assert int(count) == labels.numel() - 3


def test_a_loss_that_is_no_mean_over_targets_has_no_count() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().sum()

    program = capture(Sum(), {"x": torch.ones(4, 4)})
    blocks = analyse_blocks(program)
    plan = toys.plan("mlp")
    parts = CutBlocks().run(Parts(program, plan, program.sizes, blocks=blocks))
    assert parts.count is None
