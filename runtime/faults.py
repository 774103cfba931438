"""What a rank says when another one is gone: who failed, or who is silent, and where this one was.

A rank that fails in a step leaves its reason in the store that all ranks share, before its error
goes on. Others meet a connection that is closed, or a wait that runs out: they look there, and
raise one `RuntimeFault` in the place of gloo's or NCCL's error.
"""

from __future__ import annotations

import itertools
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.errors import AutoparError, RuntimeFault
from autopar.runtime.ranks import Ranks
from autopar.runtime.torch_compat import shared_store

# What gloo, NCCL and the store say of a peer that is gone, and of one that does not come.
_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process|ncclremoteerror|"
    r"ncclsystemerror|connection to .* lost|failed to (recv|send)|peer closed",
    re.IGNORECASE,
)
_LATE = re.compile(
    r"timed out waiting|timeout after|application timeout|wait timeout|ran for \d+ milli|"
    r"socket timeout",
    re.IGNORECASE,
)
# How long to wait for the word of other ranks, which meet the fault at about the same time.
_GRACE_SECONDS = 2.0
# Every rank makes its programs in the same order: words of an earlier one are not taken for this.
_NUMBERS = itertools.count()
_LOST = "lost its connection"
# Functions of torch that carry a collective out for another.
_CARRIERS = re.compile(r"^_|^wrapper$|^wait$|^__|^inner$")


class Faults:
    """The faults of one program's ranks. After the first one nothing more can be run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._key = f"autopar/fault/{next(_NUMBERS)}"
        self._failed = ""
        self._at = ""

    def at(self, where: str) -> None:
        """Where in the work of `during` this rank is now."""
        self._at = where

    @contextmanager
    def during(self, work: str) -> Iterator[None]:
        """Errors inside are told to the other ranks; a lost connection is a `RuntimeFault`.

        Errors that all ranks raise together go through as they are, and the program lives on.
        """
        if self._failed:
            raise RuntimeFault(
                f"{work} can't run: this program failed before ({self._failed})",
                next_step="start all ranks again, from the last checkpoint",
            )
        self._at = ""
        try:
            yield
        except AutoparError:
            raise
        except Exception as error:
            if self._ranks.mesh.size == 1:
                raise
            where = f"{work}, {self._at}" if self._at else work
            kind = _loss(error)
            if kind is None:
                self._failed = f"{where}: {type(error).__name__}: {_first_line(error)}"
                self._leave_word(f"failed in {self._failed}")
                raise
            if name := _collective(error):
                where += f" ({name})"
            self._failed = f"a rank was lost in {where}"
            self._leave_word(f"{_LOST} in {where}")
            raise self._fault(where, kind) from error

    def _leave_word(self, text: str) -> None:
        try:
            shared_store().set(f"{self._key}/{self._ranks.rank}", text)
        except Exception:  # the store's own process may be the one that died
            return

    def _fault(self, where: str, kind: str) -> RuntimeFault:
        words = self._words()
        failed = {r: w for r, w in words.items() if not w.startswith(_LOST)}
        here = f"rank {self._ranks.rank}, in {where}"
        if failed:
            rank, word = next(iter(sorted(failed.items())))
            return RuntimeFault(
                f"rank {rank} {word}; {here}, {kind}",
                next_step="mend what failed on that rank; its own log has the traceback",
            )
        silent = [r for r in range(self._ranks.mesh.size) if r not in words]
        silent = [r for r in silent if r != self._ranks.rank]
        among = f"it is among ranks {silent}, which left no word" if silent else "all left word"
        return RuntimeFault(
            f"another rank died or does not answer: {here}, {kind}; {among}",
            next_step="look at what those ranks printed last; a process that the system killed "
            "was often out of memory",
        )

    def _words(self) -> dict[int, str]:
        """What other ranks left, after a short wait: until one says why, or all have spoken."""
        deadline = time.monotonic() + _GRACE_SECONDS
        found: dict[int, str] = {}
        others = [r for r in range(self._ranks.mesh.size) if r != self._ranks.rank]
        while time.monotonic() < deadline and len(found) < len(others):
            try:
                store = shared_store()
                for rank in others:
                    if rank not in found and store.check([f"{self._key}/{rank}"]):
                        found[rank] = store.get(f"{self._key}/{rank}").decode()
            except Exception:  # as in `_leave_word`
                return found
            if any(not word.startswith(_LOST) for word in found.values()):
                return found
            time.sleep(0.1)
        return found


def _loss(error: BaseException | None) -> str | None:
    """How the connection was lost; None for any other error. A pipeline wraps what its stages
    raise."""
    while error is not None:
        if isinstance(error, RuntimeError):
            if _LATE.search(str(error)):
                return "waited in vain"
            if _GONE.search(str(error)):
                return "found its connection closed"
        error = error.__cause__
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def _collective(error: BaseException) -> str:
    """The collective that failed, as torch.distributed calls it; '' if autograd ran it."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    names = [f.name for f in frames if "/torch/distributed/" in f.filename]
    return next((n for n in reversed(names) if not _CARRIERS.search(n)), "")
