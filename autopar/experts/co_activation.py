"""Experts that tokens choose together on one node, as far as it costs the busiest rank no rows.

A token's rows to experts on one node travel there once. Ranks change places with ranks of other
nodes, and experts with experts, whichever exchange gains most, until none gains: no proof of the
best is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError
from autopar.experts.ranks_load import Holders, Request, rows_of_ranks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def checked_pairs(layer: str, pairs: Sequence[Sequence[float]], experts: int) -> Floats:
    """[e, e], symmetric, zero on the diagonal. Raises `UsageError` for other shapes and values."""
    try:
        found = np.array(pairs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"together[{layer!r}] is no matrix of numbers: {error}",
            next_step=f"give {experts} rows of {experts} numbers",
        ) from error
    if found.shape != (experts, experts):
        raise UsageError(
            f"together[{layer!r}] has shape {found.shape}, there are {experts} experts",
            next_step=f"give {experts} rows of {experts} numbers",
        )
    if not np.isfinite(found).all() or (found < 0).any():
        raise UsageError(
            f"together[{layer!r}] has a number that is negative or not finite",
            next_step="give how often two experts are chosen together",
        )
    found = (found + found.T) / 2
    np.fill_diagonal(found, 0.0)
    return found


def on_one_node(request: Request, holders: Holders, pairs: Floats) -> float:
    """The share of all pairs chosen together that are on one node; 1 when there are none."""
    node = _ranks(holders) // (request.ranks // request.nodes)
    total = float(pairs.sum())
    same = node[:, None] == node[None, :]
    return float(pairs[same].sum()) / total if total else 1.0


def kept_on_nodes(request: Request, holders: Holders, pairs: Floats) -> Holders:
    """An assignment with as many experts on each rank, whose busiest rank has no more rows.

    Each expert has one copy in `holders`.
    """
    per_node = request.ranks // request.nodes
    if request.nodes == 1 or not pairs.any():
        return holders
    rank = _ranks(holders)
    load = np.array(request.load)
    limit = max(rows_of_ranks(request, holders)) * (1 + 1e-12)
    while True:
        before = rank.copy()
        # Whole ranks: which rank is which makes no difference to the rows.
        member = np.zeros((request.ranks, len(rank)))
        member[rank, np.arange(len(rank))] = 1.0
        places = np.arange(request.ranks)
        while (pair := _best(member @ pairs @ member.T, places // per_node, None)) is not None:
            a, b = pair
            places[a], places[b] = places[b], places[a]
        rank = places[rank]
        while (pair := _best(pairs, rank // per_node, _room(rank, load, limit))) is not None:
            a, b = pair
            rank[a], rank[b] = rank[b], rank[a]
        if (rank == before).all():
            return tuple((int(r),) for r in rank)


def _ranks(holders: Holders) -> Ints:
    return np.array([ranks[0] for ranks in holders], dtype=np.int64)


def _room(rank: Ints, load: Floats, limit: float) -> NDArray[np.bool_]:
    """[e, e]: whether two experts may change places, for the rows of both ranks."""
    rows: Any = np.bincount(rank, weights=load)[rank]
    more = rows[:, None] - load[:, None] + load[None, :]
    fits: NDArray[np.bool_] = more <= limit
    return fits & fits.T


def _best(weights: Floats, node: Ints, allowed: Any) -> tuple[int, int] | None:
    """The two whose exchange gains most; None when no exchange gains."""
    nodes = int(node.max()) + 1
    member = np.zeros((len(node), nodes))
    member[np.arange(len(node)), node] = 1.0
    weights = weights - np.diag(np.diag(weights))
    near = weights @ member
    own = near[np.arange(len(node)), node]
    other = near[:, node]
    gain = other - own[:, None] + other.T - own[None, :] - 2 * weights
    gain[node[:, None] == node[None, :]] = 0.0
    if allowed is not None:
        gain = np.where(allowed, gain, 0.0)
    a, b = divmod(int(gain.argmax()), len(node))
    least = 1e-9 * max(1e-300, float(np.abs(weights).max()))
    return (a, b) if gain[a, b] > least else None
