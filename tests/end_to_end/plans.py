"""Plans for toy models under pins, from one capture."""

from __future__ import annotations

import torch

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.plan_document import Plan
from autopar.workflow.verification import build_real


def search_plans(model: str, ranks: int, pins: list[str], global_batch: int = 8) -> list[Plan]:
    """One plan per text of pins, on `cpu:ranks` in float32."""
    module, source = build_real(model, None, 0)
    program = capture(module, source.example_inputs, name=source.name, dtype=torch.float32)
    plans = []
    for text in pins:
        outcome = search_program(
            program,
            Cluster.parse(f"cpu:{ranks}"),
            global_batch_size=global_batch,
            pins=text,
            precision="fp32",
        )
        assert outcome.plan is not None, text
        plans.append(outcome.plan)
    return plans
