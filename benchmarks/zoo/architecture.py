"""One architecture of the zoo: a toy of it with the library's own code, and inputs to run it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH, SEQUENCE, VOCABULARY = 4, 16, 128

# Sizes of a toy language model; each configuration takes those that it knows.
LANGUAGE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Below this standard deviation a weight counts as initialised to almost nothing.
SMALL_DEVIATION = 0.05
TOY_DEVIATION = 0.1


@dataclass(frozen=True)
class Toy:
    """A model in training mode with real weights; `inputs` are keyword inputs of `BATCH` samples.

    `loss`: of models that return no loss: loss(outputs, **inputs that it names) -> scalar.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    loss: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Architecture:
    """`make` builds the toy, the same one after each `torch.manual_seed`."""

    name: str
    family: str
    make: Callable[[], Toy]


def configuration(kind: str, **sizes: Any) -> Any:
    """A transformers configuration without dropout; sizes that it does not know are left out."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]
    derived = {k for k, v in vars(known).items() if isinstance(v, property)}
    config = known(**{k: v for k, v in sizes.items() if k not in derived})
    without_dropout(config)
    return config


def without_dropout(config: Any) -> None:
    """Every probability to drop something becomes 0, so that two runs can be compared."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and any(w in name for w in ("drop", "pdrop", "mask_time")):
            setattr(config, name, 0.0)
        if hasattr(value, "model_type"):
            without_dropout(value)


def from_config(auto: str, config: Any) -> nn.Module:
    """The model of a configuration by an auto class of transformers, ready for a comparison."""
    import transformers

    model: nn.Module = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    return stirred(model)


def stirred(model: nn.Module) -> nn.Module:
    """The model in training mode with weights large enough that no gradient is near zero.

    Fresh language models have weights of 0.02 and less: with a few layers of width 32 most
    gradients would be rounding.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and float(parameter.std()) < SMALL_DEVIATION:
                parameter.normal_(std=TOY_DEVIATION)
    return model.train()


def tokens(rows: int = BATCH, length: int = SEQUENCE, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids, seeded; 0 to 3 are left out: they are often padding or markers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, vocabulary, (rows, length), generator=generator)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def class_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the logits of a classifier."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return nn.functional.cross_entropy(logits, labels)
