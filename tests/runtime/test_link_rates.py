"""Collectives are measured over groups of ranks that tile the world, alike on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from autopar.mesh import Mesh
from autopar.runtime.link_rates import (
    KINDS,
    collective_samples,
    level_groups,
    measured_slowdown,
    timed_call,
)
from autopar.runtime.ranks import Ranks
from tests.warm_ranks import run_on_ranks


def samples_on_two() -> list[Any]:
    ranks = Ranks.create(Mesh(dp=2))
    return list(collective_samples(ranks, 2, 1, (2**12, 2**16), 0.02))


def members() -> dict[tuple[int, int], list[int]]:
    ranks = Ranks.create(Mesh(dp=4))
    shapes = [(2, 1), (2, 2), (4, 1)]
    return {s: dist.get_process_group_ranks(level_groups(ranks, *s)) for s in shapes}


def test_all_ranks_measure_the_same_and_agree_on_the_slowest() -> None:
    first, second = run_on_ranks(samples_on_two, 2, timeout_seconds=120)
    assert first == second
    kinds = {sample.kind for sample in first}
    assert {"all_reduce", "all_gather", "send"} <= kinds <= set(KINDS)
    for kind in kinds:
        assert [s.nbytes for s in first if s.kind == kind] == [2**12, 2**16]
    assert all(1e-7 < s.seconds < 10 for s in first)


def test_groups_have_their_stride() -> None:
    found = run_on_ranks(members, 4, timeout_seconds=120)
    assert [f[2, 1] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f[2, 2] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f[4, 1] for f in found] == [[0, 1, 2, 3]] * 4


def slowdown_on_two() -> float:
    return measured_slowdown(Ranks.create(Mesh(dp=2)), rounds=3)


def test_what_is_hidden_costs_a_part_of_its_time() -> None:
    found = run_on_ranks(slowdown_on_two, 2, timeout_seconds=120)
    assert found[0] == found[1] and 0.0 <= found[0] <= 1.0


def added_by_a_wait() -> float:
    ranks = Ranks.create(Mesh(dp=2))
    own = level_groups(ranks, 2, 1)
    # The slowest rank counts.
    late = 0.01 if ranks.rank else 0.02
    found = timed_call(lambda: time.sleep(late), ranks, own, 1.0)
    assert found is not None
    return found


def test_what_counts_on_a_cpu_is_what_a_call_adds_to_the_compute_before_it() -> None:
    found = run_on_ranks(added_by_a_wait, 2, timeout_seconds=120)
    assert found[0] == found[1]
    assert 0.018 <= found[0] <= 0.1
