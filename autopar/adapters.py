"""Adapters of low rank (LoRA): the model that is trained instead when its own weights are frozen.

Hu et al. 2021, arXiv 2106.09685. Of PEFT, on every linear layer but the output head: all layers is
what trains as well as full training does (Dettmers et al. 2023, arXiv 2305.14314, section 4).
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

from torch import nn

from autopar.errors import UsageError

# MODEL+lora:16
_SUFFIX = re.compile(r"\+lora:(?P<rank>[^:+]*)$")
LARGEST_RANK = 65536


def split_adapters(text: str) -> tuple[str, int]:
    """A model's name without its adapters, and their rank (0: it has none)."""
    found = _SUFFIX.search(text)
    if found is None:
        return text, 0
    rank = found["rank"]
    if not (rank.isascii() and rank.isdecimal() and 0 < int(rank[:6]) <= LARGEST_RANK):
        raise UsageError(
            f"lora:{rank} is not a rank", next_step="give a whole number, as in MODEL+lora:16"
        )
    return text[: found.start()], int(rank)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Give the linear layers of `model` adapters, and freeze everything else.

    Raises `UsageError` where PEFT is missing, or there is nothing to adapt.
    """
    names = _linear_layers(model)
    if not names:
        raise UsageError(
            "the model has no linear layers that can get adapters",
            next_step="freeze and adapt it yourself: parameters that are not trained are planned "
            "without gradients and states",
        )
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names, lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on saving tied weights
        # "Low memory" makes adapters where the model is: on the meta device too.
        on_paper = any(p.is_meta for p in model.parameters())
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_paper)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """A model with adapters to plan for, on the meta device; `model` stays as it is.

    Raises `UsageError` as `add_adapters`, and for a model that is frozen in the main already.
    """
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    if 2 * trained < sum(p.numel() for p in parameters):
        raise UsageError(
            "most parameters are frozen already", next_step="train fewer of the others"
        )
    meta = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in parameters}
    same = {id(b): b for b in model.buffers()}
    try:
        found = copy.deepcopy(model, {**meta, **same})
    # What a module's own attributes can't do is theirs to say.
    except Exception as error:
        raise UsageError(
            f"the model can't be copied: {error}", next_step="give it adapters yourself"
        ) from error
    add_adapters(found, rank)
    return found


def _linear_layers(model: nn.Module) -> list[str]:
    """All but the output head, those that share a weight, and those inside torch's attention, which
    reads their weights itself."""
    modules = dict(model.named_modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    inside = tuple(
        f"{name}." if name else ""
        for name, module in modules.items()
        if isinstance(module, nn.MultiheadAttention)
    )
    holders: dict[int, int] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        name
        for name, module in modules.items()
        if name
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not head
        and not name.startswith(inside)
        and holders[id(module.weight)] == 1
    ]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UsageError("adapters need PEFT", next_step="pip install autopar[lora]") from error
    return peft
