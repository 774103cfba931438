"""Names of blocks that a user gives."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from autopar.errors import UsageError

SHOWN = 8


def names_of(pin: str, text: str) -> tuple[str, ...]:
    """The names in `A+B`, each once; raises `UsageError` for an empty or repeated one."""
    names = tuple(part.strip() for part in text.split("+"))
    if "" in names or len(set(names)) < len(names):
        raise UsageError(
            f"{pin}={text}: an empty or repeated name",
            next_step="give names of blocks as A+B, each once",
        )
    return names


def check_block_names(
    given: Sequence[str], names: Sequence[str], what: str, words: Sequence[str] = ()
) -> None:
    """Raise `UsageError` for a name that no block of the chain `names` has; `what` comes before
    it. `words`: what could be given in place of names."""
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"blocks are {_some(names)}"
            if words and not close:
                hint = f"choose one of {', '.join(words)}, or name blocks: {_some(names)}"
            raise UsageError(f"{what} {name!r}: no such block", next_step=hint)


def _some(names: Sequence[str]) -> str:
    """All of them, or the first and last ones of many."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    first, last = names[: SHOWN - 2], names[-2:]
    return f"{', '.join(first)}, … {', '.join(last)} ({len(names)} in all)"
