"""What is said of a routing, and what not."""

from __future__ import annotations

import json

import pytest

from autopar.errors import UsageError
from autopar.experts.diagnosis import Routing
from autopar.experts.load import LayerLoad


def kinds(layer: LayerLoad, hot: float = 2.0) -> list[str]:
    return [f.kind for f in Routing({"moe": layer}).findings(hot)]


def test_an_even_layer_is_left_alone() -> None:
    routing = Routing({"moe": LayerLoad((10, 11, 9, 10), 2)})
    assert not routing.findings()
    assert "nothing to mend" in str(routing)
    assert "4 experts, entropy 1.00 of 1, busiest expert 1 1.10x" in str(routing)


def test_a_hot_expert_and_what_helps() -> None:
    layer = LayerLoad((70, 10, 10, 10))
    assert kinds(layer) == ["hot-expert"]
    (found,) = Routing({"moe": layer}).findings()
    assert "expert 0 gets 2.8 times the mean, 70% of all rows" in found.what
    assert "auxiliary loss" in str(found) and "capacity factor" in str(found)
    # Copies help ranks; here the experts are not split.
    assert "copies" not in str(found)
    assert kinds(layer, hot=3.0) == []
    assert kinds(LayerLoad((70, 10, 10, 10), 4)) == ["hot-expert", "hot-rank"]


def test_neighbours_that_another_assignment_parts() -> None:
    layer = LayerLoad((15, 15, 5, 5), 2)
    (found,) = Routing({"moe": layer}).findings()
    assert found.kind == "hot-rank"
    assert "rank 0 of 2 gets 1.50 times the mean (30 of 20 rows)" in found.what
    assert "down to 1.00 times the mean" in found.advice[0]


def test_one_expert_that_is_a_rank() -> None:
    (found,) = Routing({"moe": LayerLoad((15, 9), 2)}).findings()
    assert found.kind == "hot-rank" and "copies of it" in found.advice[0]


def test_experts_that_starve() -> None:
    (found,) = Routing({"moe": LayerLoad((10, 10, 10, 0))}).findings()
    assert found.kind == "starved-experts"
    assert "to 1 of 4 experts, to 1 of them none: expert 3" in found.what


def test_many_experts_are_not_all_listed() -> None:
    rows = (0,) * 9 + (30,) * 11
    (found,) = Routing({"moe": LayerLoad(rows)}).findings()
    assert "experts 0, 1, 2, 3, 4, 5 and 3 more" in found.what


def test_before_the_first_step_and_without_experts() -> None:
    empty = Routing({"moe": LayerLoad((0, 0, 0), 3)})
    assert not empty.findings() and "no row was counted yet" in str(empty)
    assert "no layer with experts" in str(Routing({}))


def test_as_json() -> None:
    routing = Routing({"moe": LayerLoad((70, 10, 10, 10), 2)})
    found = json.loads(json.dumps(routing.to_dict()))
    assert found["layers"]["moe"]["rows_of_ranks"] == [80, 20]
    assert [f["kind"] for f in found["findings"]] == ["hot-expert", "hot-rank"]
    assert json.loads(json.dumps(routing.load)) == {"moe": [70, 10, 10, 10]}


def test_hot_is_above_the_mean() -> None:
    with pytest.raises(UsageError, match="hot=1"):
        Routing({}).findings(hot=1.0)
