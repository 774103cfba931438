"""What the load of experts says of a model's routing, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import UsageError
from autopar.experts.load import LayerLoad

# From how many times the mean on a finding is told. Our own choice: a step waits for the busiest
# rank, so twice the mean doubles the time of the experts; half as much on a rank is worth a move.
HOT_EXPERT = 2.0
HOT_RANK = 1.25
# An expert is starved below this share of the mean.
STARVED = 0.05
# The share of dropped rows from which on it is told.
DROPPED = 0.01
_LISTED = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """`kind`: hot-expert, hot-rank, starved-experts or dropped-rows; `advice`: what helps, most
    direct first."""

    kind: str
    layer: str
    what: str
    advice: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}\n  what helps: {'; '.join(self.advice)}"


@dataclass(frozen=True)
class Routing:
    """The load of every layer with experts."""

    layers: Mapping[str, LayerLoad]

    @property
    def load(self) -> dict[str, list[Any]]:
        """Rows of each expert by layer, as JSON takes them."""
        return {name: list(layer.rows) for name, layer in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        """Numbers and findings, as JSON takes them."""
        layers = {
            name: {
                "rows": list(layer.rows),
                "entropy": layer.entropy,
                "expert_imbalance": layer.expert_imbalance,
                "rows_of_ranks": list(layer.of_ranks),
                "rank_imbalance": layer.rank_imbalance,
                "idle": list(layer.idle),
                "dropped": layer.dropped,
                "dropped_share": layer.dropped_share,
            }
            for name, layer in self.layers.items()
        }
        found = [
            {"kind": f.kind, "layer": f.layer, "what": f.what, "advice": list(f.advice)}
            for f in self.findings()
        ]
        return {"layers": layers, "findings": found}

    def findings(self, hot: float = HOT_EXPERT) -> list[Finding]:
        """What is wrong, layer by layer. `hot`: from how many times the mean load on an expert is.

        Raises `UsageError` for a `hot` that is not above 1.
        """
        if not hot > 1:
            raise UsageError(f"hot={hot}: an expert is hot above the mean", next_step="give 2.0")
        found: list[Finding] = []
        for name, layer in self.layers.items():
            found += [f for f in (_hot(name, layer, hot), _rank(name, layer)) if f is not None]
            found += [f for f in (_starved(name, layer), _dropped(name, layer)) if f is not None]
        return found

    def __str__(self) -> str:
        if not self.layers:
            return "no layer with experts on any stage"
        lines = [_line(name, layer) for name, layer in self.layers.items()]
        findings = [str(f) for f in self.findings()]
        return "\n".join([*lines, *(findings or ["routing is even enough: nothing to mend"])])


def _line(name: str, layer: LayerLoad) -> str:
    if not sum(layer.rows):
        return f"{name}: no row was counted yet"
    parts = [
        f"{name}: {sum(layer.rows):g} rows to {len(layer.rows)} experts",
        f"entropy {layer.entropy:.2f} of 1",
        f"busiest expert {layer.busiest_expert} {layer.expert_imbalance:.2f}x the mean",
    ]
    if layer.ranks > 1:
        parts.append(f"busiest of {layer.ranks} ranks {layer.rank_imbalance:.2f}x the mean")
    if layer.idle:
        parts.append(f"{len(layer.idle)} without a row")
    if layer.dropped:
        parts.append(f"{layer.dropped_share:.1%} of the rows dropped")
    return ", ".join(parts)


def _hot(name: str, layer: LayerLoad, hot: float) -> Finding | None:
    if layer.expert_imbalance < hot or not sum(layer.rows):
        return None
    above = [e for e, rows in enumerate(layer.rows) if rows >= hot * layer.mean]
    advice = ["raise the weight of the auxiliary loss, or turn on the router's bias or noise"]
    if layer.ranks > 1:
        advice.append(
            f"copies of {_few(above)} on several ranks (replicas= of autopar.assign_experts, under "
            "a plan with spare_experts=)"
        )
    advice.append(
        "a capacity factor (autopar.limit_experts): it bounds the time, and drops rows beyond it"
    )
    share = max(layer.rows) / sum(layer.rows)
    what = (
        f"expert {layer.busiest_expert} gets {layer.expert_imbalance:.1f} times the mean, "
        f"{share:.0%} of all rows; from {hot:g} times on: {_few(above)}"
    )
    return Finding("hot-expert", name, what, tuple(advice))


def _rank(name: str, layer: LayerLoad) -> Finding | None:
    """A rank that others wait for; by how much other neighbours could lower it."""
    if layer.rank_imbalance < HOT_RANK:
        return None
    loads = layer.of_ranks
    rank = max(range(len(loads)), key=lambda r: loads[r])
    mean = sum(loads) / len(loads)
    what = (
        f"rank {rank} of {layer.ranks} gets {layer.rank_imbalance:.2f} times the mean "
        f"({loads[rank]:g} of {mean:g} rows); the others wait for it"
    )
    # No assignment puts a rank below the mean, nor below its busiest expert.
    least = max(mean, max(layer.rows))
    if least < loads[rank]:
        advice: tuple[str, ...] = (
            "other experts on it: program.rebalance with what autopar.assign_experts finds, down "
            f"to {least / mean:.2f} times the mean at best",
        )
    else:
        advice = (
            "its busiest expert alone is that much: copies of it (replicas= of "
            "autopar.assign_experts), or a split over fewer ranks",
        )
    return Finding("hot-rank", name, what, advice)


def _starved(name: str, layer: LayerLoad) -> Finding | None:
    starved = [e for e, rows in enumerate(layer.rows) if rows < STARVED * layer.mean]
    if not starved or not sum(layer.rows):
        return None
    idle = f", to {len(layer.idle)} of them none" if layer.idle else ""
    what = (
        f"fewer rows than {STARVED:.0%} of the mean go to {len(starved)} of {len(layer.rows)} "
        f"experts{idle}: {_few(starved)}; they hardly learn"
    )
    return Finding(
        "starved-experts",
        name,
        what,
        (
            "raise the weight of the auxiliary loss",
            "noise on the router early in training, or its bias by load",
            "fewer experts, if it stays so",
        ),
    )


def _dropped(name: str, layer: LayerLoad) -> Finding | None:
    if layer.dropped_share < DROPPED:
        return None
    what = (
        f"{layer.dropped_share:.1%} of the rows are dropped ({layer.dropped:g} of "
        f"{layer.dropped + sum(layer.rows):g}): tokens go on without some of their experts"
    )
    advice = (
        "a larger capacity factor (autopar.limit_experts), or none",
        "raise the weight of the auxiliary loss, so that fewer rows meet a limit",
        "larger micro-batches: the limit is for the tokens that a rank has at once",
    )
    return Finding("dropped-rows", name, what, advice)


def _few(experts: list[int]) -> str:
    listed = ", ".join(map(str, experts[:_LISTED]))
    more = f" and {len(experts) - _LISTED} more" if len(experts) > _LISTED else ""
    return f"expert{'s' if len(experts) > 1 else ''} {listed}{more}"
