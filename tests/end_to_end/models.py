"""Toy models for end-to-end tests, in the form `file.py:function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MODELS = __file__
VOCABULARY, SEQUENCE = 128, 16
RATE = 0.3


def _causal(config: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config)
    # Random weights of order one: with the usual tiny initialisation many gradients are near zero.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    ids = torch.arange(4 * SEQUENCE).view(4, SEQUENCE) % VOCABULARY
    return model, {"input_ids": ids, "labels": ids.clone()}


def llama(**changes: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
    return _causal(LlamaConfig(**{**sizes, **changes}))


def llama_grouped() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return llama(num_key_value_heads=2)


def llama_three_heads() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Three heads: no degree of 2 or 4 divides them."""
    return llama(hidden_size=48, num_attention_heads=3, num_key_value_heads=3)


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config

    return _causal(
        GPT2Config(
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            vocab_size=VOCABULARY,
            attn_pdrop=dropout,
            embd_pdrop=dropout,
            resid_pdrop=dropout,
        )
    )


def gpt2_dropout() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return gpt2(RATE)


def qwen3() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import Qwen3Config

    return _causal(
        Qwen3Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        )
    )


def gemma2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import Gemma2Config

    return _causal(
        Gemma2Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            sliding_window=8,
            query_pre_attn_scalar=8,
        )
    )


class _Layered(nn.Module):
    """Tokens, some layers, a head with a loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Shared(nn.Module):
    """Each projection is applied to what comes in and to parameters of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(self.norm(x)) + self.first(self.positions))
        return x + self.second(h) * torch.tanh(self.second(self.positions))


class _Stopped(nn.Module):
    """No gradient comes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x.detach()))


def _layered(layers: list[nn.Module]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.arange(8 * SEQUENCE).view(8, SEQUENCE) % VOCABULARY
    return _Layered(layers), {"input_ids": ids, "labels": ids.clone()}


def shared_projections() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return _layered([_Shared() for _ in range(6)])


def stopped_gradient() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return _layered([_Shared(), _Shared(), _Shared(), _Stopped(), _Shared(), _Shared()])
