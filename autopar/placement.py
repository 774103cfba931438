"""Where a value lives on one mesh axis, for its forward value and for its gradient.

| text   | forward value                   | gradient                        |
| ------ | ------------------------------- | ------------------------------- |
| `R`    | whole on every rank             | whole on every rank             |
| `R*`   | whole on every rank             | a term of a sum on every rank   |
| `S(d)` | slice along dim d               | slice along dim d               |
| `P`    | a term of a sum on every rank   | whole on every rank             |

`R*` exists because a rank that uses a whole value for its own slice of the work
produces only its own part of that value's gradient. Keeping it apart from `R` makes
"a partial gradient treated as a whole one" a type error instead of a wrong number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError, UsageError

_SHARD = re.compile(r"^S\((\d+)\)$")


@dataclass(frozen=True, slots=True)
class Placement:
    """One of `R`, `R*`, `S(dim)`, `P`; compares by value, prints as its text form."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    __repr__ = __str__

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_whole(self) -> bool:
        """The forward value is complete on every rank (`R` or `R*`)."""
        return self.kind in ("R", "R*")

    @property
    def gradient_is_partial(self) -> bool:
        return self.kind == "R*"

    def local_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape of a rank's piece of a value of global `shape`; the dim must divide."""
        if not self.is_shard:
            return shape
        if shape[self.dim] % ranks:
            raise PlanError(
                f"dim {self.dim} of size {shape[self.dim]} does not divide over {ranks} ranks",
                next_step="choose a degree that divides it, or replicate the value",
            )
        return tuple(s // ranks if i == self.dim else s for i, s in enumerate(shape))

    @staticmethod
    def parse(text: str) -> Placement:
        """Inverse of `str`; raises `PlanError` on anything else."""
        if text in ("R", "R*", "P"):
            return Placement(text)
        found = _SHARD.match(text)
        if found:
            return Shard(int(found.group(1)))
        raise PlanError(
            f"unknown placement {text!r}", next_step="use one of R, R*, S(dim), P, for example S(1)"
        )


Replicate = Placement("R")
ReplicatePartialGrad = Placement("R*")
Partial = Placement("P")


def Shard(dim: int) -> Placement:  # noqa: N802 - the field writes it as a type
    """Slice along `dim` (counted from 0)."""
    return Placement("S", dim)


def boundary_of(text: str, shapes: Collection[Sequence[int]]) -> Placement:
    """The placement between blocks of a pin; raises `UsageError` where what passes between them,
    of these shapes, has no such dim."""
    pinned, fewest = Placement.parse(text), min(map(len, shapes), default=0)
    if pinned.is_shard and shapes and pinned.dim >= fewest:
        raise UsageError(
            f"boundary={text}: what passes between blocks has {fewest} dims",
            next_step="give R, or S(1) for sequence parallelism",
        )
    return pinned
