"""Which orders of a mesh are points of the space: those that differ on the links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopar.cluster import Cluster
from autopar.cost.setting import Setting
from autopar.mesh import ORDERS, Mesh
from autopar.search.space import orders, uneven_chunks


@pytest.mark.parametrize(
    ("mesh", "cluster", "count"),
    [
        (Mesh(pp=2, dp=8, tp=4), "h100:8x8", 2),
        (Mesh(pp=2, dp=32), "h100:8x8", 2),
        # Whole nodes of tp: stages and replicas are in different nodes either way.
        (Mesh(pp=2, dp=4, tp=8), "h100:8x8", 1),
        # One node has one kind of link.
        (Mesh(pp=2, dp=4), "h100:1x8", 1),
        (Mesh(dp=64), "h100:8x8", 1),
        (Mesh(pp=8, tp=8), "h100:8x8", 1),
        (Mesh(pp=2, dp=16, cp=2), "h100:8x8", 1),
    ],
)
def test_orders_that_make_a_difference(mesh: Mesh, cluster: str, count: int) -> None:
    found = orders(mesh, Cluster.parse(cluster), None)
    assert [m.order for m in found] == list(ORDERS[:count])
    # It does not matter in which of them the mesh comes.
    assert found == orders(found[-1], Cluster.parse(cluster), None)


def test_a_pinned_order_is_the_only_one() -> None:
    cluster = Cluster.parse("h100:8x8")
    inside = orders(Mesh(pp=2, dp=32), cluster, ORDERS[1])
    assert [m.order for m in inside] == [ORDERS[1]]
    assert orders(Mesh(pp=2, dp=16, cp=2), cluster, ORDERS[1]) == []
    assert orders(Mesh(dp=64), cluster, ORDERS[1]) == [Mesh(dp=64)]


def test_the_plans_mesh_is_tried_with_every_number_of_chunks() -> None:
    cluster = Cluster.parse("h100:8x8")
    mesh, other = Mesh(pp=2, dp=32), Mesh(pp=4, dp=16)
    found = [
        Setting(cluster, m, 1, 16, schedule, zero, chunks=chunks)
        for m in (mesh, other)
        for schedule, counts in (("1f1b", (1,)), ("interleaved", (2, 3, 4, 8)))
        for chunks in counts
        for zero in (0, 1)
    ]
    provider = SimpleNamespace(holds_parameters=[True] * 17)
    more = uneven_chunks(found, mesh, provider)  # type: ignore[arg-type]
    assert {s.mesh for s in more} == {mesh} and {s.schedule for s in more} == {"interleaved"}
    assert [(s.zero, s.chunks) for s in more] == [(z, c) for z in (0, 1) for c in (5, 6, 7)]
    few = SimpleNamespace(holds_parameters=[True] * 9)
    assert uneven_chunks(found, mesh, few) == []  # type: ignore[arg-type]
    assert uneven_chunks(found[:2], mesh, provider) == []  # type: ignore[arg-type]
