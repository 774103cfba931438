"""What a divided backward keeps, in bytes, is what is there when it really runs on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from autopar.passes.analysis.delayed_gradients import DividedBackward
from autopar.runtime.divided_backward import input_backward
from tests.passes.analysis.test_block_memory import HIDDEN, analysed, real_operands

LAYER = "layers.0"


def divided(name: str, kind: str) -> DividedBackward:
    return analysed(name, kind)[2].divided


def test_gradients_of_the_results_of_ops_that_read_weights_wait() -> None:
    """Of x + down(gelu(up(norm(x)))): the norm's, up's (four times as wide), and down's."""
    assert divided("mlp", LAYER).delayed == (1 + 4 + 1) * HIDDEN


@pytest.mark.parametrize(("name", "kind"), [("mlp", LAYER), ("llama", "model.layers.0")])
def test_waiting_bytes_are_those_that_autograd_keeps(name: str, kind: str) -> None:
    graph, slots, memory = analysed(name, kind)
    operands = real_operands(graph)
    pairs = list(zip(operands, slots, strict=True))
    weights = [torch.nn.Parameter(t) for t, s in pairs if s.kind == "parameter"]
    replaced = iter(weights)
    operands = [next(replaced) if s.kind == "parameter" else t for t, s in pairs]
    outputs = [o for o in graph(*operands) if o.requires_grad]
    inputs = [t for t, s in pairs if s.kind == "value" and t.requires_grad]
    given = [torch.randn_like(o) for o in outputs]
    _, second = input_backward(outputs, given, inputs, weights)
    caught = {
        g.untyped_storage().data_ptr(): g.untyped_storage().nbytes()
        for group in second._groups
        for gradients in group.gradients
        for g in gradients
        if g is not None
    }
    assert memory.divided.delayed == sum(caught.values())
    assert memory.divided.most >= memory.divided.delayed


def test_what_is_behind_the_last_weight_is_loose() -> None:
    """A loss needs its inputs in the first half only; behind a layer's last matrix is an add."""
    assert divided("mlp", LAYER).loose == 0
    graph, _, memory = analysed("mlp", "head")
    assert 0 < memory.divided.loose < memory.saved, graph.graph
