"""`autopar evaluate`: what a configuration costs in which every decision is given."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import Cluster
from autopar.commands.plan import default_precision
from autopar.cost.setting import EVALUATED_PRECISION
from autopar.errors import UsageError
from autopar.models import resolve_model
from autopar.passes.capture import capture
from autopar.units import format_bytes, format_seconds
from autopar.workflow.configuration_pins import configuration_from_pins
from autopar.workflow.configuration_table import predict_table
from autopar.workflow.evaluator import Evaluator, Prediction
from autopar.workflow.prepare import prepare


@dataclass(frozen=True)
class EvaluateRequest:
    """One model and configuration, as given."""

    model: str
    cluster: str
    sequence: int | None
    global_batch: int
    pins: str


def evaluate_command(request: EvaluateRequest, *, as_json: bool) -> int:
    """Print time and memory of a configuration; exit code 5 when it does not fit."""
    prediction, name = predict(request)
    if as_json:
        print(json.dumps({"model": name, **to_json(prediction)}, indent=2))
    else:
        _print(name, prediction)
    return 0 if prediction.fits else 5


def predict(request: EvaluateRequest) -> tuple[Prediction, str]:
    """The prediction and the model's name."""
    cluster = Cluster.parse(request.cluster)
    usual = default_precision(request.model, cluster) or "bf16-mixed"
    # Precision decides the dtype of the capture, so pins are read once before it.
    sequence = request.sequence or 0
    first = configuration_from_pins(
        request.pins,
        cluster,
        sequence=sequence,
        global_batch=request.global_batch,
        precision=usual,
    )
    dtype = getattr(torch, EVALUATED_PRECISION[first.precision].dtype)
    source = resolve_model(request.model, sequence=request.sequence, dtype=dtype)
    program = capture(source.model, source.example_inputs, name=source.name, dtype=dtype)
    sizes = dict(program.sizes)
    if request.sequence is not None and sizes.get("sequence") != request.sequence:
        if "sequence" not in program.symbols:
            raise UsageError(
                f"the model was captured with a fixed sequence of {sizes.get('sequence')}",
                next_step=f"give example inputs of sequence {request.sequence}",
            )
        sizes["sequence"] = request.sequence
    configuration = configuration_from_pins(
        request.pins,
        cluster,
        sequence=sizes.get("sequence", 1),
        global_batch=request.global_batch,
        precision=usual,
    )
    return Evaluator(prepare(program, sizes)).predict(configuration), source.name


def to_json(p: Prediction) -> dict[str, Any]:
    """The document of one prediction: seconds, bytes."""
    c, device = p.configuration, p.configuration.cluster.device
    samples = c.mesh.dp * c.microbatch * c.microbatches
    dtype = EVALUATED_PRECISION[c.precision].dtype
    peak = device.flops.get(dtype, device.flops["float32"])
    return {
        "status": "fits" if p.fits else "oom",
        "cluster": c.cluster.name,
        "mesh": c.mesh.to_dict(),
        "sequence": c.sequence,
        "global_batch": samples,
        "microbatch": {"size": c.microbatch, "count": c.microbatches},
        "schedule": c.schedule,
        "chunks": c.chunks,
        "zero": c.zero,
        "recompute": c.recompute,
        "precision": c.precision,
        "optimizer": c.optimizer,
        "boundary": p.boundary,
        "step_seconds": p.step_seconds,
        "tokens_per_second_per_gpu": samples * c.sequence / p.step_seconds / c.cluster.size,
        "mfu": p.flops_per_sample * samples / p.step_seconds / c.cluster.size / peak,
        "time_breakdown": p.evaluation.time_breakdown,
        "memory_per_stage": [m.to_dict() for m in p.evaluation.memory_per_stage],
        "peak_bytes": {
            "allocated": p.footprint.allocated_bytes,
            "reserved": p.footprint.reserved_bytes,
            "device": p.footprint.device_bytes,
            "needed": p.footprint.needed_bytes,
        },
        "device_memory_bytes": device.memory_bytes,
        "parts": [{"blocks": len(s.blocks), "first": s.blocks[0]} for s in p.parts],
    }


def _print(name: str, p: Prediction) -> None:
    c, device = p.configuration, p.configuration.cluster.device
    print(f"{name} on {c.cluster.name}: {'fits' if p.fits else 'does not fit'}")
    print(f"  step      {format_seconds(p.step_seconds)}")
    for purpose, seconds in p.evaluation.time_breakdown.items():
        if seconds > 0:
            share = seconds / p.step_seconds
            print(f"    {purpose:<10}{format_seconds(seconds):>12} {share:6.1%}")
    f = p.footprint
    print(
        f"  memory    {format_bytes(f.allocated_bytes)} allocated,"
        f" {format_bytes(f.reserved_bytes)} reserved where there is room;"
        f" {format_bytes(f.needed_bytes)} needed of {format_bytes(device.memory_bytes)}"
        " on the device"
    )


def table_command(source: Path, out: Path, workers: int | None) -> int:
    """Predict every row of a table; always exit code 0: what does not fit is an answer too."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} rows ", end="", file=sys.stderr, flush=True)

    count = workers or max(1, min(8, os.cpu_count() or 1))
    found = predict_table(source, out, workers=count, progress=show)
    good = [p for p in found if p.expressible]
    fits = sum(p.status == "fits" for p in good)
    print(
        f"{len(found)} rows: {fits} fit, {len(good) - fits} do not, "
        f"{len(found) - len(good)} can't be expressed; written to {out}"
    )
    return 0
