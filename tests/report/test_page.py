from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.page import embedded_json, render, write_report
from tests.report import sample
from tests.report.browser import open_page

EVIL = '</script><img src="https://evil.example/x" onerror="alert(1)">{{data}} & \u2028'


def without_libraries(page: str) -> str:
    """ECharts itself knows how to write an image element for a download."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found.group(1))
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sample.make_plan()


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    return render(plan, sample.pictures(), sample.timeline(plan))


def test_page_loads_nothing(page: str) -> None:
    own = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"(?:src|srcset|data|poster|action)\s*=", own)
    assert all(target.startswith("#") for target in re.findall(r'href\s*=\s*"([^"]*)"', own))
    assert not re.findall(r"url\(|@import|<link|<iframe|<object", own)
    assert "default-src 'none'" in own
    assert not re.findall(r"<script[^>]*\ssrc", page)
    assert "sourceMappingURL" not in page


def test_page_holds_the_data_of_every_picture(page: str, plan: Plan) -> None:
    data = embedded(page)
    assert len(data["memory"]["stages"]) == 4
    assert data["memory"]["limit"] == 70 * sample.GIB
    assert sum(t["seconds"] for t in data["time"]) == pytest.approx(plan.predicted["step_seconds"])
    kinds = {event[1] for event in data["timeline"]["events"]}
    assert kinds == {"forward", "recompute", "backward"}
    assert [block["name"] for block in data["blocks"]] == ["embed", "model.layers.0", "head"]


def test_timeline_is_simulated_when_none_is_given(page: str, plan: Plan) -> None:
    again = embedded(render(plan, [], None))["timeline"]
    assert again == embedded(page)["timeline"]


def test_page_tells_the_plan_without_scripts(page: str) -> None:
    shown = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL))
    for word in (
        "zoo:llama3-70b",
        "h100:8x8",
        "1F1B",
        "46.3 %",
        "62 mesh shapes",
        "Proven optimal",
    ):
        assert word in shown
    for word in ("column-parallel", "row-parallel", "vocab-parallel", "head-parallel", "histc"):
        assert word in shown


def test_text_of_the_plan_is_escaped() -> None:
    plan = replace(sample.make_plan(model=EVIL), cluster=EVIL, notes=(EVIL,), optimizer=EVIL)
    picture = sample.layer()
    ops = tuple(replace(op, module=EVIL, op=EVIL) for op in picture.ops)
    page = render(plan, [replace(picture, name=EVIL, ops=ops)], [])
    assert "<img" not in without_libraries(page)
    assert embedded(page)["blocks"][0]["name"] == EVIL


def test_embedded_json_cannot_end_its_element() -> None:
    text = embedded_json({"a": "</script>\u2028&"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"a": "</script>\u2028&"}


def test_figures_that_are_no_numbers_become_null() -> None:
    plan = sample.make_plan()
    plan.predicted["memory_limit_bytes"] = float("inf")
    assert embedded(render(plan, [], []))["memory"]["limit"] is None


def test_unwritable_path_names_the_path(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.*page\.html"):
        write_report(plan, [], [], tmp_path / "absent" / "page.html")


CASES = {
    "four stages": {},
    "one stage": {"stages": 1, "layers": 4, "microbatches": 2, "mesh": Mesh()},
    "sixteen stages": {
        "stages": 16, "layers": 126, "microbatches": 256, "mesh": Mesh(16, 4, 16),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_chromium_draws_everything_without_errors(case: str, tmp_path: Path) -> None:
    plan = sample.make_plan(**CASES[case])  # type: ignore[arg-type]
    pictures = sample.pictures(80)
    path = write_report(plan, pictures, sample.timeline(plan), tmp_path / "page.html")
    dom, console = open_page(path, tmp_path)
    assert not console
    assert '<html lang="en" data-drawn="all">' in dom
    for chart in ("time", "memory", "timeline"):
        assert re.search(rf'id="{chart}"[^>]*data-drawn="yes"', dom), chart
    nodes = [len(block["nodes"]) for block in embedded(path.read_text())["blocks"]]
    for index, count in enumerate(nodes):
        assert re.search(rf'id="graph-{index}"[^>]*data-drawn="{count}"', dom)
    assert dom.count(">all_gather") >= 3  # two in a layer, one before the head
    assert ">limit 70 GiB<" in dom  # drawn by the chart, not by the page


def test_chromium_opens_a_plan_without_predictions(plan: Plan, tmp_path: Path) -> None:
    path = write_report(replace(plan, predicted={}), [], [], tmp_path / "page.html")
    dom, console = open_page(path, tmp_path)
    assert not console
    assert 'data-drawn="all"' in dom
    assert dom.count('data-drawn="empty"') == 3


def test_chromium_takes_a_screenshot(plan: Plan, page: str, tmp_path: Path) -> None:
    path, shot = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page, encoding="utf-8")
    open_page(path, tmp_path, f"--screenshot={shot}")
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 50_000  # a blank page of this size has a tenth of it


def test_vendored_libraries_are_the_ones_that_are_named() -> None:
    folder = Path(str(files("autopar"))) / "data" / "report"
    told = dict(re.findall(r"^ +([0-9a-f]{64})  (\S+)$", (folder / "README.md").read_text(), re.M))
    assert list(told.values()) == ["echarts.min.js", "dagre.min.js"]
    for digest, name in told.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert (folder / name.replace(".min.js", ".LICENSE")).is_file()
