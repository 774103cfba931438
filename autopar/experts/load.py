"""How many rows each expert of a layer got, and what that says of the routing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path
from typing import Any

from autopar.errors import UsageError


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """`rows[e]`: rows (a token once for each of its choices) of expert e; `ranks`: over how many
    ranks the experts are split, each with as many as the next. `order`: the experts in the order
    of the ranks that hold them, where they are not neighbours; every rank has as many places in it,
    some without an expert (-1), and what is in several gets an equal part of its rows in each.
    `dropped`: rows above the capacity
    of their experts, which are in none of `rows`."""

    rows: tuple[float, ...]
    ranks: int = 1
    order: tuple[int, ...] = ()
    dropped: float = 0

    @property
    def mean(self) -> float:
        return sum(self.rows) / len(self.rows)

    @property
    def busiest_expert(self) -> int:
        return max(range(len(self.rows)), key=lambda e: self.rows[e])

    @property
    def expert_imbalance(self) -> float:
        """The largest load of an expert over the mean of all; 1 when even, or without rows."""
        return max(self.rows) / self.mean if self.mean else 1.0

    @property
    def of_ranks(self) -> tuple[float, ...]:
        """Rows of each rank."""
        ranks, rows = self.ranks, self.rows
        if self.order:
            copies = Counter(self.order)
            rows = tuple(rows[e] / copies[e] if e >= 0 else 0 for e in self.order)
        bounds = [r * len(rows) // ranks for r in range(ranks + 1)]
        return tuple(sum(rows[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))

    @property
    def rank_imbalance(self) -> float:
        """The largest load of a rank over the mean; 1 when even, or without rows."""
        total = sum(self.rows)
        return max(self.of_ranks) * self.ranks / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Of the experts' shares, over that of even ones: 1 even, 0 all rows to one expert."""
        total = sum(self.rows)
        if not total or len(self.rows) == 1:
            return 1.0
        shares = [r / total for r in self.rows if r]
        return max(0.0, -sum(s * log(s) for s in shares)) / log(len(self.rows))

    @property
    def dropped_share(self) -> float:
        """Of all rows that the router chose, those that were dropped."""
        total = sum(self.rows) + self.dropped
        return self.dropped / total if total else 0.0

    @property
    def idle(self) -> tuple[int, ...]:
        """Experts without a row."""
        return tuple(e for e, rows in enumerate(self.rows) if not rows)


def checked_load(
    load: Mapping[str, Sequence[float]], experts: int | None = None
) -> dict[str, tuple[float, ...]]:
    """Rows by layer, as read from a file or given by a user.

    `experts`: how many each layer has to have, if known. Raises `UsageError` naming the layer and
    expert of a load that is negative or no number, or the layer of another length.
    """
    if not isinstance(load, Mapping) or not load:
        raise UsageError(
            f"a load is a mapping of layers to rows per expert, not {type(load).__name__}"
            + (" without layers" if isinstance(load, Mapping) else ""),
            next_step="give what expert_load() of a program returns",
        )
    return {str(layer): _checked(str(layer), rows, experts) for layer, rows in load.items()}


def _checked(layer: str, rows: Sequence[float], experts: int | None) -> tuple[float, ...]:
    if isinstance(rows, str) or not isinstance(rows, Sequence) or not rows:
        raise UsageError(
            f"the load of layer {layer!r} is no list of rows per expert",
            next_step="give one number for each expert",
        )
    if experts is not None and len(rows) != experts:
        raise UsageError(
            f"the load of layer {layer!r} has {len(rows)} numbers, there are {experts} experts",
            next_step=f"give {experts} numbers, one for each expert",
        )
    for expert, value in enumerate(rows):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not isfinite(value) or value < 0:
            raise UsageError(
                f"the load of expert {expert} of layer {layer!r} is {value!r}",
                next_step="give a finite number that is not negative",
            )
    return tuple(rows)


def read_layers(path: str | Path) -> Any:
    """The JSON of a file with something for each layer, unchecked.

    Raises `UsageError` when there is no such file or it is no JSON.
    """
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(
            f"the file {path} can't be read: {error.strerror}", next_step="give a JSON file"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"the file {path} is no JSON: {error}",
            next_step='write {"layer": [rows of expert 0, ...], ...}',
        ) from error


@contextmanager
def of_file(path: str | Path) -> Iterator[None]:
    """Errors about what was read name the file it is from."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", next_step=error.next_step) from error


def read_load(path: str | Path, experts: int | None = None) -> dict[str, tuple[float, ...]]:
    """`checked_load` of a file; its errors name the file."""
    given = read_layers(path)
    with of_file(path):
        return checked_load(given, experts)
