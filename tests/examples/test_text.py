"""examples/text.py: the same seed gives the same bytes of real text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # `text` and `chart` are common names: leave none behind for another test.
    for name in ("text", "chart"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_batches_are_windows_of_readable_text() -> None:
    from text import VOCABULARY, batches, corpus

    assert len(corpus()) > 100_000
    (batch,) = batches(3, 40, steps=1, seed=0)
    assert batch["input_ids"].shape == (3, 40) and batch["input_ids"].dtype == torch.int64
    assert int(batch["input_ids"].max()) < VOCABULARY
    whole = bytes(corpus().tolist())
    assert all(bytes(row.tolist()) in whole for row in batch["input_ids"])
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


def test_seed_decides_the_batches() -> None:
    from text import batches

    def tokens(seed: int) -> list[torch.Tensor]:
        return [batch["input_ids"] for batch in batches(2, 16, steps=4, seed=seed)]

    assert all(torch.equal(a, b) for a, b in zip(tokens(1), tokens(1), strict=True))
    assert not torch.equal(tokens(1)[0], tokens(2)[0])
    assert not torch.equal(tokens(1)[0], tokens(1)[1])


def test_chart_marks_where_curves_coincide_and_where_not() -> None:
    from chart import chart

    same = chart([3.0, 2.0, 1.0], [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], height=3)
    assert [line[10:].split() for line in same.splitlines()[:3]] == [["●"], ["●"], ["●"]]
    apart = chart([3.0, 1.0], [[3.0, 2.0]], height=3)
    assert [line[10:].strip() for line in apart.splitlines()[:3]] == ["●", "x", "o"]
