"""Which expert is in which slot: rank r of a layer's ranks has the r-th part of its slots.

    holders ((0,), (0, 1), (1,)), 2 ranks, 3 slots each   ->   (0, 1, EMPTY, 2, 1, EMPTY)

Of an expert's copies one is its home: there the gradients of all are summed, it counts in norms,
and it is what is saved. Homes come first among the slots of a rank, in the order of experts, then
other copies, then empty slots.
"""

from __future__ import annotations

from collections.abc import Sequence

# What is in a slot that holds no expert.
EMPTY = -1
Order = tuple[int, ...]


def natural_order(experts: int, ranks: int, spare: int) -> Order:
    """Neighbours on a rank, and `spare` empty slots behind them."""
    here = experts // ranks
    parts = [(*range(r * here, (r + 1) * here), *[EMPTY] * spare) for r in range(ranks)]
    return tuple(expert for part in parts for expert in part)


def slot_order(holders: Sequence[Sequence[int]], ranks: int, own: int) -> Order:
    """The slots of all ranks, `own` of each; no rank holds more experts than that."""
    home = _home_ranks(holders, ranks)
    found: list[int] = []
    for rank in range(ranks):
        here = [e for e, held in enumerate(holders) if rank in held]
        here.sort(key=lambda e: (home[e] != rank, e))
        found += [*here, *[EMPTY] * (own - len(here))]
    return tuple(found)


def slots_by_expert(order: Order) -> list[list[int]]:
    """Of each expert, its slots."""
    found: list[list[int]] = [[] for _ in range(max(order) + 1)]
    for slot, expert in enumerate(order):
        if expert != EMPTY:
            found[expert].append(slot)
    return found


def home_slots(order: Order, ranks: int) -> Order:
    """Of each expert, the slot of its home."""
    own = len(order) // ranks
    slots = slots_by_expert(order)
    home = _home_ranks([[slot // own for slot in each] for each in slots], ranks)
    return tuple(
        next(slot for slot in each if slot // own == rank)
        for each, rank in zip(slots, home, strict=True)
    )


def has_copies(order: Order) -> bool:
    return len({e for e in order if e != EMPTY}) < sum(e != EMPTY for e in order)


def _home_ranks(holders: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """A rank for each expert, so that gradients of copies come to all ranks about equally."""
    home = [min(held) for held in holders]
    comes = [0] * ranks
    for expert in sorted(range(len(holders)), key=lambda e: (-len(holders[e]), e)):
        if len(holders[expert]) > 1:
            home[expert] = min(holders[expert], key=lambda r: (comes[r], r))
            comes[home[expert]] += len(holders[expert]) - 1
    return home
