"""Prices of the same model in another precision, with a shorter sequence, on another cluster."""

from __future__ import annotations

from typing import Any

import torch

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.program import Program
from autopar.search.result import SearchResult
from tests.workflow.test_activation_formula import LENGTH, Gpt

SEQUENCE = LENGTH // 16


def captured(dtype: torch.dtype) -> Program:
    ids = torch.empty(2, SEQUENCE, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Gpt(2)
    return capture(model, {"ids": ids, "labels": ids}, name="gpt", dtype=dtype)


def solved(limit: int, program: Program, **more: Any) -> SearchResult:
    cluster = Cluster.parse("h100:1x1")
    asked: dict[str, Any] = {
        "global_batch_size": 4,
        "memory_limit": limit,
        "optimizer": "sgd",
        **more,
    }
    return search_program(program, cluster, **asked).result


def test_half_the_sequence_is_solved_as_a_request_of_its_own() -> None:
    program = captured(torch.float32)
    least = solved(1000, program).infeasible
    assert least is not None
    limit = least.smallest_bytes - 1
    told = solved(limit, program).infeasible
    assert told is not None
    remedies = {r.change: r for r in told.relaxations}
    assert not any(change.startswith("precision") for change in remedies if remedies[change].fits)
    short = solved(limit, program, sequence=SEQUENCE // 2, explain=False)
    assert short.choice is not None
    half = remedies["half the sequence"]
    assert half.fits and half.step_seconds == short.step_seconds
    assert half.peak_bytes == max(short.choice.peaks) <= limit


def test_another_precision_is_captured_once() -> None:
    asked = []

    def recapture(precision: str, adapters: int) -> Program:
        asked.append((precision, adapters))
        return captured(torch.bfloat16)

    told = solved(1000, captured(torch.float32), recapture=recapture).infeasible
    assert told is not None
    assert any(r.change == "precision bf16-mixed" for r in told.relaxations)
    assert asked == [("bf16-mixed", 0), ("fp32", 16), ("bf16-mixed", 16)]
