"""The mesh: ranks and their coordinates."""

from __future__ import annotations

from autopar.mesh import AXES, ORDERS, Mesh

MESH = Mesh(pp=2, dp=3, tp=4)
SPLIT = Mesh(pp=2, dp=3, cp=5, tp=4)


def test_coordinates_cover_the_mesh_with_tp_innermost() -> None:
    found = [MESH.coordinates(r) for r in range(MESH.size)]
    assert len({tuple(c.values()) for c in found}) == MESH.size == 24
    for rank, c in enumerate(found):
        assert rank == sum(c[a] * MESH.stride(a) for a in AXES)
    assert found[1] == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert found[12] == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}


def test_cp_lies_between_tp_and_dp_and_makes_replicas_with_dp() -> None:
    assert SPLIT.size == 120 and SPLIT.replicas == SPLIT.degree("replica") == 15
    for rank in range(SPLIT.size):
        found = SPLIT.coordinates(rank)
        assert SPLIT.rank(**found) == rank == sum(found[a] * SPLIT.stride(a) for a in AXES)
    assert [SPLIT.stride(a) for a in ("tp", "cp", "replica", "dp", "pp")] == [1, 4, 4, 20, 60]
    assert str(SPLIT) == "pp2 dp3 cp5 tp4" and SPLIT.to_dict()["cp"] == 5


def test_hybrid_sharding_divides_the_replicas_into_neighbours() -> None:
    mesh = Mesh(pp=2, dp=6, cp=2, tp=4, dp_replicate=3)
    assert (mesh.replicas, mesh.dp_shard) == (12, 4) and mesh.size == 96
    assert [mesh.degree(a) for a in ("dp_shard", "dp_replicate")] == [4, 3]
    assert [mesh.stride(a) for a in ("dp_shard", "dp_replicate")] == [4, 16]
    assert str(mesh) == "pp2 dp6 cp2 tp4 shard4" and mesh.to_dict()["dp_replicate"] == 3
    assert mesh.shape == Mesh(pp=2, dp=6, cp=2, tp=4) and mesh.shape.dp_shard == 12


def test_degrees_strides_and_text() -> None:
    assert [MESH.degree(a) for a in AXES] == [2, 3, 1, 4]
    assert [MESH.stride(a) for a in AXES] == [12, 4, 4, 1]
    assert str(MESH) == "pp2 dp3 tp4"
    assert MESH.to_dict() == {"pp": 2, "dp": 3, "tp": 4, "cp": 1, "ep": 1}
    assert Mesh().size == 1


def test_with_stages_inside_replicas_are_outermost() -> None:
    mesh = Mesh(pp=2, dp=6, tp=4, ep=2, dp_replicate=3, order=ORDERS[1])
    assert mesh.axes == ("dp", "pp", "cp", "tp")
    assert [mesh.stride(a) for a in ("tp", "pp", "dp", "replica")] == [1, 4, 8, 8]
    assert [mesh.stride(a) for a in ("ep", "expert_replica")] == [8, 16]
    assert [mesh.stride(a) for a in ("dp_shard", "dp_replicate")] == [8, 16]
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(**place) for place in places] == list(range(48))
    assert places[4] == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert places[8] == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert str(mesh) == "dp6 pp2 tp4 ep2 shard2"
    assert Mesh(**mesh.to_dict()) == mesh  # type: ignore[arg-type]
