"""The model of a row of published measurements: one of the zoo that it names, or a stand-in."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.workflow.stand_in import Architecture, stand_in

if TYPE_CHECKING:
    import torch
    from torch import nn

DATA = Path(__file__).parent.parent / "data"


@cache
def _rules() -> list[dict[str, Any]]:
    return list(tomllib.loads((DATA / "models.toml").read_text(encoding="utf-8"))["model"])


def _rule(row: Mapping[str, str]) -> dict[str, Any]:
    """The first rule whose name is that of the row's model; empty when there is none."""
    name = row.get("model") or ""
    return next((r for r in _rules() if re.search(r["name"], name, re.IGNORECASE)), {})


@cache
def _config(zoo: str) -> dict[str, Any]:
    return dict(json.loads((DATA / "zoo" / f"{zoo}.json").read_text(encoding="utf-8")))


def zoo_model(row: Mapping[str, str]) -> str:
    """The zoo's name of the row's model; '' where the columns say what it is."""
    zoo = str(_rule(row).get("zoo", ""))
    if zoo:
        config = _config(zoo)
        sizes = config["num_hidden_layers"], config["hidden_size"]
        if (row.get("layers"), row.get("hidden")) != tuple(map(str, sizes)):
            return ""
    return zoo


def head_size(row: Mapping[str, str]) -> int:
    """Columns of a head of the row's model; 0 where it is the hidden size over the heads."""
    return int(_rule(row).get("head_size", 0))


def build(
    model: Architecture | str, sequence: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module on the meta device, in training mode, and inputs for it; `model`: an architecture
    or a name of the zoo."""
    if isinstance(model, Architecture):
        return stand_in(model, sequence, dtype)
    from autopar.models import resolve_model

    source = resolve_model(f"zoo:{model}", sequence=sequence, dtype=dtype)
    return source.model, source.example_inputs
