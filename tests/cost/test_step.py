"""Exposed seconds of one block, against the formulas of the model worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.block_cost import BlockCost, Experts, Tied
from autopar.cluster import Cluster, Device, Link
from autopar.cost import step
from autopar.cost.setting import Practice, Setting
from autopar.cost.step import (
    block_times,
    dp_collectives,
    exposed,
    optimizer_seconds,
    send_seconds,
    tied_seconds,
)
from autopar.mesh import Mesh

BLOCK = BlockCost("a", "k", 1.0, 2.0, 0.25, 0.5, 1.0, 1000, 1000, 500, 50, 30, 20, 0.125)


@pytest.fixture(autouse=True)
def plain_collectives(monkeypatch):
    """One second per thousand bytes, all_reduce twice that; the group must be the right one."""

    def seconds(kind, nbytes, group, stride, cluster):
        assert group > 1 and group * stride <= cluster.size
        return nbytes / 1000 * (2 if kind == "all_reduce" else 1)

    monkeypatch.setattr(step, "collective_time", seconds)
    monkeypatch.setattr(step, "usual_slowdown", lambda: SLOWDOWN)


SLOWDOWN = 0.25


def behind(needed, hiding):
    """What communication of `needed` seconds adds to `hiding` seconds of compute."""
    return max(0.0, needed - hiding) + SLOWDOWN * min(needed, hiding)


def setting(pp=1, dp=4, zero=0, m=4, precision="fp32", optimizer="adamw"):
    device = Device("d", 10**9, 1e6, {"float32": 1e12}, 1.0, 0.5, 0.0, 0)
    cluster = Cluster("c", device, 1, pp * dp, (Link("l", pp * dp, 1e9, 1e-6),))
    return Setting(cluster, Mesh(pp, dp, 1), 1, m, "1f1b", zero, precision, optimizer)


def test_compute_communication_and_recomputation():
    times = block_times(BLOCK, setting(dp=1))
    assert (times.compute, times.tp_comm, times.recompute) == (3.0, 0.75, 1.25)
    assert times.kept == 3.75 and times.extra == 1.25
    assert times.end_tp == 0.125 and times.dp_kept == times.end_dp == times.first_gather == 0


def test_zero_0_all_reduces_behind_the_backward():
    times = block_times(BLOCK, setting())
    assert times.dp_kept == 0
    assert times.end_dp == pytest.approx(behind(8.0, 2.5))
    assert times.end_dp + times.end_first == pytest.approx(8.0)  # nothing hides the first block's


def test_zero_1_scatters_and_gathers_once():
    times = block_times(BLOCK, setting(zero=1))
    assert times.dp_kept == 0
    assert times.end_dp == pytest.approx(behind(4.0, 2.5) + behind(4.0, 1.25))
    assert times.end_dp + times.end_first == pytest.approx(4.0 + 4.0)


def test_zero_2_scatters_in_every_backward():
    times = block_times(BLOCK, setting(zero=2))
    assert times.dp_kept == pytest.approx(behind(4.0, 2.5))
    assert times.dp_recomputed == pytest.approx(behind(4.0, 2.5 + 1.25))
    # The scatter hides behind recomputation, which it slows down.
    assert times.extra == pytest.approx(SLOWDOWN * 1.25)
    assert times.end_dp == pytest.approx(behind(4.0, 1.25))


def test_zero_3_gathers_in_both_directions():
    times = block_times(BLOCK, setting(zero=3))
    assert times.dp_kept == pytest.approx(behind(4.0, 1.25) + behind(4.0 + 4.0, 2.5))
    assert times.dp_recomputed == pytest.approx(behind(4.0, 1.25) + behind(4.0 + 4.0, 3.75))
    assert times.first_gather == pytest.approx(4.0 - behind(4.0, 1.25))
    assert times.end_dp == times.end_first == 0


def hybrid(zero, m=4, per_node=0):
    """Eight ranks that shard over four; `per_node`: four of them have a link of their own."""
    found = setting(dp=8, zero=zero, m=m)
    links = (Link("n", 4, 1e9, 1e-6), Link("l", 8, 1e9, 1e-6)) if per_node else found.cluster.links
    cluster = replace(found.cluster, links=links)
    return replace(found, cluster=cluster, mesh=Mesh(1, 8, 1, dp_replicate=2))


def test_experts_that_ep_splits_have_no_copies():
    found = hybrid(1)
    found = replace(found, mesh=replace(found.mesh, ep=2))
    block = replace(BLOCK, experts=Experts(600, 600))
    assert step.copies_seconds(block, found) == step.copies_seconds(
        replace(BLOCK, trainable=400), found
    )


def test_hybrid_sharding_sums_a_quarter_over_the_copies_in_the_last_backward():
    """4 s to gather or scatter, 2 x 1 s to sum the shards. On the same link these come after the
    reduce-scatter: nothing of a backward of 2.5 s is left."""
    assert dp_collectives(BLOCK, hybrid(1)) == (4.0, 4.0)
    for zero in (1, 2, 3):
        times = block_times(BLOCK, hybrid(zero))
        alone = block_times(BLOCK, setting(dp=4, zero=zero))
        assert times.dp_kept == alone.dp_kept
        assert times.end_dp == pytest.approx(alone.end_dp + 2.0)
        assert times.end_first == pytest.approx(alone.end_first)
    assert block_times(BLOCK, hybrid(1)).end_optimizer == alone.end_optimizer


def test_copies_are_summed_beside_the_scatter_where_they_have_a_link_of_their_own():
    for zero, other in ((1, 4.0), (2, 4.0), (3, 8.0)):
        times = block_times(BLOCK, hybrid(zero, per_node=4))
        alone = block_times(BLOCK, setting(dp=4, zero=zero))
        assert times.end_dp == pytest.approx(alone.end_dp + behind(2.0, other))
        # Nothing hides those of a stage's first block.
        assert times.end_dp + times.end_first == pytest.approx(alone.end_dp + alone.end_first + 2.0)


def test_hidden_communication_slows_compute_and_the_first_gather_is_exposed():
    light = replace(BLOCK, parameters=10, trainable=10)
    times = block_times(light, setting(zero=3))
    assert times.dp_kept == pytest.approx(SLOWDOWN * 0.12)
    assert times.first_gather == pytest.approx(0.04 * (1 - SLOWDOWN))


def test_frameworks_that_do_not_overlap_expose_all_of_it():
    late = replace(setting(), practice=Practice(overlap_gradients=False))
    assert block_times(BLOCK, late).end_dp == pytest.approx(8.0)
    assert block_times(BLOCK, late).end_first == 0
    zero = replace(setting(zero=3), practice=Practice(overlap_gathers=False))
    assert block_times(BLOCK, zero).dp_kept == pytest.approx(4.0 + behind(8.0, 2.5))


def test_host_work_for_blocks_counts_as_compute():
    busy = replace(setting(dp=1), practice=Practice(block_seconds=0.5))
    assert block_times(BLOCK, busy).compute == pytest.approx(3.5)


def test_bytes_follow_the_precision():
    mixed = block_times(
        replace(
            BLOCK, forward_compute=0.0, backward_compute=0.0, forward_comm=0.0, backward_comm=0.0
        ),
        setting(zero=3, precision="bf16-mixed"),
    )
    assert mixed.dp_kept == pytest.approx(2.0 + 2.0 + 4.0)  # gathers in bf16, reduces in fp32


def test_frozen_parameters_are_gathered_but_not_reduced():
    frozen = replace(BLOCK, trainable=0)
    found = block_times(frozen, setting(zero=3)).dp_kept
    assert found == pytest.approx(behind(4.0, 1.25) + behind(4.0, 2.5))
    assert block_times(frozen, setting()).end_dp == 0
    assert block_times(frozen, setting()).end_optimizer == 0


def test_sends_need_a_pipeline():
    assert send_seconds(2000, setting(pp=2)) == pytest.approx(2.0)
    assert send_seconds(2000, setting()) == 0 == send_seconds(0, setting(pp=2))


def test_a_split_send_is_gathered_again():
    device = Device("d", 10**9, 1e6, {"float32": 1e12}, 1.0, 0.5, 0.0, 0)
    cluster = Cluster("c", device, 1, 8, (Link("l", 8, 1e9, 1e-6),))
    whole = Setting(cluster, Mesh(2, 1, 4), 1, 4)
    split = replace(whole, practice=Practice(split_sends=True))
    assert send_seconds(2000, whole) == pytest.approx(2.0)
    assert send_seconds(2000, split) == pytest.approx(0.5 + 2.0)  # sent, then gathered


def test_whole_gradients_are_reduced_where_a_shard_would_do():
    gather, scatter = dp_collectives(BLOCK, setting(zero=1))
    whole = replace(setting(zero=1), practice=Practice(reduce_whole=True))
    assert dp_collectives(BLOCK, whole) == (gather, 2 * scatter)


def test_a_device_states_its_own_slowdown():
    plain = setting()
    device = replace(plain.cluster.device, overlap_slowdown=1.0)
    own = replace(plain, cluster=replace(plain.cluster, device=device))
    assert exposed(2.0, 3.0, plain) == pytest.approx(2.0 * SLOWDOWN)
    assert exposed(2.0, 3.0, own) == pytest.approx(2.0)


def test_optimizer_is_bound_by_memory_bandwidth():
    # AdamW reads parameter, gradient and two states, writes parameter and states: 7 x 4 bytes.
    block = replace(BLOCK, shapes=((50, 20),))
    assert optimizer_seconds(block, setting()) == pytest.approx(1000 * 28 / 5e5)
    assert optimizer_seconds(block, setting(zero=1)) == pytest.approx(250 * 28 / 5e5)
    assert optimizer_seconds(block, setting(optimizer="sgd")) == pytest.approx(1000 * 12 / 5e5)
    # Adafactor reads the gradient three times, the parameter twice; its states hardly count.
    adafactor = optimizer_seconds(block, setting(optimizer="adafactor"))
    assert adafactor == pytest.approx((1000 * 24 + 2 * 70 * 4) / 5e5)
    # 8-bit states: a byte an element, one scale for 256, two tables.
    block = replace(BLOCK, trainable=8192, shapes=((128, 64),))
    eight_bit = optimizer_seconds(block, setting(optimizer="adamw-8bit"))
    assert eight_bit == pytest.approx((8192 * 12 + 4 * (8192 + 128 + 1024)) / 5e5)


def test_an_optimizer_on_the_host_is_bound_by_its_link_and_memory():
    # Parameter and gradient there, parameter back; there what AdamW moves on a device.
    given = setting(optimizer="adamw-host")
    device = replace(
        given.cluster.device, host_bytes_per_second=1e3, host_memory_bytes_per_second=4e3
    )
    on = replace(given, cluster=replace(given.cluster, device=device))
    assert optimizer_seconds(BLOCK, on) == pytest.approx(1000 * (12 / 1e3 + 28 / 4e3))
    sharded = optimizer_seconds(BLOCK, replace(on, zero=1))
    assert sharded == pytest.approx(250 * (12 / 1e3 + 28 / 4e3))


def test_tied_parameters_are_summed_over_their_stages():
    tied = replace(BLOCK, tied=(Tied("other", 7, 7), Tied("t", 400, 400)))
    assert tied_seconds([tied, BLOCK, tied], "t", setting(pp=4)) == pytest.approx(2 * 1.6)
    assert tied_seconds([tied, BLOCK, tied], "t", setting(pp=4, zero=1)) == pytest.approx(2 * 0.4)
    assert tied_seconds([tied, BLOCK, tied], "t", setting()) == 0
    assert tied_seconds([tied, BLOCK], "t", setting(pp=4)) == 0
    assert tied_seconds([tied, BLOCK, tied], "none", setting(pp=4)) == 0
    frozen = replace(tied, tied=(Tied("t", 400, 0),))
    assert tied_seconds([frozen, BLOCK, frozen], "t", setting(pp=4)) == 0
