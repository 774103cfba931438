"""Measured routing in the page: its chart, and the words of what helps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli import app
from autopar.errors import UsageError
from autopar.experts.diagnosis import Routing
from autopar.experts.history import Recorded, RoutingHistory
from autopar.experts.load import LayerLoad
from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.page import render
from autopar.report.routing_part import routing_data, routing_section
from tests.report import sample
from tests.report.browser import open_page


def plan() -> Plan:
    made = sample.make_plan(mesh=Mesh(4, 8, 1))
    return replace(made, mesh=Mesh(4, 8, 1, ep=2), cluster="h100:4x8")


def history() -> RoutingHistory:
    made = RoutingHistory()
    rows = [0.0, 0.0, 0.0, 0.0]
    for step, more in enumerate([(4, 4, 4, 4), (8, 4, 2, 2), (16, 0, 0, 0)]):
        rows = [a + b for a, b in zip(rows, more, strict=True)]
        load = {"moe<b>": LayerLoad(tuple(rows), 2), "even": LayerLoad((step + 1.0,) * 4, 2)}
        made.add(step, Routing(load), {"balance": 0.5 - step / 10})
    return made


def recorded() -> Recorded:
    found = history().to_dict()
    return Recorded({n: tuple(r) for n, r in found["load"].items()}, tuple(found["history"]))


def test_lines_are_those_of_the_worst_layer() -> None:
    found = routing_data(recorded())
    assert found["steps"] == [0, 1, 2]
    panels = {p["title"]: p["lines"] for p in found["panels"]}
    assert panels["auxiliary losses"] == [["balance", [0.5, 0.4, 0.3]]]
    ((_, ranks),) = panels["busiest rank over the mean, worst layer"]
    assert ranks == [1.0, 1.5, 2.0]
    # Nothing was dropped: no panel.
    assert not any("dropped" in title for title in panels)
    assert routing_data(None) == {"steps": [], "panels": []}


def test_the_section_says_what_helps() -> None:
    section = routing_section(plan(), recorded())
    assert "moe&lt;b&gt;: 48 rows to 4 experts" in section and "<b>:" not in section
    assert "what helps: raise the weight of the auxiliary loss" in section
    assert "rank 0 of 2 gets" in section and "3 records" in section
    assert routing_section(plan(), None) == ""
    assert "routing-section" not in render(plan(), (), None)


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render(plan(), (), None, recorded()))
    found, console = open_page(path, tmp_path)
    assert not console
    assert re.search(r'id="routing"[^>]*data-drawn="yes"', found)
    assert "auxiliary losses" in found and "entropy of the least even layer" in found


def test_on_the_command_line(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    load, page = tmp_path / "history.json", tmp_path / "page.html"
    load.write_text(json.dumps(history().to_dict()))
    command = ["show", str(tmp_path / "plan.json"), "--load", str(load)]
    done = CliRunner().invoke(app, [*command, "--report", str(page)], catch_exceptions=False)
    assert done.exit_code == 0 and str(page) in done.output.replace("\n", "")
    assert "Routing of experts" in page.read_text()
    with pytest.raises(UsageError, match="--load is shown in the HTML page"):
        CliRunner().invoke(app, command, catch_exceptions=False)
