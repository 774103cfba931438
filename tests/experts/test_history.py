"""Records of routing, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.experts.diagnosis import Routing
from autopar.experts.history import Recorded, RoutingHistory
from autopar.experts.load import LayerLoad


def counted(*rows: float, dropped: float = 0) -> Routing:
    return Routing({"layer": LayerLoad(rows, 2, dropped=dropped)})


def test_each_record_tells_of_what_came_since_the_one_before() -> None:
    history = RoutingHistory()
    first = history.add(0, counted(4, 4, 4, 4), {"balance": 0.5})
    second = history.add(1, counted(12, 4, 4, 4, dropped=2), {"balance": 0.25})
    assert first["layers"]["layer"] == {
        "entropy": pytest.approx(1),
        "expert_imbalance": 1.0,
        "rank_imbalance": 1.0,
        "dropped_share": 0.0,
    }
    assert second["layers"]["layer"] == {
        "entropy": 0.0,
        "expert_imbalance": 4.0,
        "rank_imbalance": 2.0,
        "dropped_share": pytest.approx(0.2),
    }
    written = json.loads(json.dumps(history.to_dict()))
    assert written["load"] == {"layer": [12, 4, 4, 4]}
    assert [r["auxiliary_losses"]["balance"] for r in written["history"]] == [0.5, 0.25]
    assert [r["step"] for r in written["history"]] == [0, 1]


@pytest.mark.parametrize("rows", [(100, 20, 20, 20), (10, 10, 10, 10), (8, 0, 0, 0)])
def test_counts_that_were_reset_start_again(rows: tuple[float, ...]) -> None:
    history = RoutingHistory()
    history.add(0, counted(10, 10, 10, 10), {})
    history.counts_were_reset()
    assert history.to_dict()["load"] == {"layer": [10, 10, 10, 10]}
    history.add(1, counted(*rows), {})
    history.counts_were_reset()
    record = history.add(2, counted(*rows), {})["layers"]["layer"]
    alone = counted(*rows).layers["layer"]
    assert record["entropy"] == alone.entropy
    assert record["expert_imbalance"] == alone.expert_imbalance


def test_without_experts_there_is_nothing_to_record() -> None:
    history = RoutingHistory()
    with pytest.raises(UsageError, match=r"no layer with experts") as caught:
        history.add(0, Routing({}), {"balance": 0.5})
    assert "declare_experts" in caught.value.next_step and len(history) == 0


def test_fewer_rows_than_before_are_refused() -> None:
    history = RoutingHistory()
    history.add(0, counted(8, 8), {})
    with pytest.raises(UsageError, match=r"(?s)fewer rows.*counts_were_reset"):
        history.add(1, counted(16, 4), {})


def test_its_length_is_bounded() -> None:
    history = RoutingHistory(most=2)
    for step in range(5):
        history.add(step, counted(step, step), {})
    assert len(history) == 2
    assert [r["step"] for r in history.to_dict()["history"]] == [3, 4]
    with pytest.raises(UsageError, match="most=0 records"):
        RoutingHistory(most=0)


def written(folder: Path, content: Any) -> Path:
    path = folder / "history.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = RoutingHistory()
    history.add(3, counted(4, 2, 1, 1), {"balance": 0.5})
    found = Recorded.read(written(tmp_path, history.to_dict()))
    assert found.load == {"layer": (4, 2, 1, 1)}
    assert list(found.records) == history.to_dict()["history"]
    assert Recorded.read(written(tmp_path, {"layer": [1, 2]})) == Recorded({"layer": (1, 2)})


def test_a_history_without_records_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, RoutingHistory().to_dict())
    with pytest.raises(UsageError, match=r"(?s)history\.json has no record yet.*record_routing"):
        Recorded.read(path)


@pytest.mark.parametrize(
    "change",
    [{"step": "one"}, {"layers": {}}, {"layers": {"a": {"entropy": 1}}}]
    + [{"auxiliary_losses": {"balance": "x"}}, {"auxiliary_losses": None}],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    history = RoutingHistory()
    history.add(0, counted(1, 1), {})
    document = history.to_dict()
    document["history"].append({**document["history"][0], **change})
    with pytest.raises(UsageError, match="record 1 of .*history.json is no record of routing"):
        Recorded.read(written(tmp_path, document))
