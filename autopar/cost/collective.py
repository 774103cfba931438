"""How long a collective takes, from its size and where its group lies on the links.

A group is `group` ranks spaced by `stride`. At each link level it has some *members* per unit of
that level (the ranks of one node, for example). Data crosses a level on as many *lanes* as there
are members inside one unit below it: eight members of a node use eight NICs, one uses one. All
groups of a mesh axis run at once, so a lane has what is left to a rank when all ranks send.

Phases at different levels are pipelined, so the slowest one decides. An algorithm is a way round
the group with a number of steps; a protocol trades bandwidth for latency. The fastest pair counts:

    seconds  = start + min over algorithms and protocols of (steps * latency + transfer)
    ring     = n - 1 steps (all_gather, reduce_scatter) or 2 (n - 1) (all_reduce)
    tree     = 2 log2(units) steps between the units of the outer levels, a chain inside them
               (all_reduce only)
    transfer = slowest phase + ramp               of the long protocol
             = slowest phase / short_rate         of the short one, which has no ramp
    phase    = share * bytes / (lanes * bytes_per_second)     share: see `_RING_SHARE`
    ramp     = phase * (lanes * half_saturation / bytes) ** 0.75

all_reduce knows two shortcuts that NCCL takes with the long protocol: the switch adds up inside a
unit, and two units exchange halves instead of going round a ring. The exponent and the constants of
the links were fitted to published nccl-tests runs (see the device files and docs/calibration.md).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, log2
from typing import NamedTuple

from autopar.cluster import Cluster, Link
from autopar.errors import UsageError

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "dispatch",
    "broadcast",
    "send",
)

# Share of the tensor, in units of (n-1)/n, that passes each lane of a ring.
_RING_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
_RAMP_EXPONENT = 0.75
# A step of a tree waits for two children and forwards larger pieces. On H100 an all_reduce of
# 16 MiB takes 560 us longer on 512 nodes than on 4 (arXiv 2411.13055): 7 levels more, twice, of
# 40 us each, where a step of a ring takes 10 us (2 nodes, AWS).
_TREE_STEP = 4.0
# all_to_all on 4 and 8 A100 (Hetu-Galvatron) needs twice the bytes of a ring to reach half speed.
_EXCHANGE_RAMP = 2.0


class Level(NamedTuple):
    """A link level that the group uses: `lanes` members below it, `members` within it."""

    link: Link
    lanes: int
    members: int

    @property
    def units(self) -> float:
        """How many units of the level below are joined here."""
        return self.members / self.lanes


def collective_time(
    kind: str, nbytes: float, group: int, stride: int, cluster: Cluster, *, sharing: int = 1
) -> float:
    """Seconds of one collective of every group (all groups of a mesh axis run at once).

    `nbytes`: the whole, unsharded tensor (for all_to_all: over the whole group); for broadcast and
    send the message. `dispatch` is an all_to_all by a kernel of its own that sends each token once
    to a node, as DeepEP does: `nbytes` counts what crosses the outermost level. `stride`: distance
    in ranks between neighbours of the group. For send the group is the pipeline: the slowest of its
    neighbour-to-neighbour messages. `sharing`: how many collectives of different axes use the links
    at the same time, this one included. A group of 1, or no bytes, costs 0. Raises `UsageError` for
    an unknown kind or a group that the cluster can't hold.
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
    return _seconds(kind, float(nbytes), group, stride, cluster.links, sharing)


@lru_cache(maxsize=65536)
def _seconds(
    kind: str, nbytes: float, group: int, stride: int, links: tuple[Link, ...], sharing: int
) -> float:
    levels = group_levels(links, group, stride)
    start = max(level.link.start_seconds for level in levels)
    outer = levels[-1].link
    # Several collectives at once leave each a part of every lane, as if it were longer.
    nbytes *= sharing
    if kind == "send":
        return start + outer.latency_seconds + nbytes / outer.bytes_per_second
    if kind == "dispatch":  # one kernel that writes to its peers itself
        rate = outer.bytes_per_second * outer.dispatch_efficiency
        return outer.latency_seconds + nbytes / group / rate
    if kind in ("all_to_all", "broadcast"):
        start += sum(lv.link.latency_seconds * log2(lv.units) for lv in levels)
    if kind == "broadcast":
        return start + nbytes / min(lv.lanes * lv.link.bytes_per_second for lv in levels)
    if kind == "all_to_all":
        return start + max(_exchange(nbytes, group, lv) for lv in levels)
    share = _RING_SHARE[kind] * (group - 1) / group
    if kind != "all_reduce":
        share /= outer.gather_efficiency
    phases = [share * nbytes / (lv.lanes * lv.link.bytes_per_second) for lv in levels]
    # Inside one unit of the innermost link there is no tree.
    tree = kind == "all_reduce" and (len(levels) > 1 or outer is not links[0])
    steps = 2 if kind == "all_reduce" else 1
    long = steps * _latency(levels, group, tree=tree, short=False)
    long += _long(kind, nbytes, levels, phases)
    rate = min(level.link.short_rate for level in levels)
    if rate == 0.0:
        return start + long
    short = steps * _latency(levels, group, tree=tree, short=True) + max(phases) / rate
    return start + min(long, short)


def _latency(levels: tuple[Level, ...], group: int, *, tree: bool, short: bool) -> float:
    """Seconds of the steps that follow each other: round the ring, or down a tree if shorter."""
    ring = down = 0.0
    for level in levels:
        link = level.link
        step = link.short_latency_seconds if short else link.latency_seconds
        ring += step * (level.units - 1) * group / level.members
        inside = level.lanes == 1 < len(levels)
        down += step * (level.units - 1 if inside else _TREE_STEP * log2(level.units))
    return min(ring, down) if tree else ring


def collective_latency_steps(kind: str, group: int, *, tree: bool) -> float:
    """Steps that follow each other in a collective of a group on one level."""
    ring = group - 1
    if kind != "all_reduce":
        return ring
    return 2 * min(ring, _TREE_STEP * log2(group)) if tree else 2 * ring


def _long(kind: str, nbytes: float, levels: tuple[Level, ...], phases: list[float]) -> float:
    """Seconds to transfer with the long protocol, the ramp included."""
    ramp: float = max(
        phase * (lv.lanes * lv.link.half_saturation_bytes / nbytes) ** _RAMP_EXPONENT
        for phase, lv in zip(phases, levels, strict=True)
    )
    if kind == "all_reduce":
        phases = [_reduced(s, nbytes, lv) for s, lv in zip(phases, levels, strict=True)]
    return max(phases) + ramp


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
