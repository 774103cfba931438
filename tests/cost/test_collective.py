from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.collective import KINDS, collective_time, group_levels
from autopar.errors import UsageError

H100 = Cluster.parse("h100:8x8")
MIB = 2**20

# (cluster, GPUs, MiB, microseconds): nccl-tests style all-reduce, out of place. Sources:
# A100, H200, B200: github.com/stas00/ml-engineering, commit 744d01e18b, network/README.md lines
# 1216-1276 and 1400-1423. A100 on p4de, H100 on p5 (1 and 2 nodes): AWS nccl-tests READMEs. H100,
# 8 nodes: CoreWeave nccl-tests README. H100, 4 and 512 nodes: arXiv 2411.13055, read from a figure.
# Times are 2(n-1)/n * size / bus bandwidth where only that is printed. docs/calibration.md has all
# rows and those that are far off: loops in PyTorch below 1 MiB, one slow run on 2 nodes of p5.
ALL_REDUCE = [
    ("a100-80:1x8", 8, 1, 101.9),
    ("a100-80:1x8", 8, 16, 276.6),
    ("a100-80:1x8", 8, 128, 1327.6),
    ("a100-80:1x8", 8, 1024, 8203.9),
    ("a100-80:2x8/efa-4x100", 16, 8 / MIB, 164.3),
    ("a100-80:2x8/efa-4x100", 16, 1 / 32, 224.6),
    ("a100-80:2x8/efa-4x100", 16, 2, 432.6),
    ("a100-80:2x8/efa-4x100", 16, 128, 3912.9),
    ("a100-80:2x8/efa-4x100", 16, 1024, 26217.0),
    ("h200:1x8", 8, 16, 133.52),
    ("h200:1x8", 8, 1024, 4053.39),
    ("h200:1x8", 4, 8192, 2 * 3 / 4 * 8192 * MIB / 363.3e3),
    ("h100:1x8", 8, 8 / MIB, 12.9),
    ("h100:1x8", 8, 1 / 32, 18.78),
    ("h100:1x8", 8, 1 / 4, 20.27),
    ("h100:1x8", 8, 4, 55.44),
    ("h100:1x8", 8, 16, 124.0),
    ("h100:1x8", 8, 1024, 4253.0),
    ("b200:1x8", 8, 1, 50.89),
    ("b200:1x8", 8, 16, 115.16),
    ("b200:1x8", 8, 1024, 2597.74),
    ("h100:2x8/efa-32x100", 16, 8 / MIB, 69.12),
    ("h100:2x8/efa-32x100", 16, 1, 123.2),
    ("h100:2x8/efa-32x100", 16, 16, 298.1),
    ("h100:2x8/efa-32x100", 16, 128, 870.3),
    ("h100:2x8/efa-32x100", 16, 4096, 17286.0),
    ("b200:4x8", 32, 1, 378.33),
    ("b200:4x8", 32, 16, 504.51),
    ("b200:4x8", 32, 128, 1313.77),
    ("b200:4x8", 32, 4096, 22053.05),
    ("h100:8x8", 64, 512, 2984.6),
    ("h100:8x8", 64, 4096, 22181.0),
    ("h100:4x8", 32, 16, 2 * 31 / 32 * 16 * MIB / 115e3),
    ("h100:512x8", 4096, 16, 2 * 16 * MIB / 40e3),
]


@pytest.mark.parametrize(("text", "group", "mib", "microseconds"), ALL_REDUCE)
def test_published_all_reduce(text: str, group: int, mib: float, microseconds: float) -> None:
    cluster = Cluster.parse(text)
    seconds = collective_time("all_reduce", mib * MIB, group, 1, cluster)
    error = seconds * 1e6 / microseconds - 1
    print(
        f"{text} {group} ranks {mib} MiB: {seconds * 1e6:.0f} us, {microseconds:.0f} measured, "
        f"{error:+.0%}"
    )
    assert abs(error) < 0.3


# all_to_all of A100-class GPUs in one node: (GPUs, MiB per rank, microseconds).
# Source: Hetu-Galvatron, hardware profile JSON.
@pytest.mark.parametrize(
    ("group", "mib", "microseconds"),
    [(8, 16, 200.3), (8, 1024, 4815.1), (4, 16, 151.4), (4, 512, 2100.3)],
)
def test_published_all_to_all(group: int, mib: float, microseconds: float) -> None:
    cluster = Cluster.parse("a100-80:1x8")
    seconds = collective_time("all_to_all", group * mib * MIB, group, 1, cluster)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.35)


# All-gather and reduce-scatter of 16 GiB on 8 H200, GB/s bus bandwidth (ml-engineering).
@pytest.mark.parametrize(("kind", "rate"), [("all_gather", 361.4e9), ("reduce_scatter", 362.9e9)])
def test_published_gather_and_scatter(kind: str, rate: float) -> None:
    size = 16 * 1024 * MIB
    seconds = collective_time(kind, size, 8, 1, Cluster.parse("h200:1x8"))
    assert seconds == pytest.approx(7 / 8 * size / rate, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_or_no_bytes_cost_nothing(kind: str) -> None:
    assert collective_time(kind, 2**30, 1, 1, H100) == 0
    assert collective_time(kind, 0, 8, 1, H100) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "stride"), [(8, 1), (4, 2), (8, 8), (64, 1), (16, 4)])
def test_more_bytes_take_longer_and_cost_less_each(kind: str, group: int, stride: int) -> None:
    sizes = [4**i for i in range(5, 17)]
    times = [collective_time(kind, size, group, stride, H100) for size in sizes]
    assert times == sorted(times)
    rates = [size / seconds for size, seconds in zip(sizes, times, strict=True)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
)
def test_leaving_the_node_costs(kind: str) -> None:
    inside = collective_time(kind, 2**28, 8, 1, H100)
    across = collective_time(kind, 2**28, 8, 8, H100)
    assert across > 3 * inside


