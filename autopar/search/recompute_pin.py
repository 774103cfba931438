"""The pin `recompute`: which blocks give their activations up and run again in the backward.

`none`, `full` (all of them, whole), `selective` (each in part, or not at all, as the search finds),
or these whole and no others: `recompute=model.layers.0+model.layers.1`. Without the pin each block
is recomputed whole, in part, or not at all, as the search finds.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.block_cost import FULL, ChainCost
from autopar.errors import UsageError
from autopar.search.block_names import check_block_names, names_of

if TYPE_CHECKING:
    from autopar.search.options import Pins

RECOMPUTE = ("none", "selective", FULL)


def recompute_value(text: str) -> str | tuple[str, ...]:
    """`none`, `selective`, `full` or names of blocks."""
    if text in RECOMPUTE:
        return text
    close = difflib.get_close_matches(text.lower(), RECOMPUTE, n=1)
    if close:
        raise UsageError(
            f"recompute={text} is not known",
            next_step=f"did you mean {close[0]}? choose one of {', '.join(RECOMPUTE)}, or name "
            "blocks",
        )
    return names_of("recompute", text)


def recompute_mode(pins: Pins) -> str:
    """What the inner searches are asked for: `auto`, one of `RECOMPUTE`; of named blocks `full`,
    as the others can't be recomputed (`pinned_chain`)."""
    if pins.recompute is None:
        return "auto"
    return pins.recompute if isinstance(pins.recompute, str) else FULL


def recomputes(pins: Pins) -> bool:
    """Whether some block has to be recomputed."""
    return recompute_mode(pins) == FULL


def named_blocks(pins: Pins) -> frozenset[str] | None:
    """The blocks that are recomputed whole while no other is; None: that is not pinned by name."""
    return frozenset(pins.recompute) if isinstance(pins.recompute, tuple) else None


def check_recompute(pins: Pins, names: Sequence[str]) -> None:
    """Raise `UsageError` where no block has such a name."""
    if isinstance(pins.recompute, tuple):
        check_block_names(pins.recompute, names, "recompute", RECOMPUTE)


def pinned_chain(chain: ChainCost, named: Collection[str] | None) -> ChainCost:
    """The prices of a chain in which the `named` blocks, and they alone, are recomputed."""
    if named is None:
        return chain
    blocks = tuple(replace(b, recomputed=b.name in named) for b in chain.blocks)
    return replace(chain, blocks=blocks)
