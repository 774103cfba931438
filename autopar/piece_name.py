"""Names of pieces of a parameter: `attn.c_attn.weight[:, 0:768]` holds those columns of it.

A fused projection (queries, keys and values in one matrix) is a parameter of the user's model; the
program computes with its pieces, as each is sharded by heads on its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PIECE = re.compile(r"^(.*)\[((?:\:, )*)(\d+):(\d+)\]$")


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries `start` to `stop` along `dim` of the parameter `whole`."""

    whole: str
    dim: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.whole}[{':, ' * self.dim}{self.start}:{self.stop}]"


def parse_piece(name: str) -> Piece | None:
    """The piece that a name means; None for the name of a whole parameter."""
    found = _PIECE.match(name)
    if not found:
        return None
    whole, dims, start, stop = found.groups()
    return Piece(whole, dims.count(":"), int(start), int(stop))


def by_whole(names: Iterable[str]) -> dict[str, list[Piece]]:
    """The pieces among `names` by the parameter that they make up, in order."""
    found: dict[str, list[Piece]] = {}
    for name in names:
        piece = parse_piece(name)
        if piece is not None:
            found.setdefault(piece.whole, []).append(piece)
    return {whole: sorted(pieces, key=lambda p: p.start) for whole, pieces in found.items()}
