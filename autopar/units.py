"""Bytes, seconds and rates as people write and read them."""

from __future__ import annotations

import math
import re

from autopar.errors import UsageError

_NUMBER = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*$", re.IGNORECASE)
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_FACTORS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}


def parse_bytes(text: str) -> int:
    """`70GiB`, `80 GB`, `512MiB`, `1.5gib` or plain bytes; raises `UsageError` on anything else."""
    found = _NUMBER.match(text)
    factor = _FACTORS.get(found.group(2).lower()) if found else None
    if not found or factor is None:
        raise UsageError(
            f"{text!r} is not an amount of memory",
            next_step="write a number with B, KiB, MiB, GiB, TiB or KB, MB, GB, TB, such as 70GiB",
        )
    return round(float(found.group(1)) * factor)


def check_time_limit(seconds: float) -> None:
    """Raise `UsageError` for a limit that is negative or no number."""
    if not seconds >= 0:
        raise UsageError(f"time limit of {seconds} seconds", next_step="give 0 seconds or more")


def check_sequence(length: int | None) -> None:
    """Raise `UsageError` for a sequence without positions."""
    if length is not None and length < 1:
        raise UsageError(f"a sequence of {length}", next_step="give at least one position")


def format_bytes(count: float) -> str:
    """In the largest binary unit that keeps the number at 1 or above: `70.0 GiB`, `512 B`."""
    size = abs(count)
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # A number that would round up to 1024 of the smaller unit belongs to this one.
        if size >= unit - unit / 2048 * (unit > 2**10):
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Three digits in the unit that suits: `12.3 us`, `4.56 ms`, `3 min 20 s`, `2 h 05 min`."""
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 59.95:
        for name, unit in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if size >= 0.9995 * unit:
                return f"{_three_digits(seconds / unit)} {name}"
        return f"{_three_digits(seconds / 1e-9)} ns"
    sign = "-" if seconds < 0 else ""
    whole = round(size)
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(size / 60)
    if minutes < 48 * 60:
        return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
    return f"{sign}{size / 86400:.1f} days"


def format_flops(rate: float) -> str:
    """A rate with three digits: `412 TFLOP/s`, `1.23 PFLOP/s`."""
    return f"{_scaled(rate)}FLOP/s"


def format_count(count: float) -> str:
    """A number of elements: `8.03 B`, `405 B`, `1.2 M`; billions are `B`, as the field writes."""
    for name, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= 0.9995 * unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:.0f}"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth in decimal units, as links are sold: `450 GB/s`."""
    return f"{_scaled(bytes_per_second)}B/s"


def _scaled(value: float) -> str:
    for name, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= 0.9995 * unit:
            return f"{_three_digits(value / unit)} {name}"
    return f"{_three_digits(value)} "


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, 2 - magnitude)
    # Rounding can carry into the next power of ten (9.996 -> 10.0), which takes a decimal away.
    magnitude = math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, 2 - magnitude)}f}"
