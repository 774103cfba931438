"""How long a collective takes, from its size and where its group lies on the links.

A group is `group` ranks spaced by `stride`. At each link level it has some *members* per unit of
that level (the ranks of one node, for example). Data crosses a level on as many *lanes* as there
are members inside one unit below it: eight members of a node use eight NICs, one uses one.
Phases at different levels are pipelined, so the slowest one decides, and

    seconds = slowest phase + ramp + latency
    ring    = share * bytes / (lanes * bytes_per_second)     share: see `_RING_SHARE`
    ramp    = ring * (lanes * half_saturation / bytes) ** 0.75
    latency = sum over levels of latency_seconds * log2(units joined)   (a tree, for small messages)

all_reduce knows two shortcuts that NCCL takes: the switch adds up inside a node, and two units
exchange halves instead of going round a ring. The exponent and the constants of the links were
fitted to published nccl-tests runs (see the device files).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, log2
from typing import NamedTuple

from autopar.cluster import Cluster, Link
from autopar.errors import UsageError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

# Share of the tensor, in units of (n-1)/n, that passes each lane of a ring.
_RING_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
_RAMP_EXPONENT = 0.75
# all_to_all on 4 and 8 A100 (Hetu-Galvatron) needs twice the bytes of a ring to reach half speed.
_EXCHANGE_RAMP = 2.0


class Level(NamedTuple):
    """A link level that the group uses: `lanes` members below it, `members` within it."""

    link: Link
    lanes: int
    members: int


def collective_time(kind: str, nbytes: float, group: int, stride: int, cluster: Cluster) -> float:
    """Seconds of one collective of every group (all groups of a mesh axis run at once).

    `nbytes`: the whole, unsharded tensor (for all_to_all: over the whole group); for broadcast and
    send the message. `stride`: distance in ranks between neighbours of the group. For send the
    group is the pipeline: the slowest of its neighbour-to-neighbour messages. A group of 1, or no
    bytes, costs 0. Raises `UsageError` for an unknown kind or a group that the cluster can't hold.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown collective {kind!r}", next_step=f"use one of {', '.join(KINDS)}")
    if group == 1 or nbytes <= 0:
        return 0.0
    if group < 1 or stride < 1 or group * stride > cluster.size:
        raise UsageError(
            f"a group of {group} ranks with stride {stride} on {cluster.size} ranks",
            next_step="choose degrees whose product is at most the size of the cluster",
        )
    levels = group_levels(cluster.links, group, stride)
    if kind == "send":
        outer = levels[-1].link
        return outer.latency_seconds + nbytes / outer.bytes_per_second
    latency = sum(lv.link.latency_seconds * log2(lv.members / lv.lanes) for lv in levels)
    if kind == "broadcast":
        slowest = min(lv.lanes * lv.link.bytes_per_second for lv in levels)
        return latency + nbytes / slowest
    if kind == "all_to_all":
        return latency + max(_exchange(nbytes, group, lv) for lv in levels)
    share = _RING_SHARE[kind] * (group - 1) / group
    # all_gather and reduce_scatter are the two halves of an all_reduce.
    latency *= _RING_SHARE[kind] / 2
    ring = [share * nbytes / (lv.lanes * lv.link.bytes_per_second) for lv in levels]
    ramp: float = max(
        seconds * (lv.lanes * lv.link.half_saturation_bytes / nbytes) ** _RAMP_EXPONENT
        for seconds, lv in zip(ring, levels, strict=True)
    )
    if kind == "all_reduce":
        ring = [_reduced(s, nbytes, lv) for s, lv in zip(ring, levels, strict=True)]
    return latency + max(ring) + ramp


def _reduced(ring: float, nbytes: float, level: Level) -> float:
    """The all_reduce phase at one level: a ring, or a shortcut where it is faster."""
    link, lanes, members = level
    best = ring
    if link.switch_bytes_per_second and members > link.switch_above_ranks:
        best = min(best, nbytes / link.switch_bytes_per_second)
    if members == 2 * lanes:
        best = min(best, nbytes / (lanes * link.bytes_per_second))
    return best


def _exchange(nbytes: float, group: int, level: Level) -> float:
    """The all_to_all phase at one level: what a rank sends beyond the unit below it."""
    link, lanes, _ = level
    local = nbytes / group
    share = (group - lanes) / group
    seconds = share * local / (link.bytes_per_second * link.exchange_efficiency)
    ramp: float = (_EXCHANGE_RAMP * link.half_saturation_bytes / local) ** _RAMP_EXPONENT
    return seconds * (1 + ramp)


@lru_cache(maxsize=4096)
def group_levels(links: tuple[Link, ...], group: int, stride: int) -> tuple[Level, ...]:
    """The levels that a group uses, innermost first; the last one joins the whole group.

    Where blocks of `group * stride` ranks don't tile a level, some group straddles its border, and
    the worst such group counts.
    """
    levels: list[Level] = []
    lanes = 1
    for link in links:
        last = link is links[-1]
        members = group if last else _members(link.ranks, group, stride)
        # Members of an outer unit come in whole inner units.
        members = max(lanes, members - members % lanes)
        if members > lanes:
            levels.append(Level(link, lanes, members))
            lanes = members
        if members == group:
            break
    return tuple(levels)


def _members(ranks: int, group: int, stride: int) -> int:
    """How many ranks of a group share a unit of `ranks` ranks, for the worst-placed group."""
    if ranks % (group * stride) == 0:
        return group
    # A stride that does not tile the unit scatters the group irregularly: count on no sharing.
    return gcd(group, ranks // stride) if ranks % stride == 0 else 1
