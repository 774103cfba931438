"""`autopar experts` from a file to text, JSON and an assignment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli import app
from autopar.errors import UsageError
from autopar.experts.assignment import Assignment
from autopar.experts.diagnosis import Routing
from autopar.experts.history import RoutingHistory
from autopar.experts.load import LayerLoad

LOAD = {"layers.0": [80, 70, 10, 20], "layers.1": [5, 5, 5, 5]}


def write(folder: Path, content: object) -> str:
    path = folder / "load.json"
    path.write_text(json.dumps(content))
    return str(path)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["experts", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_text_says_before_after_and_bound(tmp_path: Path) -> None:
    out = tmp_path / "assignment.json"
    text = run(write(tmp_path, LOAD), "--ranks", "2", "--out", str(out))
    line = next(line for line in text.splitlines() if "layers.0" in line)
    assert [w for w in line.split() if w.isdigit()] == ["90", "150", "90", "90", "90"]
    assert "160 -> 100 rows, at least 100; optimal" in text
    assert "rank 0 of 2 gets 1.67 times the mean" in text
    assert Assignment.from_dict(json.loads(out.read_text())).layers["layers.0"].optimal


def test_json_and_replicas(tmp_path: Path) -> None:
    found = json.loads(run(write(tmp_path, LOAD), "--ranks", "2", "--replicas", "2", "--json"))
    layers = found["assignment"]["layers"]
    assert sum(len(ranks) for ranks in layers["layers.0"]["holders"]) == 6
    assert found["assignment"]["spare_experts"] == 1
    text = run(write(tmp_path, LOAD), "--ranks", "2", "--replicas", "2")
    assert "under a plan with --spare-experts 1" in text
    assert "--spare-experts" not in run(write(tmp_path, LOAD), "--ranks", "2")
    assert found["routing"]["layers"]["layers.0"]["rows_of_ranks"] == [150, 30]


def test_experts_of_one_token_on_one_node(tmp_path: Path) -> None:
    pairs = tmp_path / "together.json"
    near = [[0, 0, 9, 0], [0, 0, 0, 9], [9, 0, 0, 0], [0, 9, 0, 0]]
    pairs.write_text(json.dumps({"layers.1": near}))
    arguments = ("--ranks", "2", "--nodes", "2", "--together", str(pairs))
    text = run(write(tmp_path, LOAD), *arguments)
    assert "on node" in text and "100%" in text


def test_errors_name_the_thing(tmp_path: Path) -> None:
    path = write(tmp_path, LOAD)
    for arguments, said in (
        ((path, "--ranks", "3"), "do not divide by 3 ranks"),
        ((path, "--ranks", "8"), "8 ranks for the 4 experts"),
        ((str(tmp_path / "none.json"), "--ranks", "2"), "can't be read"),
        ((path, "--ranks", "2", "--out", str(tmp_path)), "can't be written"),
    ):
        with pytest.raises(UsageError, match=said):
            run(*arguments)


def test_a_history_is_a_load_too(tmp_path: Path) -> None:
    history = RoutingHistory()
    history.add(0, Routing({n: LayerLoad(tuple(rows)) for n, rows in LOAD.items()}), {"aux": 0.5})
    path = write(tmp_path, history.to_dict())
    found = json.loads(run(path, "--ranks", "2", "--json"))
    assert found["history"] == history.to_dict()["history"]
    assert found["routing"]["layers"]["layers.0"]["rows"] == LOAD["layers.0"]
