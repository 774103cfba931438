"""An assignment of experts to ranks at once: the largest first, then exchanges between ranks.

The largest part goes to the least busy rank with a free slot (Graham's rule, with slots); then the
busiest rank gives a copy to another, or takes another in exchange, for as long as the busier of the
two gets less.
"""

from __future__ import annotations

from autopar.experts.assignment_bound import best_copies
from autopar.experts.ranks_load import Holders, Request

_MOST_EXCHANGES = 20_000


def by_search(request: Request) -> Holders:
    """A legal assignment; of the numbers of copies that are tried, the best."""
    tries = {0, request.replicas} if not request.equal else {request.replicas}
    found = [_with_copies(request, n) for n in sorted(tries)]
    return min(found, key=lambda f: f[0])[1]


def _with_copies(request: Request, replicas: int) -> tuple[float, Holders]:
    copies = best_copies(request.load, replicas, request.most_copies)
    parts = [rows / n for rows, n in zip(request.load, copies, strict=True)]
    held = _largest_first(request, parts, copies) or _by_turns(request, copies)
    rows = [sum(parts[e] for e in each) for each in held]
    for _ in range(_MOST_EXCHANGES):
        if not _exchange(request, parts, held, rows):
            break
    ranks_of: list[list[int]] = [[] for _ in parts]
    for rank, each in enumerate(held):
        for expert in each:
            ranks_of[expert].append(rank)
    return max(rows), tuple(tuple(ranks) for ranks in ranks_of)


def _largest_first(
    request: Request, parts: list[float], copies: list[int]
) -> list[set[int]] | None:
    """None when an expert finds fewer ranks with a free slot than it has copies."""
    held: list[set[int]] = [set() for _ in range(request.ranks)]
    rows = [0.0] * request.ranks
    order = sorted(range(len(parts)), key=lambda e: (-parts[e], -copies[e], e))
    if max(copies) > 1:
        # Copies of the coldest experts would else find only ranks that hold them already.
        order.sort(key=lambda e: copies[e] == 1)
    for expert in order:
        free = [r for r in range(request.ranks) if len(held[r]) < request.slots]
        if len(free) < copies[expert]:
            return None
        for rank in sorted(free, key=lambda r: (rows[r], len(held[r]), r))[: copies[expert]]:
            held[rank].add(expert)
            rows[rank] += parts[expert]
    return held


def _by_turns(request: Request, copies: list[int]) -> list[set[int]]:
    """Copies dealt out one after the other: those of one expert are on different ranks, as there
    are no more of them than ranks."""
    held: list[set[int]] = [set() for _ in range(request.ranks)]
    for turn, expert in enumerate(e for e, n in enumerate(copies) for _ in range(n)):
        held[turn % request.ranks].add(expert)
    return held


def _exchange(
    request: Request, parts: list[float], held: list[set[int]], rows: list[float]
) -> bool:
    """Make the best move or exchange of the busiest rank; whether there was one."""
    top = max(range(request.ranks), key=lambda r: rows[r])
    best: tuple[float, int, int, int | None] | None = None
    for rank in range(request.ranks):
        if rank == top:
            continue
        limit = rows[top] * (1 - 1e-12) if best is None else best[0]
        mine = held[top] - held[rank]
        theirs: list[int | None] = [*(held[rank] - held[top])]
        if not request.equal and len(held[rank]) < request.slots:
            theirs.append(None)
        for give in mine:
            for take in theirs:
                moved = parts[give] - (parts[take] if take is not None else 0.0)
                after = max(rows[top] - moved, rows[rank] + moved)
                if moved > 0 and after < limit:
                    limit, best = after, (after, rank, give, take)
    if best is None:
        return False
    _, rank, give, take = best
    held[top].remove(give)
    held[rank].add(give)
    if take is not None:
        held[rank].remove(take)
        held[top].add(take)
    for changed in (top, rank):
        rows[changed] = sum(parts[e] for e in held[changed])
    return True
