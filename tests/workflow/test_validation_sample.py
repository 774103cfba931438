"""Predictions of a few published runs, with bounds that a regression of the model would break.

`tests/data/validation_sample.csv` holds rows with their sources in `source` and `cite`. All rows
there are: `make validate`, docs/validation.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from autopar.workflow.configuration_table import RowPrediction, predict_rows, read_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def validation_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "validation"))


def compared(table: str):
    """Every row of a sample beside its prediction, and why some have none."""
    from comparison import Comparison

    _, rows = read_table(ROOT / "tests" / "data" / table)
    pairs = zip(rows, predict_rows(rows), strict=True)
    found = [Comparison(i, row, p) for i, (row, p) in enumerate(pairs)]
    return found, [c.prediction.status for c in found if not c.prediction.expressible]


@pytest.mark.timeout(900)
def test_published_runs():
    from comparison import memory_errors, spearman, time_errors

    found, reasons = compared("validation_sample.csv")
    assert reasons == ["inexpressible: 8-bit or smaller products"] * 2
    known = [c for c in found if c.known_recompute]
    seconds, memory = time_errors(known), memory_errors(known)
    assert seconds.count >= 25 and memory.count >= 10
    assert seconds.median < MEDIAN_TIME and seconds.p90 < P90_TIME, [
        (c.row["source"], c.time_error) for c in known
    ]
    assert memory.median < MEDIAN_MEMORY and memory.largest < LARGEST_MEMORY
    assert abs(seconds.bias) < 0.03
    wrong = [
        c for c in found if c.prediction.expressible and c.ran != (c.prediction.status == "fits")
    ]
    assert not wrong, [(c.row["source"], c.prediction) for c in wrong]
    sweep = [c for c in known if c.row["hidden"] == "14336" and c.time_error is not None]
    order = spearman(
        [c.prediction.step_seconds / float(c.row["gbs"]) for c in sweep],
        [c.measured_seconds / float(c.row["gbs"]) for c in sweep],
    )
    assert order > 0.7


@pytest.mark.timeout(600)
def test_published_runs_with_experts():
    """Grok-1 on 32 to 1024 GPUs, with ep, cp, tp and interleaved stages; no row was fitted on."""
    from comparison import time_errors

    found, reasons = compared("expert_sample.csv")
    assert reasons == ["inexpressible: experts over ep and tp ranks together (etp is not tp)"]
    seconds = time_errors(found)
    assert seconds.count == 4
    assert seconds.median < 0.03 and seconds.largest < 0.10, [c.time_error for c in found]
    assert all(c.prediction.breakdown["ep_comm"] > 0 for c in found if c.prediction.expressible)


MEDIAN_TIME, P90_TIME = 0.045, 0.10
MEDIAN_MEMORY, LARGEST_MEMORY = 0.04, 0.10


def comparison(predicted: float, peak: float, status: str = "fits", **row: str):
    from comparison import Comparison

    seen = RowPrediction(status, predicted, int(peak * 2**30), breakdown={"compute": predicted})
    return Comparison(0, {"tags": "dense rc_full", **row}, seen)


def test_statistics():
    from comparison import Errors, fit_counts, spearman, under_predicted

    assert Errors.of([]) is None
    found = Errors.of([0.1, -0.2, 0.3, -0.4, 0.0])
    assert (found.count, found.median, found.largest, found.bias) == (5, 0.2, 0.4, 0.0)
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert math.isnan(spearman([1, 1], [1, 2]))
    rows = [
        comparison(1, 10, step_time_norm_s="2", peak_mem_gib="10.5"),
        comparison(1, 10, peak_mem_gib="11"),
        comparison(1, 10, status="oom", oom="1"),
        comparison(1, 10, oom="0", status="oom"),
    ]
    assert under_predicted(rows) == (1, 2)
    assert rows[0].time_error == pytest.approx(-0.5)
    assert fit_counts(rows) == {
        (True, True): 2, (True, False): 1, (False, False): 1, (False, True): 0,
    }  # fmt: skip


def test_rows_are_completed_from_their_sources():
    from corrections import corrected, correction_counts

    row = {
        "source": "BigScience BLOOM prequel topology sweep",
        "heads": "",
        "notes": "section 'Final round comparison'; 02-23",
    }
    found = corrected(row)
    assert (found["heads"], found["period"], row["heads"]) == ("64", "before 02-25", "")
    other = {**row, "source": "Another sweep"}
    assert corrected(other) == other
    assert sum(count for _, count in correction_counts([row, other])) == 2


def test_rows_with_experts_have_a_part_of_their_own():
    from document import write_document

    common = {"source": "S", "n_gpus": "8", "gbs": "8", "seq": "128", "gpu": "g", "ep": "8"}
    rows = [
        comparison(1.2, 10, step_time_norm_s="1", tags="moe ep", model="a", **common),
        comparison(1.2, 10, step_time_norm_s="1", tags="dense", model="b", **common),
    ]
    part = write_document(rows, 1.0).split("## Mixtures of experts")[1].split("\n## ")[0]
    assert "1 of 1 rows are predicted" in part and "S, a, g x8, s128, ep8" in part
    assert "S, b" not in part


def test_the_document_has_every_part():
    from document import write_document

    common = {
        "source": "S 25.01",
        "n_gpus": "8",
        "gbs": "8",
        "seq": "128",
        "model": "m",
        "gpu": "g",
    }
    rows = [
        comparison(1.0 + i / 10, 10, step_time_norm_s="1", peak_mem_gib="9", **common)
        for i in range(3)
    ]
    text = write_document(rows, 1.0)
    assert "| step time, recomputation known | 3 | 10.0 | 20.0 | 20.0 | +10.0 |" in text
    assert "predicted right for 3 of 3 (goal 95 %): 3 of 3 that fitted, 0 of 0 out of" in text
    assert "| S: rc_full | 3 |" in text and "unexplained; compute" in text
