"""Toy language models on the meta device, and plans for them that nothing runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.workflow.prepare import prepare


def prepared(
    build: Callable[[], nn.Module], rows: int, length: int, name: str
) -> tuple[nn.Module, Program]:
    """What `build` makes on meta, captured in float32 with tokens and labels of [rows, length]."""
    with torch.device("meta"):
        model = build()
        example = {n: torch.empty(rows, length, dtype=torch.int64) for n in ("input_ids", "labels")}
    program = capture(model, example, name=name, dtype=torch.float32)
    return model, prepare(program, program.sizes)


def planned(
    program: Program,
    ranks: int,
    global_batch: int,
    pins: str,
    memory_limit: str = "1TiB",
    optimizer: str = "adamw",
    spare_experts: int = 0,
    cluster: str = "",
) -> Plan:
    """The plan of the search on so many CPU ranks (or `cluster`), without what explains it."""
    outcome = search_program(
        program,
        Cluster.parse(cluster or f"cpu:{ranks}"),
        global_batch_size=global_batch,
        pins=pins,
        memory_limit=memory_limit,
        optimizer=optimizer,
        spare_experts=spare_experts,
        explain=False,
    )
    assert outcome.plan is not None
    return outcome.plan
