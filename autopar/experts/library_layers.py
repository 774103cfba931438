"""Layers of transformers that send all tokens to all experts, with choices alone.

Llama4TextMoe of transformers 5: every expert gets every token times its score, which is 0 where the
expert was not chosen. Its experts have no biases and multiply by what they project, so of zeros
they make zeros, and the gradients there are zeros too: leaving such rows out is exact.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from autopar.experts.declaration import Activation, Layout, Routed

Tensor = torch.Tensor
_LLAMA4 = "transformers.models.llama4.modeling_llama4"


def library_experts(module: nn.Module) -> tuple[Layout, Activation] | None:
    """Where the experts of a module are, for a class of the library that says nothing of it."""
    if not _is(module, _LLAMA4, "Llama4TextExperts", ["hidden_states"]):
        return None
    up, down = "gate_up_proj", "down_proj"
    return Layout(up, down, transposed=True, gated=True, weighs_inputs=True), _gated


def library_layer(module: nn.Module) -> Routed | None:
    """The forward with choices alone of a layer whose experts are `library_experts`."""
    if not _is(module, _LLAMA4, "Llama4TextMoe", ["hidden_states"]):
        return None
    experts = getattr(module, "experts", None)
    if experts is None or library_experts(experts) is None:
        return None
    return _llama4


def _is(module: nn.Module, home: str, name: str, parameters: list[str]) -> bool:
    """Whether a class is the one of that name, or inherits from it, and its forward takes that."""
    kind = type(module)
    if not any((k.__module__, k.__name__) == (home, name) for k in kind.__mro__):
        return False
    return list(inspect.signature(kind.forward).parameters)[1:] == parameters


def _gated(module: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    made: Tensor = up * module.act_fn(gate)
    return made


def _llama4(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    hidden = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(hidden)
    # Of the logits, as the router itself chooses: scores may be equal where logits are not.
    index = logits.detach().topk(module.top_k, dim=1).indices
    shared = module.shared_expert(hidden)
    return shared + module.experts(hidden, index, scores.gather(1, index)), logits
