"""A larger cluster is what its name would give; nodes are filled before others are added."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.search.more_ranks import sizes_above, with_ranks
from tests.search.synthetic import cluster


@pytest.mark.parametrize(
    ("name", "ranks", "wanted"),
    [
        ("h100:1x1", 2, "h100:1x2"),
        ("h100:1x4", 8, "h100:1x8"),
        ("h100:1x4", 9, "h100:2x8"),
        ("h100:1x8", 24, "h100:3x8"),
        ("cpu:4", 7, "cpu:7"),
        ("a100-80:1x4/efa-4x100", 16, "a100-80:2x8/efa-4x100"),
    ],
)
def test_a_node_is_filled_first(name: str, ranks: int, wanted: str) -> None:
    assert with_ranks(Cluster.parse(name), ranks) == Cluster.parse(wanted)


def test_several_nodes_stay_as_they_are() -> None:
    found = with_ranks(Cluster.parse("h100:2x4"), 13)
    assert (found.nodes, found.ranks_per_node, found.links[-1].ranks) == (4, 4, 16)


def test_a_cluster_of_ones_own_grows_by_nodes() -> None:
    found = with_ranks(cluster(4, per_node=4), 5)
    assert (found.nodes, found.ranks_per_node) == (2, 4)


def test_the_device_is_kept() -> None:
    known = Cluster.parse("h100:1x2")
    compiled = replace(known, device=replace(known.device, execution="compile"))
    assert with_ranks(compiled, 4).device == compiled.device


def test_sizes() -> None:
    assert sizes_above(Cluster.parse("h100:1x4"), 24) == [5, 6, 7, 8, 16, 24]
    assert sizes_above(Cluster.parse("h100:2x8"), 50) == [24, 32, 40, 48]
