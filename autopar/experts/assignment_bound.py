"""Rows that the busiest rank has under every assignment of a layer's experts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopar.experts.ranks_load import Request


def best_copies(load: Sequence[float], replicas: int, most: int) -> list[int]:
    """How many copies each expert gets so that the largest part of one is as small as can be.

    A copy more always goes where the part is largest: no other choice lowers the largest.
    """
    copies = [1] * len(load)
    heap = [(-rows, expert) for expert, rows in enumerate(load) if most > 1]
    heapq.heapify(heap)
    for _ in range(replicas):
        if not heap:
            break
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heappush(heap, (-load[expert] / copies[expert], expert))
    return copies


def least_busiest(request: Request) -> float:
    """The largest of: the mean; the largest part of an expert with what must stand beside it on a
    full rank; and, of the j * ranks + 1 largest, the j + 1 that some rank must hold."""
    load, ranks = request.load, request.ranks
    most = request.most_copies
    copies = best_copies(load, request.replicas, most)
    largest = max(rows / n for rows, n in zip(load, copies, strict=True))
    found = max(sum(load) / ranks, largest)
    beside = 0.0
    if request.equal:
        # The other copies on its rank are of other experts, each cut as finely as may be.
        beside = sum(sorted(rows / most for rows in load)[: request.slots - 1])
    found = max(found, largest + beside)
    if not request.replicas:
        ordered = sorted(load, reverse=True)
        for j in range(1, (len(ordered) - 1) // ranks + 1):
            found = max(found, sum(ordered[ranks * j - i] for i in range(j + 1)))
    return found
