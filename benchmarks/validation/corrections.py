"""Rows of the table as their sources have them: `corrections.toml` says what differs, and where."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

CORRECTIONS = Path(__file__).parent / "corrections.toml"
Row = dict[str, str]


@cache
def _all() -> tuple[Mapping[str, Any], ...]:
    return tuple(tomllib.loads(CORRECTIONS.read_text(encoding="utf-8"))["correction"])


def matches(conditions: Mapping[str, str], row: Row) -> bool:
    """Whether all patterns are found in their columns, without regard to case."""
    return all(re.search(p, row.get(k) or "", re.IGNORECASE) for k, p in conditions.items())


def corrected(row: Row) -> Row:
    """`row` with the columns that its source states otherwise; the row itself is not changed."""
    found = dict(row)
    for correction in _all():
        if matches(correction["when"], row):
            found.update(correction["columns"])
    return found


def correction_counts(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """(what was read again and where, rows that it changes), for corrections of any row."""
    counts = Counter(c["why"] for row in rows for c in _all() if matches(c["when"], row))
    return list(counts.items())
