"""Only models made of library code are captured by replay without being asked."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.passes.capture import capture
from autopar.passes.capture_library import of_libraries
from autopar.passes.capture_repeats import Repeats

STATE = types.SimpleNamespace(scale=1.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * STATE.scale


class Stack(nn.Module):
    """Hands its layers state in a way that no look at a layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            STATE.scale = 3.0 if number == 3 else 1.0
            x = layer(x)
        return x.square().mean()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        vocab_size=32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def test_what_is_of_libraries() -> None:
    assert of_libraries(llama()) and of_libraries(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert not of_libraries(Stack()) and not of_libraries(nn.Sequential(Layer()))
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert not of_libraries(nn.Sequential(patched))


def test_a_method_put_into_a_library_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    assert of_libraries(nn.ReLU())
    monkeypatch.setattr(nn.ReLU, "forward", forward)
    assert not of_libraries(nn.ReLU())


@pytest.mark.parametrize(("model", "replays"), [(llama, True), (Stack, False)])
def test_only_those_are_replayed(
    model: Any, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    plain = Repeats.__init__

    def noted(self: Repeats, twin: nn.Module) -> None:
        asked.append(True)
        plain(self, twin)

    monkeypatch.setattr(Repeats, "__init__", noted)
    ids = torch.zeros(4, 8, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids} if replays else {"x": torch.ones(4, 8)}
    program = capture(model(), inputs)
    assert bool(asked) == replays
    if not replays:
        scales = [n.args[1] for n in program.graph.nodes if "mul" in n.name]
        assert scales.count(3.0) == 1
