from __future__ import annotations

import pytest

from autopar.report.block_picture import BlockPicture, EdgePicture, OpPicture
from autopar.report.fold import fold
from autopar.report.page_data import graph
from tests.report import sample


def test_one_transfer_with_three_readers_is_one_node() -> None:
    drawn = graph(fold(sample.layer()))
    titles = [node["title"] for node in drawn["nodes"] if node["kind"] == "collective"]
    assert titles == [
        "all_gather  128.0 MiB", "reduce_scatter  128.0 MiB",
        "all_gather  128.0 MiB", "reduce_scatter  128.0 MiB",
    ]  # fmt: skip
    gather = next(n["id"] for n in drawn["nodes"] if n["title"].startswith("all_gather"))
    assert len([link for link in drawn["links"] if link[0] == gather]) == 3


def test_inputs_with_the_same_readers_share_a_node() -> None:
    inputs = [n["title"] for n in graph(fold(sample.layer()))["nodes"] if n["kind"] == "input"]
    assert sorted(inputs) == ["cos, sin", "hidden_states"]


def test_identity_forward_with_a_summed_gradient_is_drawn_for_the_gradient_only() -> None:
    edge = EdgePicture("x", "linear", "", "all_reduce", 4096)
    drawn = graph(BlockPicture("b", 1, (OpPicture("linear", "linear"),), (edge,)))
    node = next(n for n in drawn["nodes"] if n["kind"] == "collective")
    assert node["title"] == "identity  4.0 KiB"
    assert node["only"] == "backward" and node["lines"] == ["gradient: all_reduce"]


@pytest.mark.parametrize("picture", sample.pictures(), ids=lambda p: str(p.name))
def test_every_link_joins_known_nodes_and_no_node_is_alone(picture: BlockPicture) -> None:
    drawn = graph(fold(picture))
    ids = [node["id"] for node in drawn["nodes"]]
    assert len(set(ids)) == len(ids)
    assert {end for link in drawn["links"] for end in link} == set(ids)
