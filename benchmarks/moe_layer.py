"""One layer of experts on eight GPUs: published forward and backward times next to prices.

Megatron-LM keeps baselines of single layers (its tests, moe_perf/baseline.json) with even routers
and three ways of exchanging rows. An all-to-all is priced as such; the kernels made for dispatch
send a token once to every rank that holds one of its experts, which is what is counted for them.
Nothing was fitted on these rows. Bursts of one layer run at higher clocks than training sustains.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from functools import cache
from math import comb
from pathlib import Path

import torch

from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.cost.collective import collective_time
from autopar.cost.matmul_efficiency import matmul_seconds
from autopar.passes.analysis.roofline import OpPrice, roofline
from autopar.passes.capture import capture
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from autopar.workflow.stand_in import Architecture, stand_in

RANKS, HEAD_SIZE, VOCABULARY = 8, 128, 1024
_TIMES = re.compile(r"dispatcher (\w+); forward ([\d.]+) ms, backward ([\d.]+) ms")
_SHARED = re.compile(r"shared expert (\d+)")
# Hopper: what is sustained, as a part of what a short run reaches (data/devices/h100.toml).
SUSTAINED = 0.87


def cluster() -> Cluster:
    """Eight H100 with fused kernels, even routers and the clocks of a short run."""
    found = Cluster.parse(f"h100:1x{RANKS}")
    rate = found.device.matmul_efficiency / SUSTAINED
    changes = {"execution": "compile", "even_experts": True, "matmul_efficiency": rate}
    return replace(found, device=replace(found.device, **changes))  # type: ignore[arg-type]


@cache
def experts_of_layer(
    hidden: int, inner: int, experts: int, topk: int, tokens: int
) -> list[OpPrice]:
    """The priced ops of a layer's experts over the ranks, router included."""
    heads = hidden // HEAD_SIZE
    kernels = {"fused_attention": True, "wide_loss": True}
    mixed = {"experts": experts, "topk": topk}
    shape = Architecture(hidden, heads, heads, inner, VOCABULARY, True, False, **kernels, **mixed)
    model, inputs = stand_in(shape, tokens, torch.bfloat16)
    program = capture(model, inputs, name="layer", dtype=torch.bfloat16)
    program = prepare(program, dict(program.sizes))
    costs = ModelCosts(program, cluster(), dict(program.sizes)).over(1, 1, RANKS)
    (layer,) = [k for n, k in costs.kinds.at(1).items() if n.startswith("layers")]
    priced = roofline(layer.graph, Axis(1, 1, cluster()))
    return [p for p in priced if "mlp" in p.path or p.op == "all_to_all"]


def dispatch_seconds(hidden: int, experts: int, topk: int, tokens: int) -> float:
    """One way: each token to every other rank with one of its experts, in 16 bits."""
    here = experts // RANKS
    met = RANKS * (1 - comb(experts - here, topk) / comb(experts, topk))
    sent = tokens * met * (RANKS - 1) / RANKS * hidden * 2
    return collective_time("dispatch", RANKS * sent, RANKS, 1, cluster())


def shared_seconds(hidden: int, inner: int, tokens: int) -> float:
    """Forward of an expert that every token takes."""
    device = cluster().device
    up = matmul_seconds(1, tokens, 2 * inner, hidden, "bfloat16", device)
    return up + matmul_seconds(1, tokens, hidden, inner, "bfloat16", device)


def layer_rows(truth: Path) -> list[str]:
    """Lines of a table of all rows in 16 bits; empty without the file."""
    path = truth / "megatron_moe_layer.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["precision"] == "bf16"]
    head = "| layer | exchange | forward ms, predicted | | backward ms, predicted | |"
    return [head, "|" + " --- |" * 6, *map(_line, rows), ""]


def _line(row: dict[str, str]) -> str:
    sizes = [int(row[k]) for k in ("hidden", "ffn", "n_experts", "topk", "seq")]
    hidden, _, experts, topk, tokens = sizes
    times, shared = _TIMES.search(row["notes"]), _SHARED.search(row["notes"])
    assert times is not None, row["notes"]
    way, *measured = times.groups()
    ops = experts_of_layer(*sizes)
    work = [p for p in ops if p.op != "all_to_all"]
    forward, backward = (
        sum(getattr(p.cost, f"{side}_seconds") for p in (ops if way == "a2a" else work))
        for side in ("forward", "backward")
    )
    if way != "a2a":
        both = 2 * dispatch_seconds(hidden, experts, topk, tokens)
        forward, backward = forward + both, backward + both
    beside = shared_seconds(hidden, int(shared[1]), tokens) if shared else 0.0
    found = (forward + beside, backward + 2 * beside)
    cells = [f"{row['model']} | {way}"]
    for seconds, text in zip(found, measured, strict=True):
        cells.append(f"{text}, {1e3 * seconds:.2f} | {1e3 * seconds / float(text) - 1:+.1%}")
    return "| " + " | ".join(cells) + " |"
