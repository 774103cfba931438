from __future__ import annotations

import pytest

from autopar.errors import UsageError
from autopar.units import (
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70GiB", 70 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5gib", 3 * 2**29),
        (" 512 MiB ", 512 * 2**20),
        ("123", 123),
        ("7B", 7),
        (".5KiB", 512),
        ("2TiB", 2**41),
    ],
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "70 GiBs", "-1GiB", "70G i B", "1e9", "70,5GiB", "nan"]
)
def test_parse_bytes_refuses_other_text(text: str) -> None:
    with pytest.raises(UsageError, match="not an amount of memory") as caught:
        parse_bytes(text)
    assert "70GiB" in caught.value.next_step


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (70 * 2**30, "70.0 GiB"),
        (-3 * 2**29, "-1.5 GiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (5e-9, "5.00 ns"),
        (1.234e-5, "12.3 us"),
        (0.00456, "4.56 ms"),
        (0.0099996, "10.0 ms"),
        (0.9999, "1.00 s"),
        (7.894, "7.89 s"),
        (59.99, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (10 * 86400, "10.0 days"),
        (-0.5, "-500 ms"),
    ],
)
def test_format_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_format_rates_and_counts() -> None:
    assert format_flops(4.12e14) == "412 TFLOP/s"
    assert format_flops(9.996e14) == "1.00 PFLOP/s"
    assert format_flops(0) == "0 FLOP/s"
    assert format_rate(4.5e11) == "450 GB/s"
    assert format_count(8.03e9) == "8.03 B"
    assert format_count(405.85e9) == "406 B"
    assert format_count(12) == "12"