def test_an_all_reduce_ring_is_a_scatter_and_a_gather() -> None:
    """But for the start, which it pays once, where messages are long."""
    cluster = Cluster.parse("a100-80:1x8")
    both = sum(
        collective_time(kind, 2**30, 8, 1, cluster) for kind in ("all_gather", "reduce_scatter")
    )
    start = cluster.links[0].start_seconds
    assert collective_time("all_reduce", 2**30, 8, 1, cluster) == pytest.approx(both - start)


def test_a_ring_has_a_step_for_each_rank_and_a_tree_one_for_each_doubling() -> None:
    """So a gather of little data grows with the ranks, an all-reduce with their logarithm."""

    def seconds(kind: str, nodes: int) -> float:
        return collective_time(kind, 1024, 8 * nodes, 1, Cluster.parse("h100:1024x8"))

    gathers = [seconds("all_gather", n) for n in (128, 256, 512)]
    assert gathers[2] - gathers[1] == pytest.approx(2 * (gathers[1] - gathers[0]), rel=0.01)
    reduces = [seconds("all_reduce", n) for n in (128, 256, 512)]
    assert reduces[2] - reduces[1] == pytest.approx(reduces[1] - reduces[0], rel=0.05)
    assert reduces[2] < gathers[2]
    # Few nodes are joined by a ring: that has fewer steps.
    assert seconds("all_gather", 2) < seconds("all_reduce", 2) < 2 * seconds("all_gather", 2)


def test_short_messages_take_the_short_protocol() -> None:
    link = H100.links[0]
    one = replace(H100, nodes=1, links=(link,))
    without = replace(one, links=(replace(link, short_rate=0.0),))
    for kind, size in (("all_reduce", 2**18), ("all_gather", 2**19)):
        assert collective_time(kind, size, 8, 1, one) < collective_time(kind, size, 8, 1, without)
    for size in (2**26, 2**30):
        long = [collective_time("all_reduce", size, 8, 1, cluster) for cluster in (one, without)]
        assert long[0] == long[1]


def test_strided_groups_share_what_their_node_has() -> None:
    """Eight groups of one rank per node move eight times the bytes over the same adapters as one
    group of all ranks that moves each byte once."""
    size = 2**34
    strided = collective_time("reduce_scatter", size, 8, 8, H100)
    whole = collective_time("reduce_scatter", size, 64, 1, H100)
    assert strided == pytest.approx(8 * whole * (7 / 8) / (63 / 64), rel=0.1)


def test_collectives_at_the_same_time_share_the_links() -> None:
    alone = collective_time("all_gather", 2**32, 8, 8, H100)
    assert collective_time("all_gather", 2**32, 8, 8, H100, sharing=2) == pytest.approx(
        2 * alone, rel=0.02
    )
    small = [collective_time("all_gather", 64, 8, 8, H100, sharing=n) for n in (1, 2)]
    assert small[1] < 1.1 * small[0]


def test_gathers_can_be_slower_than_sums() -> None:
    slow = replace(H100, links=tuple(replace(lk, gather_efficiency=0.5) for lk in H100.links))
    for kind in ("all_gather", "reduce_scatter"):
        fast = collective_time(kind, 2**34, 8, 8, H100)
        assert collective_time(kind, 2**34, 8, 8, slow) == pytest.approx(2 * fast, rel=0.01)
    same = [collective_time("all_reduce", 2**34, 8, 8, cluster) for cluster in (slow, H100)]
    assert same[0] == same[1]


# DeepEP README (H800, an adapter of 50 GB/s for each GPU): GB/s that a rank sends.
@pytest.mark.parametrize(("ranks", "rate"), [(16, 43e9), (32, 45.5e9), (64, 45.5e9)])
def test_published_dispatch(ranks: int, rate: float) -> None:
    local = 4096 * 7168
    seconds = collective_time("dispatch", local * ranks, ranks, 1, H100)
    assert seconds == pytest.approx(local / rate, rel=0.08)


def test_levels_count_the_ranks_that_share_a_node() -> None:
    def lanes(group: int, stride: int, cluster: Cluster = H100) -> list[tuple[str, int, int]]:
        levels = group_levels(cluster.links, group, stride)
        return [(level.link.name, level.lanes, level.members) for level in levels]

    assert lanes(8, 1) == [("nvlink", 1, 8)]
    assert lanes(64, 1) == [("nvlink", 1, 8), ("network", 8, 64)]
    assert lanes(8, 8) == [("network", 1, 8)]
    assert lanes(32, 2) == [("nvlink", 1, 4), ("network", 4, 32)]
    # Six GPUs in a node, groups of four: some group has two ranks on either side.
    assert lanes(4, 1, Cluster.parse("h100:2x6")) == [("nvlink", 1, 2), ("network", 2, 4)]
    # Stride four does not tile six: no sharing is counted on.
    assert lanes(3, 4, Cluster.parse("h100:2x6")) == [("network", 1, 3)]


def test_a_group_with_one_rank_per_node_uses_one_nic() -> None:
    size = 2**34
    one = collective_time("all_gather", size, 8, 8, H100)
    assert one == pytest.approx(7 / 8 * size / 4.8e10, rel=0.02)
    eight = collective_time("all_gather", size, 64, 1, H100)
    assert one / eight == pytest.approx(8 * (7 / 8) / (63 / 64) * 365 / 384, rel=0.1)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="unknown collective 'gather'"):
        collective_time("gather", 1, 8, 1, H100)
    with pytest.raises(UsageError, match="a group of 16 ranks with stride 8 on 64 ranks"):
        collective_time("all_reduce", 1, 16, 8, H100)
