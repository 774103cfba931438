"""Cuts near others, and cuts at even shares of the work: what is looked at to balance a chain.

Cuts are told by places: 0, the blocks that may come first in a part, and the number of blocks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.random import Generator

from autopar.search.chain import Cutting, Floats, Ints, sums_before

# Moves that are thought of at a time.
MOST_MOVES = 2000
# So much of an even part the first and the last one are tried with.
ENDS = (1.3, 1.0, 0.75, 0.5, 0.25)
# How many of the children are parts of two cuts put together; the others, and half of these, have
# borders moved, mostly by one block.
CROSSED = 0.4
STEPS = np.array([-3, -2, -2, *[-1] * 7, *[1] * 7, 2, 2, 3])


def numbers(edges: Ints) -> Ints:
    """[candidates]: one for each, the same for equal ones alone (but by a chance of 2 ** -64)."""
    return np.asarray(edges @ _factors(edges.shape[1]))


@lru_cache(maxsize=256)
def _factors(columns: int) -> Ints:
    return np.random.default_rng(0).integers(1, 2**62, columns)


def distinct(edges: Ints) -> Ints:
    """Where the first of each of some equal cuts stands, in order."""
    return np.sort(np.unique(numbers(edges), return_index=True)[1])


def places(rules: Cutting) -> Ints:
    """Where a chain may be cut, and its ends."""
    return np.concatenate([[0], np.flatnonzero(rules.ends[:-1]) + 1, [len(rules)]])


def at_shares(share: Floats, rules: Cutting, parts: int) -> Ints:
    """[candidates, parts + 1]: cuts nearest to those that divide the chain evenly, or with heavier
    or lighter first and last parts; `share`: that of each block."""
    ends = _unit_ends(rules)
    total, units = sums_before(share)[ends], len(ends) - 1
    if units < parts:
        return np.zeros((0, parts + 1), np.int64)
    size = np.ones((len(ENDS) ** 2, parts))
    size[:, 0], size[:, -1] = np.repeat(ENDS, len(ENDS)), np.tile(ENDS, len(ENDS))
    at = np.cumsum(size, axis=1)[:, :-1] / size.sum(axis=1, keepdims=True) * total[-1]
    right = np.searchsorted(total, at).clip(1, units)
    left = right - 1
    edge = np.where(at - total[left] <= total[right] - at, left, right)
    # At least one unit in every part.
    number = np.arange(1, parts)
    edge = np.maximum.accumulate(edge - number, axis=1) + number
    edge = edge.clip(number, units - parts + number)
    found = np.pad(edge, ((0, 0), (1, 1)))
    found[:, -1] = units
    return np.asarray(ends[found[distinct(found)]])


@lru_cache(maxsize=256)
def _unit_ends(rules: Cutting) -> Ints:
    """Where blocks end that make a part together: 0, and behind each unit that may end a part
    and has a parameter."""
    found, holds = [0], 0
    for i, (may_end, has) in enumerate(zip(rules.ends, rules.holds, strict=True)):
        holds += int(has)
        if may_end and holds:
            found.append(i + 1)
            holds = 0
    if found[-1] < len(rules):  # what is left has none, or can't end: it goes with the last unit
        found[-1:] = [len(rules)] if len(found) > 1 else [0, len(rules)]
    return np.array(found, np.int64)


def neighbours(edges: Ints, at: Ints) -> Ints:
    """[candidates, parts + 1]: cuts near one: neighbouring borders moved together, and two of them
    apart. `at`: the places."""
    borders = len(edges) - 2
    apart = max(1, min(borders, MOST_MOVES // (6 * borders)))
    first, behind = np.arange(borders)[:, None], np.arange(apart)[None, :]
    first, last = (x.ravel() for x in np.broadcast_arrays(first, first + behind))
    first, last = first[last < borders], last[last < borders]
    number = np.arange(borders)[None, :]
    together = ((number >= first[:, None]) & (number <= last[:, None])).astype(np.int64)
    ends = [(number == x[:, None]).astype(np.int64) for x in (first, last)]
    one, two = (x[first < last] for x in ends)
    single = np.eye(borders, dtype=np.int64)
    steps = [*(d * together for d in (-1, 1)), *(d * single for d in (-2, 2))]
    steps += [a * one + b * two for a in (-1, 1) for b in (-1, 1)]
    moved = np.concatenate(steps)
    found = np.repeat(np.searchsorted(at, edges)[None, :], len(moved), axis=0)
    found[:, 1:-1] += moved
    return _cuts(found, at)


def children(edges: Ints, wanted: int, weights: Floats, at: Ints, draw: Generator) -> Ints:
    """[candidates, parts + 1]: cuts by chance from others, those of more weight more often: the
    front of one and the rest of another one, and borders moved, some neighbours together. At most
    `wanted` of them. `at`: the places."""
    held, parts = np.searchsorted(at, edges), edges.shape[1] - 1
    found = held[draw.choice(len(held), wanted, p=weights / weights.sum())]
    crossed, column = int(wanted * CROSSED), np.arange(parts + 1)[None, :]
    turn = draw.integers(1, parts, size=(crossed, 1))
    other = held[draw.integers(len(held), size=crossed)]
    found[:crossed] = np.where(column < turn, found[:crossed], other)
    for some in (found[crossed // 2 :], found[(crossed + wanted) // 2 :]):
        size = (len(some), 1)
        first = draw.integers(1, parts, size=size)
        last = first + draw.integers(0, parts, size=size) * draw.integers(0, 2, size=size)
        step = STEPS[draw.integers(0, len(STEPS), size=size)]
        some += np.where((column >= first) & (column <= last) & (column < parts), step, 0)
    return _cuts(found, at)


def _cuts(found: Ints, at: Ints) -> Ints:
    """Those of numbers of places that have a block in every part."""
    return np.asarray(at[found[(np.diff(found, axis=1) > 0).all(axis=1)]])
