"""`autopar plan --clusters`: which clusters are compared, and which of them are worth renting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autopar.cli import app
from autopar.commands.what_if import expand_clusters, frontier, parse_prices
from autopar.errors import UsageError

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


def made():
    return Net(), {"x": torch.ones(8, 64)}
"""


def test_a_range_doubles_the_nodes() -> None:
    assert expand_clusters("h100:1x8..6x8, a100-80:4x8,h100:2x8") == [
        *("h100:1x8", "h100:2x8", "h100:4x8", "a100-80:4x8")
    ]
    assert expand_clusters("cpu:2..8") == ["cpu:2", "cpu:4", "cpu:8"]
    assert expand_clusters("h100:1x2..2x8") == ["h100:1x2", "h100:1x4", "h100:1x8", "h100:2x8"]
    assert expand_clusters("h100:1x1..1x8") == [f"h100:1x{n}" for n in (1, 2, 4, 8)]
    assert expand_clusters("h100:2x8..4") == ["h100:2x8", "h100:4x8"]


@pytest.mark.parametrize(
    "text",
    [
        "h100:8x8..2x8",
        "h100..4",
        "h100:2x8..4x4",
        "h100:2x4..4x8",
        "h100:2..4x8",
        "",
        "h100:0x8..2x8",
        "h100:1x0..1x8",
    ],
)
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        expand_clusters(text)


def test_prices() -> None:
    assert parse_prices("h100=2.5, a100-80=1") == {"h100": 2.5, "a100-80": 1.0}
    for text in ("h100", "h100=", "h100=x", "h100=-1", "h100=nan", "h100=inf", "h100=1,h100=2"):
        with pytest.raises(UsageError, match="h100"):
            parse_prices(text)


POINT = st.tuples(st.integers(0, 5), st.integers(0, 5)) | st.none()


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(POINT, max_size=8))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int] | None]) -> None:
    best = frontier(points)
    there = [p for p in points if p is not None]
    for point, is_best in zip(points, best, strict=True):
        beaten = point is None or any(
            q[0] <= point[0] and q[1] <= point[1] and q != point for q in there
        )
        assert is_best != beaten
    assert any(best) == bool(there)


def test_the_comparison_of_clusters(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    call = ["plan", f"{tmp_path / 'net.py'}:made", "--global-batch", "64", "--json"]
    runner = CliRunner()
    found = runner.invoke(app, [*call, "--clusters", "cpu:1..4,cpu:3", "--price", "cpu=0.5"])
    assert found.exit_code == 0, found.output
    rows = {row["cluster"]: row for row in json.loads(found.stdout)["clusters"]}
    assert list(rows) == ["cpu:1", "cpu:2", "cpu:4", "cpu:3"]
    for name, row in rows.items():
        assert row["fits"] and row["gpus"] == int(name.removeprefix("cpu:"))
        assert row["gpu_hours"] == pytest.approx(1000 * row["step_seconds"] * row["gpus"] / 3600)
        assert row["cost"] == pytest.approx(row["gpu_hours"] / 2)
        alone = runner.invoke(app, [*call, "--cluster", name])
        assert json.loads(alone.stdout)["step_seconds"] == pytest.approx(row["step_seconds"])
    assert any(row["frontier"] for row in rows.values())


def test_what_one_cluster_can_not_do_is_said_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    call = ["plan", f"{tmp_path / 'net.py'}:made", "--global-batch", "8"]
    runner = CliRunner()
    found = runner.invoke(
        app, [*call, "--clusters", "cpu:2,cpu:4", "--pin", "dp=4,pp=1,tp=1", "--json"]
    )
    assert found.exit_code == 0, found.output
    first, second = json.loads(found.stdout)["clusters"]
    assert not first["fits"] and first["why"] and second["fits"]
    none = runner.invoke(app, [*call, "--clusters", "cpu:2,cpu:4", "--memory-limit", "1KiB"])
    assert none.exit_code == 5 and none.stdout.count("nothing fits in memory") == 2


def test_questions_that_make_no_sense(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    call = ["plan", f"{tmp_path / 'net.py'}:made", "--global-batch", "8"]
    runner = CliRunner()
    for more in (
        [],
        ["--cluster", "cpu:2", "--clusters", "cpu:2"],
        ["--clusters", "cpu:2", "--out", str(tmp_path / "x.json")],
        ["--clusters", "cpu:2", "--price", "h100=1"],
        ["--clusters", "cpu:2", "--steps", "0"],
    ):
        found = runner.invoke(app, [*call, *more])
        assert isinstance(found.exception, UsageError | SystemExit), found.output
        assert found.exit_code != 0
