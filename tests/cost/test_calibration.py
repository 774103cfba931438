"""Prices against a small sample of published rows, with bounds that a regression would break.

`benchmarks/calibration.py FOLDER` does the same with all rows; docs/calibration.md has the result.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.calibration import Case, page, percentile, quick_cases, summary, table

# Every second to fourth row of the published files, without one run on two nodes that was twice as
# slow as others on the same machines (AWS, EKS).
SAMPLE = Path(__file__).parent / "calibration_sample"

# file, part of the group's name -> (rows at least, median, 90th percentile) of |relative error|.
BOUNDS = [
    ("attention_kernels", "FlashAttention-2", 10, 0.03, 0.07),
    ("attention_kernels", "FlashAttention-3", 5, 0.04, 0.09),
    ("gemm_achieved", "DeepGEMM", 10, 0.08, 0.22),
    ("moe_dispatch_deepep", "", 8, 0.08, 0.12),
    ("nccl_collectives", "A100", 15, 0.1, 0.25),
    ("nccl_collectives", "H100", 6, 0.1, 0.25),
    ("nccl_collectives", "B200", 6, 0.1, 0.3),
]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return quick_cases(SAMPLE)[0]


@pytest.mark.parametrize(("file", "group", "rows", "median", "high"), BOUNDS)
def test_errors_stay_small(
    cases: list[Case], file: str, group: str, rows: int, median: float, high: float
) -> None:
    chosen = [c for c in cases if c.file == file and group in c.group and "below" not in c.group]
    found = summary(chosen)
    print(f"{file} {group}: {found[0]} rows, median {found[1]:.1%}, 90 % {found[2]:.1%}")
    assert found[0] >= rows
    assert found[1] <= median and found[2] <= high


def test_most_of_the_sample_was_not_fitted(cases: list[Case]) -> None:
    assert sum(not case.fitted for case in cases) > len(cases) / 2


def test_the_best_shapes_of_a_search_are_faster_than_what_is_sustained(cases: list[Case]) -> None:
    best = [c for c in cases if "upper bound" in c.group]
    assert best and all(0 < case.error < 0.35 for case in best)


def test_percentiles() -> None:
    values = [float(v) for v in range(1, 11)]
    assert (percentile(values, 0.9), percentile(values, 0.5), percentile([3.0], 0.9)) == (9, 5, 3)


def test_the_page_names_every_group_and_why_rows_are_left_out(cases: list[Case]) -> None:
    _, skipped = quick_cases(SAMPLE)
    text = page(cases, skipped)
    assert all(case.group in text for case in cases)
    assert "no device file for" in text and "held out" in text
    assert len(table(cases)) > 10
