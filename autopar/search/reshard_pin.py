"""The pin `reshard`: which blocks of ZeRO-3 give their gathered parameters up after each forward.

`all` of them, `none`, or these: `reshard=model.layers.0+model.layers.1`. The others are kept
gathered from their first forward of a step to their last backward. `auto` leaves it to the search,
as it is without any pin; `zero=3` alone asks for what the name stands for elsewhere, `all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.errors import UsageError
from autopar.interleaving import CHUNKED
from autopar.search.block_names import check_block_names, names_of

if TYPE_CHECKING:
    from autopar.search.options import Pins

RESHARD = ("all", "none", "auto")


def reshard_value(text: str) -> str | tuple[str, ...]:
    """`all`, `none`, `auto` or names of blocks."""
    if text in RESHARD:
        return text
    if text.lower() in RESHARD:
        raise UsageError(f"reshard={text}", next_step=f"write reshard={text.lower()}")
    return names_of("reshard", text)


def kept_gathered(pins: Pins, names: Sequence[str]) -> frozenset[str] | None:
    """The blocks of the chain `names` that are kept gathered; None: that is free to choose."""
    if pins.reshard == "auto" or (pins.reshard is None and pins.zero is None):
        return None
    if isinstance(pins.reshard, tuple):
        return frozenset(names) - set(pins.reshard)
    return frozenset(names if pins.reshard == "none" else ())


def needs_resharding(pins: Pins) -> bool:
    """Whether it is pinned what only ZeRO-3 has."""
    return pins.reshard not in (None, "auto")


def check_reshard(pins: Pins, names: Sequence[str]) -> None:
    """Raise `UsageError` where no parameters are gathered block by block, or no block has such a
    name."""
    if pins.reshard is None:
        return
    if isinstance(pins.reshard, tuple):
        check_block_names(pins.reshard, names, "reshard")
    told = f"reshard={pins.reshard if isinstance(pins.reshard, str) else '+'.join(pins.reshard)}"
    if pins.zero not in (None, 3):
        raise UsageError(
            f"{told} with zero={pins.zero}: only ZeRO-3 reshards blocks after their forward",
            next_step="pin zero=3, or free one of the two",
        )
    if pins.dp is not None and pins.dp * (pins.cp or 1) == 1:
        raise UsageError(
            f"{told} with dp x cp = 1: there is nothing to shard over",
            next_step="pin a dp of at least 2, or free one of the two",
        )
    if pins.reshard not in ("all", "auto") and (pins.schedule in CHUNKED or (pins.chunks or 1) > 1):
        raise UsageError(
            f"{told} with {pins.schedule or 'interleaved'} chunks, whose blocks are all resharded",
            next_step="pin schedule=1f1b or gpipe, or reshard=all",
        )
