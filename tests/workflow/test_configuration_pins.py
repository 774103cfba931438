"""Pins to a configuration: what follows from what, and what is refused."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.workflow.configuration_pins import configuration_from_pins

BASE = "tp=2,pp=1,zero=1,microbatch=2,recompute=full"
DIVIDED = BASE.replace("pp=1", "pp=2") + ",vp=2,schedule=zero-bubble"


def read(pins: str, batch: int = 64):
    cluster = Cluster.parse("h100:2x8")
    return configuration_from_pins(
        pins, cluster, sequence=2048, global_batch=batch, precision="bf16-mixed"
    )


def test_dp_and_micro_batches_follow():
    found = read(BASE)
    assert found.mesh == Mesh(1, 8, 2) and found.microbatches == 4
    assert (found.schedule, found.chunks, found.precision) == ("1f1b", 1, "bf16-mixed")
    assert found.boundaries == ("R", "S(1)")


def test_zero_bubble_goes_without_recomputation():
    found = read(DIVIDED.replace("full", "none"))
    assert (found.schedule, found.chunks, found.setting.divided) == ("zero-bubble", 2, True)


def test_cp_splits_the_sequence_beside_dp():
    found = read(BASE + ",cp=4")
    assert found.mesh == Mesh(1, 2, 2, 4) and found.microbatches == 16


def test_ep_divides_the_ranks_of_dp_and_cp():
    assert read(BASE + ",ep=8").mesh == Mesh(1, 8, 2, 1, 8)
    assert read(BASE + ",cp=2,ep=8").mesh == Mesh(1, 4, 2, 2, 8)
    with pytest.raises(UsageError, match="ep=3 does not divide the 8 ranks"):
        read(BASE + ",ep=3")


def test_negative_batches_and_rounds_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="global batch -16 is not dp"):
        read(BASE, batch=-16)
    pins = DIVIDED.replace("full", "none").replace("microbatch=2", "microbatch=1")
    with pytest.raises(UsageError, match="7 micro-batches: .* rounds"):
        read(pins, batch=28)


def test_zero_shards_over_groups_of_the_ranks_of_dp_and_cp():
    assert read(BASE + ",shard=4").mesh == Mesh(1, 8, 2, dp_replicate=2)
    assert read(BASE + ",cp=2,shard=2").mesh == Mesh(1, 4, 2, 2, dp_replicate=4)
    assert read(BASE + ",shard=8").mesh == Mesh(1, 8, 2)
    assert read(BASE + ",ep=8,shard=4").mesh == Mesh(1, 8, 2, ep=8, dp_replicate=2)
    for pins in (",shard=3", ",shard=1"):
        with pytest.raises(UsageError, match="shard=. with zero=1"):
            read(BASE + pins)
    with pytest.raises(UsageError, match="shard=4 with zero=0"):
        read(BASE.replace("zero=1", "zero=0") + ",shard=4")


def test_what_zero_3_gathers_can_be_kept():
    whole = BASE.replace("zero=1", "zero=3")
    assert read(whole).reshards and read(whole + ",reshard=all").reshards
    assert not read(whole + ",reshard=none").reshards


def test_an_optimizer_on_the_host_needs_one_that_is_known():
    assert read(BASE + ",optimizer=adamw-host").optimizer == "adamw-host"
    with pytest.raises(UsageError, match="host's memory is not known apart from that of cpu"):
        configuration_from_pins(
            "tp=1,pp=1,zero=0,microbatch=1,recompute=none,optimizer=adamw-host",
            Cluster.parse("cpu:2"),
            sequence=8,
            global_batch=2,
            precision="fp32",
        )


def test_everything_can_be_named():
    found = read(
        "tp=2,pp=2,dp=4,vp=2,sp=1,zero=1,microbatch=1,microbatches=16,schedule=interleaved,"
        "recompute=core,precision=fp32,optimizer=sgd"
    )
    assert (found.schedule, found.chunks, found.recompute) == ("interleaved", 2, "core")
    assert (found.precision, found.optimizer, found.boundaries) == ("fp32", "sgd", ("S(1)",))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("tp=2", "not pinned: pp, zero, microbatch, recompute"),
        (BASE + ",tpp=3", "did you mean tp"),
        (BASE + ",zero=4", "zero=4"),
        (BASE + ",tp=4", "pinned twice"),
        (BASE + ",dp=3", "6 ranks, the cluster has 16"),
        (BASE.replace("microbatch=2", "microbatch=3"), "global batch 64"),
        (BASE + ",microbatches=5", "global batch 64"),
        (BASE + ",vp=2", "schedule=interleaved with vp=2 and pp=1: one stage"),
        (BASE + ",schedule=interleaved", "schedule=interleaved with vp=1 and pp=1: one stage"),
        (DIVIDED.replace("zero-bubble", "zbv").replace("vp=2", "vp=3"), "zbv has 2 chunks"),
        (DIVIDED, "schedule=zero-bubble: a recomputed block"),
        (DIVIDED.replace("full", "none").replace("zero=1", "zero=3"), "zero-bubble: ZeRO-3"),
        (BASE + ",dp=0", "whole number"),
        (BASE + ",reshard=none", "reshard=none with zero=1 on 8 replicas"),
        (BASE + ",cp=3", "pp 1 x dp 2 x cp 3 x tp 2 is 12 ranks, the cluster has 16"),
    ],
)
def test_refusals_name_the_pin(pins, message):
    with pytest.raises(UsageError, match=message):
        read(pins)
