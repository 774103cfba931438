"""Recomputation is a mark on blocks of stages; a set of ops becomes the nodes that run again, and
the block then keeps what the analysis says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.errors import PlanError
from autopar.parts import Slot
from autopar.passes.analysis.recompute_frontier import recompute_frontier
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import back_pipeline
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.mark_recompute import MarkRecompute, rerun
from autopar.passes.rewrite.place import place
from autopar.plan_document import StagePlan
from autopar.runtime.selective_checkpoint import SelectiveCheckpoint
from autopar.stage_program import Rerun
from tests.passes import toys
from tests.passes.analysis.test_block_memory import real_operands


def test_exactly_the_planned_blocks_are_marked() -> None:
    names = [b.name for b in toys.blocks("mlp").chain]
    stages = (
        StagePlan(tuple(names[:2]), ("layers.0",)),
        StagePlan(tuple(names[2:]), ("layers.1", "head")),
    )
    parts, _ = run_passes(toys.start("mlp", toys.plan("mlp", stages=stages)), back_pipeline()[:-1])
    for stage in parts.stages:
        for block in stage.blocks:
            block.recompute = not block.recompute
    marked = MarkRecompute().run(parts)
    found = {b.name: b.recompute for s in marked.stages for b in s.blocks}
    assert found == {"embed": False, "layers.0": True, "layers.1": True, "head": True}
    # Blocks of one kind share a graph, not the mark.
    assert marked.stages[0].blocks[1].graph is marked.stages[1].blocks[0].graph


def rank_block(name: str, kind: str) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
    graph, slots = toys.block(name, kind)
    place(kind, graph, slots, {}, toys.placement("R"), 1)
    localize_shapes(graph, 1)
    return graph, slots


CASES = [
    ("mlp", "layers.0"),
    ("mlp", "head"),
    ("llama", "model.layers.0"),
    ("llama", "head"),
    ("gpt2", "transformer.h.0"),
    ("gemma2", "model.layers.0"),
    ("gemma2", "head"),
]
# On a CPU attention with dropout takes the unfused path, which keeps more than the fused kernels.
DROPOUT = ("gpt2_dropout", "transformer.h.0")


def storages() -> dict[int, int]:
    """Bytes of the storages of all tensors that are alive."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in found
        if t.device.type == "cpu"
    }


def test_a_block_keeps_what_the_analysis_says_of_each_corner() -> None:
    """On CPU tensors: forward, then let go of everything but the graph of the backward."""
    for name, kind in CASES:
        graph, slots = rank_block(name, kind)
        corners = recompute_frontier(graph, slots, toys.axis(1))
        assert corners
        operands = real_operands(graph)
        given = [
            s.kind == "value" and t.requires_grad for t, s in zip(operands, slots, strict=True)
        ]
        for point in corners:
            planned = rerun(graph, slots, point.ops, "")
            assert planned is not None
            kept = held(graph, planned, operands, given)
            assert kept == point.kept, (name, kind, point)


def held(
    graph: fx.GraphModule, planned: Rerun, operands: list[torch.Tensor], given: list[bool]
) -> int:
    # Parameters and constants stay outside; what the block is given is freed unless it is kept.
    outside = [t for t, own in zip(operands, given, strict=True) if not own]
    first = next((i for i, own in enumerate(given) if own), len(given))
    before = storages()
    inputs = [t.clone() if own else t for t, own in zip(operands, given, strict=True)][first:]
    run = SelectiveCheckpoint(graph, planned, lambda: operands[:first])
    results = run(*inputs)
    backward = [r.grad_fn for r in results if r.grad_fn is not None]
    del inputs, results
    found = sum(size for key, size in storages().items() if key not in before)
    assert backward and outside
    return found


def test_gradients_of_every_corner_are_those_of_the_block() -> None:
    for name, kind in (*CASES, DROPOUT):
        graph, slots = rank_block(name, kind)
        operands = real_operands(graph)
        wanted = [t for t in operands if t.requires_grad]

        def gradients(
            run: Callable[..., Any], operands: Any = operands, wanted: Any = wanted
        ) -> Any:
            torch.manual_seed(0)
            results = [r for r in run(*operands) if r.requires_grad]
            return torch.autograd.grad(
                sum(r.square().sum() for r in results), wanted, allow_unused=True
            )

        expected = gradients(graph)
        for point in recompute_frontier(graph, slots, toys.axis(1)):
            planned = rerun(graph, slots, point.ops, "")
            assert planned is not None
            found = gradients(SelectiveCheckpoint(graph, planned, list))
            for a, b in zip(found, expected, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b), (name, kind, point.ops)


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (("tanh", "relu"), r"names the op 'relu', which the block does not have"),
        (("getitem",), r"does not have"),
        (("dropout",), "can't run twice: it draws random numbers"),
    ],
)
def test_a_set_that_can_not_be_is_an_error(ops: tuple[str, ...], text: str) -> None:
    graph, slots = rank_block(*DROPOUT)
    with pytest.raises(PlanError, match=text):
        rerun(graph, slots, ops, "reruns['h']['set 1']")


def test_ops_without_memory_can_not_be_named() -> None:
    graph, slots = rank_block("llama", "model.layers.0")
    with pytest.raises(PlanError, match="'transpose', which makes no memory"):
        rerun(graph, slots, ("transpose",), "reruns")


def test_sets_are_marked_on_blocks_by_their_label() -> None:
    names = [b.name for b in toys.blocks("mlp").chain]
    stages = (StagePlan(tuple(names), ("layers.1",), {"layers.0": "light", "head": "heavy"}),)
    sets = {"layers.0": {"light": ("gelu",)}, "head": {"heavy": ("linear",)}}
    plan = replace(toys.plan("mlp", stages=stages), reruns=sets)
    parts, _ = run_passes(toys.start("mlp", plan), back_pipeline())
    by_name = {b.name: b for b in parts.stages[0].blocks}
    assert by_name["layers.0"].rerun == Rerun(("gelu",), (), ("linear",))
    assert by_name["layers.1"].rerun is None and by_name["layers.1"].recompute
    assert by_name["embed"].rerun is None
    assert "runs again in the backward: gelu" in parts.text()
    wrong = replace(plan, reruns={"layers.0": {"heavy": ("gelu",)}})
    with pytest.raises(PlanError, match="no set 'light'"):
        run_passes(toys.start("mlp", wrong), back_pipeline())
