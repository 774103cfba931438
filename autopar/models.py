"""From the MODEL of the command line to a module and example inputs.

zoo:NAME           a configuration shipped in data/zoo, built on the meta device
hf:PATH            a Hugging Face config.json, or the folder that holds it; nothing is downloaded
file.py:function   a function without arguments that returns (model, example_inputs),
                   (model, example_inputs, loss_fn), or a Hugging Face model alone
MODEL+lora:16      any of these, frozen, with adapters of rank 16 (`autopar.adapters`)
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.adapters import add_adapters, split_adapters
from autopar.errors import UsageError
from autopar.loss_function import LossFunction
from autopar.model_function import model_from_function
from autopar.units import check_sequence

ZOO = Path(__file__).parent / "data" / "zoo"
EXAMPLE_BATCH = 2
DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True)
class ModelSource:
    """A module, what to call it with, and what makes a loss of its outputs (None: it does itself).

    `zoo:` and `hf:` models are on the meta device in training mode, and so are their inputs.
    `build` makes the same module again on a real device with freshly initialised weights (None when
    the model came from a function: it is whatever that function made).
    """

    name: str
    model: nn.Module
    example_inputs: dict[str, Any]
    build: Callable[[str], nn.Module] | None = None
    loss_fn: LossFunction | None = None


def zoo_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in ZOO.glob("*.json")))


def resolve_model(text: str, *, sequence: int | None, dtype: torch.dtype) -> ModelSource:
    """The model that `text` names, with inputs of batch 2 and `sequence` tokens.

    `sequence` None means the longest that the model allows, at most 2048. `dtype` is that of the
    parameters; buffers keep theirs (rotary tables need float32). Neither touches a model from a
    function. Raises `UsageError` for a name, file or sequence that can't be used.
    """
    text, rank = split_adapters(text)
    found = _without_adapters(text, sequence, dtype)
    return _adapted(found, rank) if rank else found


def _without_adapters(text: str, sequence: int | None, dtype: torch.dtype) -> ModelSource:
    kind, colon, rest = text.partition(":")
    check_sequence(sequence)
    if kind == "zoo" and colon:
        text, config = text.lower(), _zoo_config(rest)
    elif kind == "hf" and colon:
        config = _read_config(rest)
    elif ".py:" in text:
        return _function_source(text, sequence)
    else:
        near = difflib.get_close_matches(text.lower(), zoo_names(), n=3)
        raise UsageError(
            f"model {text!r} is not understood",
            next_step=f"did you mean {' or '.join(f'zoo:{name}' for name in near)}?"
            if near
            else "write zoo:NAME, hf:PATH (a config.json or its folder) or file.py:function",
        )
    return _hf_source(text, config, sequence, dtype)


def _adapted(source: ModelSource, rank: int) -> ModelSource:
    add_adapters(source.model, rank)
    name, plain = f"{source.name}+lora:{rank}", source.build
    if plain is None:
        return replace(source, name=name)

    def build(device: str) -> nn.Module:
        model = plain(device)
        add_adapters(model, rank)
        return model

    return replace(source, name=name, build=build)


def _zoo_config(name: str) -> dict[str, Any]:
    path = ZOO / f"{name.lower()}.json"
    if name.lower() not in zoo_names():
        near = difflib.get_close_matches(name.lower(), zoo_names(), n=3, cutoff=0.5)
        raise UsageError(
            f"no model {name!r} in the zoo",
            next_step=f"did you mean {' or '.join(f'zoo:{n}' for n in near)}?"
            if near
            else f"choose one of {', '.join(zoo_names())}",
        )
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _read_config(text: str) -> dict[str, Any]:
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"hf:{text}: no config.json at {path}",
            next_step="give the path of a config.json or its folder on disk; nothing is downloaded",
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", next_step="repair the file") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise UsageError(
            f"{path} has no model_type", next_step="give the config.json of a transformers model"
        )
    return document


def _hf_source(
    name: str, document: dict[str, Any], sequence: int | None, dtype: torch.dtype
) -> ModelSource:
    config = _config(name, document)
    length = _sequence(name, config, sequence)

    def build(device: str) -> nn.Module:
        return _build(name, config, device, dtype)

    return ModelSource(name, build("meta"), _token_inputs(length), build)


def _config(name: str, document: dict[str, Any]) -> Any:
    """The transformers configuration of a config.json document, set up for training."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise UsageError(
            f"model {name!r} needs transformers", next_step="pip install autopar[hf]"
        ) from error
    kind = document["model_type"]
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        raise UsageError(
            f"{name}: this transformers has no model type {kind!r}",
            next_step=f"close ones are {', '.join(near)}" if near else "upgrade transformers",
        )
    with _quiet():
        try:
            config = CONFIG_MAPPING[kind].from_dict(dict(document))
        # Configurations validate in many ways; any failure is the file's.
        except Exception as error:
            raise UsageError(
                f"{name}: the configuration is not valid: {error}", next_step="repair the file"
            ) from error
    config.use_cache = False
    return config


def _build(name: str, config: Any, device: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    # Through Any: transformers annotates only part of what it exports.
    auto: Any = transformers.AutoModelForCausalLM
    with _quiet(), torch.device(device):
        try:
            # Built in float32 so that buffers such as rotary frequencies are computed in it.
            model: nn.Module = auto.from_config(config, dtype=torch.float32)
        # Each architecture checks its configuration in its own way; any failure is the config's.
        except Exception as error:
            raise UsageError(
                f"{name}: {config.model_type!r} can't be built as a causal language model: {error}",
                next_step="write a function that returns (model, example_inputs): file.py:function",
            ) from error
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    config.dtype = dtype
    return model.train()


def _sequence(name: str, config: Any, sequence: int | None) -> int:
    """The sequence length to use; checks it against the positions that the model has."""
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if sequence is None:
        return min(limit or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)
    if sequence < 2:
        raise UsageError(f"sequence of {sequence} tokens", next_step="give at least 2")
    if limit is not None and sequence > limit:
        raise UsageError(
            f"sequence of {sequence} tokens, but {name} has max_position_embeddings {limit}",
            next_step=f"use --seq {limit} or less, or raise it in a copy of the config (hf:PATH)",
        )
    return sequence


def _token_inputs(length: int) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(EXAMPLE_BATCH, length, dtype=torch.int64, device="meta")
        for key in ("input_ids", "labels")
    }


def _function_source(text: str, sequence: int | None) -> ModelSource:
    model, inputs, loss_fn = model_from_function(text)
    if inputs is None:
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise UsageError(
                f"{text} returned a {type(model).__name__} without example inputs",
                next_step="return (model, example_inputs), with the inputs as a dict of tensors",
            )
        device = next(model.parameters()).device
        tokens = _token_inputs(_sequence(text, config, sequence))
        inputs = {key: torch.zeros_like(value, device=device) for key, value in tokens.items()}
    return ModelSource(text, model, inputs, loss_fn=loss_fn)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers: its advice on generation or caching does not concern a planner."""
    from transformers import utils

    logging: Any = utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
