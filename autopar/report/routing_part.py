"""The page's section on routing: how it went, and what helps."""

from __future__ import annotations

from html import escape
from typing import Any

from autopar.experts.diagnosis import Routing
from autopar.experts.history import Recorded
from autopar.experts.load import LayerLoad
from autopar.plan_document import Plan

# Of the layers, the one that a line of the chart shows; the title of its panel.
_WORST = {
    "entropy": (min, "entropy of the least even layer"),
    "expert_imbalance": (max, "busiest expert over the mean, worst layer"),
    "rank_imbalance": (max, "busiest rank over the mean, worst layer"),
    "dropped_share": (max, "share of rows dropped, worst layer"),
}


def routing_section(plan: Plan, recorded: Recorded | None) -> str:
    """HTML; '' without a file."""
    if recorded is None:
        return ""
    layers = {name: LayerLoad(rows, plan.mesh.ep) for name, rows in recorded.load.items()}
    told = str(Routing(layers)).splitlines()
    lines = "".join(f"<li>{escape(line.strip())}</li>" for line in told)
    over = f"{len(recorded.records)} records" if recorded.records else "a load, no history"
    return (
        '<section class="card" id="routing-section">'
        f"<h2>Routing of experts <small>measured; {over}</small></h2>"
        f'<div id="routing" class="chart"></div><ul class="limits">{lines}</ul></section>'
    )


def routing_data(recorded: Recorded | None) -> dict[str, Any]:
    """Steps, and the panels of the chart: a title and lines of a name and values each."""
    records = recorded.records if recorded is not None else ()
    names = dict.fromkeys(name for r in records for name in r["auxiliary_losses"])
    panels = []
    if names:
        lines = [[n, [r["auxiliary_losses"].get(n) for r in records]] for n in names]
        panels.append({"title": "auxiliary losses", "lines": lines})
    for measure, (worst, title) in _WORST.items():
        values = [worst(layer[measure] for layer in r["layers"].values()) for r in records]
        if values and (measure != "dropped_share" or any(values)):
            panels.append({"title": title, "lines": [[title, values]]})
    return {"steps": [r["step"] for r in records], "panels": panels}
