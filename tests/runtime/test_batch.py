"""A batch is taken whole or as a dp rank's part; anything else is an error that says what fits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from autopar.errors import PlanError
from autopar.runtime.batch import BatchRules
from autopar.runtime.ranks import Ranks
from autopar.stage_program import ValueSpec


class Here:
    device = torch.device("cpu")


RANKS = cast(Ranks, Here())
INPUTS = {
    "ids": ValueSpec("ids", (2, 5), torch.int64),
    "mask": ValueSpec("mask", (1, 5), torch.float32),
}


def rules(dp: int = 2) -> BatchRules:
    return BatchRules(INPUTS, frozenset({"mask"}), microbatches=3, dp=dp, dp_index=dp - 1)


def batch(rows: int, **changes: Any) -> dict[str, Any]:
    ids = torch.arange(rows * 5).reshape(rows, 5)
    return {"ids": ids, "mask": torch.ones(1, 5), **changes}


def test_global_batch_is_cut_to_the_own_rows() -> None:
    cut, whole = rules().local(batch(12), RANKS)
    assert torch.equal(cut["ids"], batch(12)["ids"][6:])
    assert whole["mask"].shape == (1, 5)


def test_own_rows_are_taken_as_they_are() -> None:
    cut, _ = rules().local(batch(6), RANKS)
    assert torch.equal(cut["ids"], batch(6)["ids"])
    cut, _ = rules().local(batch(6, ids=batch(6)["ids"].int()), RANKS)
    assert cut["ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (batch(7), r"7 rows, expected \[12, 5\] \(the global batch\) or \[6, 5\]"),
        (batch(6, ids=torch.zeros(6, 4, dtype=torch.int64)), r"shape \[6, 4\]"),
        (batch(6, ids=torch.zeros(6, 5)), "torch.float32, the program was made for torch.int64"),
        (batch(6, extra=torch.ones(6)), r"missing \[\], unknown \['extra'\]"),
        ({"ids": batch(6)["ids"]}, r"missing \['mask'\]"),
        (batch(6, ids=[1, 2]), "'ids' is a list"),
    ],
)
def test_wrong_batches(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rules().local(wrong, RANKS)
