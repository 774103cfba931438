"""`autopar plan --clusters A,B,...`: how much to rent, and of what.

The best plan on every cluster, and which of them nothing else beats in both the time of a step and
what it takes (GPU-hours, or money where a price per GPU-hour is given).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.api import COMPUTE, search_program
from autopar.api import default_precision as precision_of
from autopar.cluster import Cluster
from autopar.commands.plan import (
    PlanRequest,
    default_precision,
    plan_command,
    resolved,
    take_precision,
)
from autopar.errors import InfeasibleError, UsageError
from autopar.passes.capture import capture
from autopar.plan_document import Plan
from autopar.program import Program

# h100:1x8..16x8, cpu:2..8
_RANGE = re.compile(
    r"(?P<name>[^:]+):(?P<first>\d+)(x(?P<each>\d+))?\.\.(?P<last>\d+)(x(?P<most>\d+))?$"
)


@dataclass(frozen=True)
class Comparison:
    """What `--clusters`, `--price` and `--steps` say, as given."""

    clusters: str
    prices: str
    steps: int


def comparison(clusters: str | None, prices: str, steps: int) -> Comparison | None:
    """What was asked for; None for a plan on one cluster, which has no price."""
    if clusters is None and prices:
        raise UsageError("--price without --clusters", next_step="give both, or none of them")
    return Comparison(clusters, prices, steps) if clusters is not None else None


@dataclass(frozen=True)
class Offer:
    """A cluster to rent, what it costs per GPU-hour (None: not given), and the plan for it.

    `plan` is None where there is none: `reason` says why.
    """

    cluster: Cluster
    price: float | None
    plan: Plan | None
    reason: str = ""

    @property
    def step_seconds(self) -> float | None:
        return None if self.plan is None else float(self.plan.predicted["step_seconds"])

    def gpu_hours(self, steps: int) -> float | None:
        """GPU-hours of `steps` optimizer steps."""
        seconds = self.step_seconds
        return None if seconds is None else seconds * steps * self.cluster.size / 3600

    def cost(self, steps: int) -> float | None:
        """What the GPU-hours of `steps` optimizer steps cost."""
        hours = self.gpu_hours(steps)
        return None if hours is None or self.price is None else hours * self.price

    def row(self, steps: int, best: bool) -> dict[str, Any]:
        """The offer as one line of the comparison."""
        found: dict[str, Any] = {
            "cluster": self.cluster.name,
            "gpus": self.cluster.size,
            "fits": self.plan is not None,
        }
        if self.plan is None:
            return {**found, "why": self.reason}
        predicted = self.plan.predicted
        return {
            **found,
            "step_seconds": self.step_seconds,
            "gpu_hours": self.gpu_hours(steps),
            "cost": self.cost(steps),
            "tokens_per_second_per_gpu": predicted["tokens_per_second_per_gpu"],
            "mfu": predicted["mfu"],
            "plan": f"{self.plan.mesh} ZeRO-{self.plan.zero}, "
            f"recompute {self.plan.recompute_label}",
            "frontier": best,
        }


def expand_clusters(text: str) -> list[str]:
    """`h100:2x8..16x8,a100-80:4x8`: the names. A range doubles the number of nodes; from one node
    of fewer GPUs (`h100:1x1..4x8`) those of the node come first.

    Raises `UsageError` for a range that is none.
    """
    names: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        names += _range_of(part) if ".." in part else [part] if part else []
    if not names:
        raise UsageError("--clusters names none", next_step="write for example h100:4x8,h100:8x8")
    return list(dict.fromkeys(names))


def _range_of(part: str) -> list[str]:
    found = _RANGE.match(part)
    if not found:
        raise _no_range(part, "write for example h100:1x8..16x8")
    first, last = int(found["first"]), int(found["last"])
    each, most = (int(found[side] or found["each"] or 1) for side in ("each", "most"))
    if not (0 < first <= last and each > 0):
        raise _no_range(part, "start with at least one node, and with the smaller number")
    if each > most or (each < most and first > 1):
        raise _no_range(part, "GPUs per node grow within one node: write for example h100:1x1..4x8")
    sizes = []
    while each < most:
        sizes.append((first, each))
        each *= 2
    while first <= last:
        sizes.append((first, most))
        first *= 2
    split = bool(found["each"])
    return [f"{found['name']}:{n}{f'x{gpus}' if split else ''}" for n, gpus in sizes]


def _no_range(part: str, step: str) -> UsageError:
    return UsageError(f"clusters {part!r} is no range", next_step=step)


def parse_prices(text: str) -> dict[str, float]:
    """`h100=2.5,a100-80=1.3`: price per GPU-hour by device name, in any currency."""
    prices: dict[str, float] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, equals, value = (x.strip() for x in part.partition("="))
        if name in prices:
            raise UsageError(f"the price of {name} is given twice", next_step="keep one of them")
        try:
            prices[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not 0 <= prices[name] < float("inf"):
            raise UsageError(
                f"price {part!r} is no DEVICE=NUMBER", next_step="write for example h100=2.5"
            )
    return prices


def frontier(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Which points (both smaller is better) no other point beats in both; None is never one."""
    return [
        p is not None
        and not any(q is not None and q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
        for p in points
    ]


def plan_or_compare(
    request: PlanRequest,
    several: Comparison | None,
    out: Path | None,
    report: Path | None,
    *,
    as_json: bool,
) -> int:
    """One cluster is planned for, several are compared; the exit code is 5 when nothing fits."""
    if (several is None) == (not request.cluster):
        raise UsageError(
            "a plan is for one cluster, a comparison for several",
            next_step="give either --cluster or --clusters",
        )
    if several is None:
        return plan_command(request, out, report, as_json=as_json)
    if out is not None or report is not None:
        raise UsageError(
            "--out and --report are for one cluster",
            next_step="compare with --clusters, then plan with --cluster",
        )
    return _compare(request, several, as_json=as_json)


def _compare(request: PlanRequest, asked: Comparison, *, as_json: bool) -> int:
    steps = asked.steps
    if steps < 1:
        raise UsageError(f"{steps} steps", next_step="give at least one")
    names, prices = expand_clusters(asked.clusters), parse_prices(asked.prices)
    offers = _offers(request, names, prices, quiet=as_json)
    best = frontier([_point(offer, steps) for offer in offers])
    rows = [offer.row(steps, b) for offer, b in zip(offers, best, strict=True)]
    if as_json:
        print(json.dumps({"steps": steps, "clusters": rows}, indent=2))
    else:
        _print(rows, steps)
    fits = any(offer.plan is not None for offer in offers)
    return 0 if fits else InfeasibleError.exit_code


def _point(offer: Offer, steps: int) -> tuple[float, float] | None:
    spent = offer.gpu_hours(steps) if offer.price is None else offer.cost(steps)
    return None if offer.step_seconds is None or spent is None else (offer.step_seconds, spent)


def _offers(
    request: PlanRequest, names: Sequence[str], prices: Mapping[str, float], *, quiet: bool
) -> list[Offer]:
    """The best plan for every cluster; the model is captured once per precision."""
    clusters = [Cluster.parse(name) for name in names]
    if request.execution is not None:
        clusters = [cluster.with_execution(request.execution) for cluster in clusters]
    devices = sorted({c.device.name for c in clusters})
    if prices and set(prices) != set(devices):
        odd = sorted(set(prices) ^ set(devices))[0]
        said = "is given, but no cluster has it" if odd in prices else "is missing"
        raise UsageError(
            f"the price of {odd} {said}", next_step=f"give one for each of {', '.join(devices)}"
        )
    pins, precision = take_precision(request.pins, request.precision)
    programs: dict[str | None, tuple[str, Program]] = {}
    found = []
    for number, cluster in enumerate(clusters):
        used = precision or default_precision(request.model, cluster)
        if used not in programs:
            programs[used] = _program(request, used)
        if not quiet and sys.stderr.isatty():
            text = f"\rplanning for {cluster.name} ({number + 1} of {len(clusters)})   "
            print(text, end="", file=sys.stderr, flush=True)
        plan, reason = _best_plan(request, *programs[used], cluster, pins)
        found.append(Offer(cluster, prices.get(cluster.device.name), plan, reason))
    return found


def _program(request: PlanRequest, precision: str | None) -> tuple[str, Program]:
    source = resolved(request, precision)
    exact = precision or precision_of(source.model)
    program = capture(
        source.model,
        source.example_inputs,
        name=source.name,
        dtype=COMPUTE[exact],
        loss_fn=source.loss_fn,
    )
    return exact, program


def _best_plan(
    request: PlanRequest, precision: str, program: Program, cluster: Cluster, pins: str
) -> tuple[Plan | None, str]:
    """The plan, or why this cluster has none; the other clusters go on."""
    try:
        outcome = search_program(
            program,
            cluster,
            global_batch_size=request.global_batch,
            memory_limit=request.memory_limit,
            pins=pins,
            precision=precision,
            optimizer=request.optimizer,
            spare_experts=request.spare_experts,
            sequence=request.sequence,
            time_limit=request.time_limit,
            explain=False,
        )
    except UsageError as error:
        return None, str(error)
    return outcome.plan, "" if outcome.plan is not None else "nothing fits in memory"


def _print(rows: Sequence[Mapping[str, Any]], steps: int) -> None:
    from rich.console import Console

    from autopar.report.offers import offers_table

    console = Console()
    console.print(offers_table(rows, steps))
    best = [str(row["cluster"]) for row in rows if row.get("frontier")]
    if best:
        console.print(
            f"Nothing here is both faster and cheaper than {', '.join(best)}.", highlight=False
        )
