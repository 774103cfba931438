"""The placements of all distinct blocks that are worth pricing, along the time-memory frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.axis import Axis
from autopar.errors import InfeasibleError, PassError
from autopar.passes.analysis.block_problem import build_problem, source_names
from autopar.passes.rewrite.place import PARAMETER, relative
from autopar.placement import Placement
from autopar.placement_problem import Problem
from autopar.search.elimination import eliminate
from autopar.search.placement_objective import TIE, seconds_by_block
from autopar.search.placement_program import Model
from autopar.search.placements import solve
from autopar.workflow.block_kinds import Kind

# Seconds per byte at which memory is traded for time: points of the placement frontier.
# 1e-12: a GiB for a millisecond of every micro-batch; 1e-10: a GiB for a tenth of a second.
PRICES = (0.0, 1e-12, 1e-10)


# Of a group of kinds, for each price: placements and seconds by kind; None when none is legal.
Solved = tuple[tuple[dict[str, dict[str, str]], dict[str, float]], ...] | None


@dataclass(frozen=True)
class PlacedBlocks:
    """One point of the frontier: `placements[kind][op]`, and each kind's seconds, forward and
    backward with their collectives, as the placement search counts them."""

    boundary: Placement
    price: float
    placements: dict[str, dict[str, str]]
    seconds: dict[str, float]

    @property
    def label(self) -> str:
        return f"boundary {self.boundary}, memory at {self.price:g} s/B"


def placed_blocks(
    kinds: Mapping[str, Kind],
    groups: Sequence[Sequence[str]],
    axis: Axis,
    boundary: Placement,
    state_bytes: float,
    *,
    split_weights: bool,
    known: dict[object, Solved] | None = None,
) -> list[PlacedBlocks]:
    """The distinct points for one boundary placement; none when no placement is legal.

    `groups`: names of kinds that share parameters and are solved together. `known` keeps what was
    solved: kinds that are the same objects need no other answer.
    """
    found = [PlacedBlocks(boundary, price, {}, {}) for price in PRICES]
    known = {} if known is None else known
    for group in groups:
        key = (*(id(kinds[k]) for k in group), axis.ranks, str(boundary), split_weights)
        if key not in known:
            problem = _problem(kinds, group, axis, boundary, state_bytes, split_weights)
            known[key] = _solved(problem, {k: kinds[k] for k in group})
        solved = known[key]
        if solved is None:
            return []
        for point, (placements, seconds) in zip(found, solved, strict=True):
            point.seconds.update(seconds)
            point.placements.update(placements)
    distinct: list[PlacedBlocks] = []
    for point in found:
        if all(point.placements != other.placements for other in distinct):
            distinct.append(point)
    return distinct


def _solved(problem: Problem, kinds: Mapping[str, Kind]) -> Solved:
    try:
        solutions = solve(problem, PRICES)
    except InfeasibleError:
        return None
    return tuple(
        (
            {name: named_in_plan(kind, s.choice) for name, kind in kinds.items()},
            seconds_by_block(problem, s.choice),
        )
        for s in solutions
    )


def confirm(
    placed: PlacedBlocks,
    kinds: Mapping[str, Kind],
    groups: Sequence[Sequence[str]],
    axis: Axis,
    state_bytes: float,
    *,
    split_weights: bool,
) -> int:
    """Solve the placement problems of one point again, as integer programs by OR-Tools.

    Returns how many problems the two solvers agree on; those that were integer programs in the
    first place have no second answer. Raises `PassError` where they differ.
    """
    agreed = 0
    for group in groups:
        problem = _problem(kinds, group, axis, placed.boundary, state_bytes, split_weights)
        first = eliminate(problem, (placed.price,))
        if first is None:
            continue
        second = Model(problem).solve(placed.price)
        costs = [s.seconds + (placed.price + TIE) * s.bytes for s in (first[0], second)]
        if abs(costs[0] - costs[1]) > 1e-6 * max(costs):
            raise PassError(
                f"placement of {'+'.join(group)}: elimination finds {costs[0]:.12g}, the integer "
                f"program {costs[1]:.12g}",
                next_step="this is a fault of autopar: report the model, cluster and options",
            )
        agreed += 1
    return agreed


def _problem(
    kinds: Mapping[str, Kind],
    group: Sequence[str],
    axis: Axis,
    boundary: Placement,
    state_bytes: float,
    split_weights: bool,
) -> Problem:
    parts = [(k, kinds[k].graph, kinds[k].slots, kinds[k].over(axis.ranks)) for k in group]
    return build_problem(parts, axis, boundary, state_bytes, split_weights=split_weights)


def named_in_plan(kind: Kind, choice: Mapping[str, str]) -> dict[str, str]:
    """The solution by the names that a plan uses: of the block's ops and parameters."""
    names = source_names(kind.name, kind.graph, kind.slots)
    chosen: dict[str, str] = {}
    placeholders = kind.graph.graph.find_nodes(op="placeholder")
    for node, slot in zip(placeholders, kind.slots, strict=True):
        if slot.kind == "parameter":
            chosen[PARAMETER + relative(slot.name, kind.name)] = choice[names[node.name]]
    for node in kind.graph.graph.nodes:
        if node.op == "call_function":
            chosen[names[node.name].split("|", 1)[1]] = choice[names[node.name]]
    return chosen
