"""What a block keeps, in bytes, is what hooks see when the block really runs on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.parts import Slot
from autopar.passes.analysis.block_memory import BlockMemory, block_memory
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from tests.passes import toys

LAYER = "layers.0"
HIDDEN = 4 * toys.BATCH * toys.SEQUENCE * toys.WIDTH  # bytes of a value of the model's width


def analysed(name: str, kind: str) -> tuple[fx.GraphModule, tuple[Slot, ...], BlockMemory]:
    graph, slots = toys.block(name, kind)
    place(kind, graph, slots, {}, toys.placement("R"), 1)
    localize_shapes(graph, 1)
    return graph, slots, block_memory(graph, slots)


def real_operands(graph: fx.GraphModule) -> list[torch.Tensor]:
    """CPU tensors for the placeholders, and CPU constants and factories in the graph."""
    for node in graph.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", torch.device("cpu"))
    graph.recompile()
    operands = []
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if value.is_floating_point():
            made = torch.randn(value.shape, dtype=value.dtype)
        else:
            made = torch.zeros(value.shape, dtype=value.dtype)
        operands.append(made.requires_grad_(bool(node.meta.get("requires_grad"))))
    return operands


def measured(graph: fx.GraphModule, slots: tuple[Slot, ...]) -> int:
    """Bytes of distinct memory that autograd keeps, parameters and shared values left out."""
    operands = real_operands(graph)
    outside = {
        t.untyped_storage().data_ptr()
        for t, s in zip(operands, slots, strict=True)
        if s.kind != "value" or not t.requires_grad
    } | {b.untyped_storage().data_ptr() for b in graph.buffers()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = graph(*operands)
    found = sum(size for pointer, size in kept.items() if pointer not in outside)
    del results  # until here what it keeps is alive: no address is used twice
    return found


CASES = [
    (name, kind)
    for name, kinds in {
        "mlp": ("embed", "layers.0", "head"),
        "llama": ("embed", "model.layers.0", "head"),
        "gpt2": ("embed", "transformer.h.0", "head"),
        "qwen3": ("model.layers.0",),
        "gemma2": ("embed", "model.layers.0", "head"),
    }.items()
    for kind in kinds
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_saved_bytes_are_those_that_hooks_see(name: str, kind: str) -> None:
    graph, slots, memory = analysed(name, kind)
    assert memory.saved == measured(graph, slots)


def test_a_layer_by_hand() -> None:
    _, _, memory = analysed("mlp", LAYER)
    # Input (read by the norm), normed input, mean and rstd, before and after the activation.
    rows = 4 * toys.BATCH * toys.SEQUENCE
    assert memory.saved == HIDDEN + HIDDEN + 2 * rows + 4 * HIDDEN + 4 * HIDDEN
    assert memory.inputs == HIDDEN
    assert memory.shared == 0
    assert memory.per_node["gelu"] == 4 * HIDDEN and memory.per_node["add"] == 0


def test_parameters_and_shared_values_are_not_counted_as_saved() -> None:
    graph, slots, memory = analysed("llama", "model.layers.0")
    tables = sum(
        n.meta["val"].nbytes
        for n, s in zip(graph.graph.find_nodes(op="placeholder"), slots, strict=True)
        if s.kind == "value" and not n.meta["requires_grad"]
    )
    assert memory.shared == tables > 0


def test_the_worst_moment_holds_at_least_the_largest_gradient() -> None:
    _, _, memory = analysed("mlp", LAYER)
    # At the gelu's backward its wide gradient in and out are alive, and most of what is saved.
    assert memory.transient >= 4 * HIDDEN
    assert memory.transient <= memory.saved + 9 * HIDDEN


def test_a_rank_keeps_its_slices() -> None:
    _, _, whole = analysed("mlp", LAYER)
    graph, slots = toys.block("mlp", LAYER)
    place(LAYER, graph, slots, toys.MEGATRON, toys.placement("R"), 2)
    insert_collectives(graph, toys.placement("R"), 2)
    localize_shapes(graph, 2)
    text = graph.code
    memory = block_memory(graph, slots)
    assert memory.saved == whole.saved - 4 * HIDDEN  # the two wide values are halves
    assert graph.code == text
