"""`autopar experts`: which rank computes which expert, from a measured load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.errors import UsageError
from autopar.experts.assignment import Assignment, assign_experts
from autopar.experts.diagnosis import Routing
from autopar.experts.history import Recorded
from autopar.experts.load import LayerLoad, read_layers


@dataclass(frozen=True)
class ExpertsRequest:
    """A load file and what an assignment may do, as given."""

    load: Path
    ranks: int
    nodes: int = 1
    together: Path | None = None
    replicas: int = 0
    most: int | None = None
    time_limit: float = 10.0


def experts_command(request: ExpertsRequest, out: Path | None, *, as_json: bool) -> int:
    """Print rows of the busiest rank per layer, and what the routing lacks; exit code 0."""
    recorded = Recorded.read(request.load)
    load = recorded.load
    found = assign_experts(
        load,
        request.ranks,
        nodes=request.nodes,
        together=read_layers(request.together) if request.together is not None else None,
        replicas=request.replicas,
        most=request.most,
        time_limit=request.time_limit,
    )
    routing = Routing({name: LayerLoad(rows, request.ranks) for name, rows in load.items()})
    if out is not None:
        try:
            out.write_text(json.dumps(found.to_dict()) + "\n")
        except OSError as error:
            raise UsageError(
                f"{out} can't be written: {error.strerror}", next_step="give another --out"
            ) from error
    if as_json:
        document = {"assignment": found.to_dict(), "routing": routing.to_dict()}
        history = {"history": list(recorded.records)} if recorded.records else {}
        print(json.dumps(document | history, indent=2))
    else:
        _print(found, load, routing)
    return 0


def _print(found: Assignment, load: dict[str, tuple[float, ...]], routing: Routing) -> None:
    table = Table(title=f"rows of the busiest of {found.ranks} ranks", title_justify="left")
    table.add_column("layer", overflow="fold")
    near = any(layer.on_node is not None for layer in found.layers.values())
    for name in ("mean", "neighbours", "by turns", "assigned", "at least", "x mean") + near * (
        "on node",
    ):
        table.add_column(name, justify="right")
    for name, layer in found.layers.items():
        mean = sum(load[name]) / found.ranks
        values = (mean, layer.contiguous, layer.round_robin, layer.busiest, layer.bound)
        over = f"{layer.busiest / mean:.3f}" if mean else "-"
        share = () if layer.on_node is None else (f"{layer.on_node:.0%}",)
        table.add_row(name, *(f"{v:,.0f}" for v in values), over, *share)
    console = Console()
    console.print(table)
    before = sum(layer.contiguous for layer in found.layers.values())
    after = sum(layer.busiest for layer in found.layers.values())
    bound = sum(layer.bound for layer in found.layers.values())
    console.print(
        f"all layers: {before:,.0f} -> {after:,.0f} rows, at least {bound:,.0f}; {found.status}",
        highlight=False,
    )
    if found.spare_experts:
        console.print(
            f"programs run it under a plan with --spare-experts {found.spare_experts}",
            highlight=False,
        )
    for finding in routing.findings():
        console.print(str(finding), highlight=False, markup=False, soft_wrap=True)
