"""Run passes in order: time, verify, dump. Knows no pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autopar.errors import AutoparError, PassError
from autopar.parts import Parts


class Pass(Protocol):
    """A frozen value with its options bound; `run` returns the parts with what it says changed."""

    @property
    def name(self) -> str: ...

    def run(self, parts: Parts) -> Parts: ...


@dataclass(slots=True)
class PassReport:
    """Seconds of each pass, and the printed graphs after the pass that was asked for."""

    seconds: dict[str, float] = field(default_factory=dict)
    dumps: dict[str, str] = field(default_factory=dict)


def run_passes(
    parts: Parts,
    passes: Sequence[Pass],
    *,
    verify: Callable[[Parts, str], None] | None = None,
    dump_after: Sequence[str] = (),
) -> tuple[Parts, PassReport]:
    """Run all passes, `verify` after each. Failures come back as `PassError` naming the pass."""
    report = PassReport()
    for step in passes:
        start = time.perf_counter()
        try:
            parts = step.run(parts)
            if verify is not None:
                verify(parts, step.name)
        except AutoparError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {step.name} failed: {type(error).__name__}: {error}",
                next_step=f"look at the graph with `autopar passes MODEL --dump-after {step.name}`",
            ) from error
        report.seconds[step.name] = time.perf_counter() - start
        if step.name in dump_after:
            report.dumps[step.name] = parts.text()
    return parts, report
