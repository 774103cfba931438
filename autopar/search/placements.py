"""Placement of every op of a block on the tp axis: the exact searches behind one function.

`elimination` answers nearly every block in milliseconds. A block whose graph is too entangled for
its tables is handed to the integer program of `placement_program`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.placement_problem import Problem
from autopar.search.elimination import eliminate
from autopar.search.placement_objective import Solution
from autopar.search.placement_program import Model


def solve(problem: Problem, prices: Sequence[float], *, in_flight: float = 1.0) -> list[Solution]:
    """The cheapest placement for each price of memory (seconds per byte).

    A price of 0 gives the fastest (ties go to less memory), larger ones give up time for memory.
    `in_flight`: how many micro-batches the saved memory counts for. Raises `InfeasibleError` when
    no combination of strategies is legal.
    """
    found = eliminate(problem, prices, in_flight=in_flight)
    if found is None:
        model = Model(problem, in_flight)
        found = [model.solve(price) for price in prices]
    return found
