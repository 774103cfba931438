"""What a DeviceMesh pins: degrees, over how many ranks ZeRO shards, and orders that are refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import UsageError
from autopar.mesh import ORDERS
from autopar.search.options import parse_pins
from autopar.workflow.world import world_cluster


def mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: object = None) -> DeviceMesh:
    """Without process groups, seen from rank 0."""
    count = torch.Size(shape).numel()
    laid = torch.arange(count).reshape(shape) if ranks is None else torch.tensor(ranks)
    return DeviceMesh("cpu", laid, mesh_dim_names=names, _init_backend=False, _rank=0)


def pinned(shape: tuple[int, ...], names: tuple[str, ...], pins: str = "") -> str:
    cluster, found = world_cluster(mesh(shape, names), torch.Size(shape).numel(), "cpu", pins)
    assert cluster.size == torch.Size(shape).numel()
    return str(found)


@pytest.mark.parametrize(
    ("shape", "names", "pins"),
    [
        ((2, 2), ("pp", "tp"), "tp=2,pp=2,dp=1,cp=1"),
        ((2, 2, 2), ("dp", "cp", "tp"), "tp=2,pp=1,dp=2,cp=2"),
        ((2, 2), ("dp_replicate", "dp_shard"), "tp=1,pp=1,dp=4,cp=1,shard=2"),
        ((1, 4), ("dp_replicate", "dp_shard"), "tp=1,pp=1,dp=4,cp=1,shard=4"),
        # One rank to shard over, and so copies of all.
        ((4, 1), ("dp_replicate", "dp_shard"), "tp=1,pp=1,dp=4,zero=0,cp=1"),
        ((2, 2), ("dp_replicate", "tp"), "tp=2,pp=1,dp=2,zero=0,cp=1"),
        ((2, 1, 2), ("dp_replicate", "dp_shard", "cp"), "tp=1,pp=1,dp=2,cp=2,shard=2"),
        # Nothing to shard or to copy.
        ((1, 1, 2), ("dp_replicate", "dp_shard", "tp"), "tp=2,pp=1,dp=1,cp=1"),
        # Where a dim has one rank, its place says nothing.
        ((4, 1), ("dp_shard", "dp_replicate"), "tp=1,pp=1,dp=4,cp=1,shard=4"),
    ],
)
def test_dims_pin_degrees_and_shards(shape: tuple[int, ...], names: tuple[str, ...], pins: str):
    found, expected = parse_pins(pinned(shape, names)), parse_pins(pins)
    assert found == expected


@pytest.mark.parametrize(
    ("ranks", "names", "order"),
    [
        ([[0, 1], [2, 3]], ("pp", "dp"), "tp-cp-dp-pp"),
        ([[0, 1], [2, 3]], ("dp", "pp"), "tp-cp-pp-dp"),
        ([[0, 2], [1, 3]], ("dp", "pp"), "tp-cp-dp-pp"),
        ([[0, 2], [1, 3]], ("pp", "dp_shard"), "tp-cp-pp-dp"),
    ],
)
def test_the_order_is_that_of_the_ranks(
    ranks: list[list[int]], names: tuple[str, ...], order: str
) -> None:
    _, found = world_cluster(mesh((2, 2), names, ranks), 4, "cpu", "")
    assert found.order == order
    other = next(o for o in ORDERS if o != order)
    with pytest.raises(UsageError, match=f"pins say order={other}, .* order={order}"):
        world_cluster(mesh((2, 2), names, ranks), 4, "cpu", f"order={other}")


def test_other_pins_stay_and_those_that_agree():
    names = ("dp_replicate", "dp_shard")
    found = pinned((2, 2), names, "zero=3,shard=2,dp=4")
    assert parse_pins(found) == parse_pins("tp=1,pp=1,dp=4,cp=1,shard=2,zero=3")


@pytest.mark.parametrize(
    ("shape", "names", "pins", "said"),
    [
        ((4, 1), ("dp_replicate", "dp_shard"), "zero=3", "pins say zero=3, .* says zero=0"),
        ((2, 2), ("dp_replicate", "dp_shard"), "shard=4", "pins say shard=4, .* says shard=2"),
        ((2, 2), ("pp", "tp"), "tp=4", "pins say tp=4, .* says tp=2"),
    ],
)
def test_pins_that_the_mesh_contradicts(
    shape: tuple[int, ...], names: tuple[str, ...], pins: str, said: str
):
    with pytest.raises(UsageError, match=said):
        pinned(shape, names, pins)


@pytest.mark.parametrize(
    ("names", "right"),
    [
        (("dp_shard", "dp_replicate"), r"\('dp_replicate', 'dp_shard'\)"),
        (("tp", "dp_shard"), r"\('dp_shard', 'tp'\)"),
        (("cp", "dp"), r"\('dp', 'cp'\)"),
    ],
)
def test_dims_in_another_order_name_the_one_that_works(names: tuple[str, ...], right: str):
    with pytest.raises(UsageError, match=f"mesh_dim_names={right}"):
        pinned((2, 2), names)


def test_ranks_that_do_not_follow_each_other():
    odd = mesh((2, 2), ("dp", "tp"), [[0, 2], [1, 3]])
    with pytest.raises(UsageError, match=r"\[\[0, 2\], \[1, 3\]\]: .* neighbouring ranks in tp"):
        world_cluster(odd, 4, "cpu", "")


def test_dims_of_other_names():
    for names in (("dp", "dp_shard"), ("x", "tp")):
        with pytest.raises(UsageError, match="name its dims pp, dp, cp and tp"):
            pinned((2, 2), names)
