"""Numbers that only the report needs: fractions, ratios, amounts of work, counted words."""

from __future__ import annotations

import math

from autopar.units import format_flops


def flops_text(flops: float) -> str:
    """`2.5e12` -> `2.50 TFLOP`."""
    return format_flops(flops).removesuffix("/s")


def percent_text(fraction: float) -> str:
    """`0.123` -> `12.3 %`; what is positive is never shown as zero."""
    if fraction == 0:
        return "0 %"
    if 0 < abs(fraction) < 0.0005:
        return "<0.1 %"
    return f"{fraction * 100:.1f} %"


def relative_text(ratio: float) -> str:
    """`1.08` -> `8.0 % slower`."""
    if abs(ratio - 1) < 5e-4:
        return "equally fast"
    if ratio >= 2:
        return f"{ratio:.1f}× as long"
    return f"{percent_text(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"


def count_text(value: float) -> str:
    """`12345.6` -> `12,346`; small values keep three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else _digits(value)


def plural(count: int, word: str, many: str = "") -> str:
    """`1 stage`, `4 stages`."""
    return f"{count:,} {word if count == 1 else many or word + 's'}"


def _digits(value: float) -> str:
    """Three significant digits without an exponent."""
    places = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, places)}f}"
