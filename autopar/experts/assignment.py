"""Which rank computes which expert of a layer, so that the busiest rank has the least to do.

Per layer, by itself (layers run one after the other, and all ranks wait for the busiest):

    sets        experts e, ranks r; load[e] rows; replicas: extra copies there may be in all
    decide      n[e] copies of expert e, on n[e] different ranks, each with load[e] / n[e] rows
    so that     every rank holds as many copies as the next (or, free, at most `most`)
    minimise    the rows of the busiest rank;
    then        where experts that are chosen together share a node, keeping the busiest rank's rows

A bound that holds for every assignment comes with each answer; where both are equal it is optimal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.experts.assignment_bound import least_busiest
from autopar.experts.assignment_model import improved_by_solver
from autopar.experts.assignment_search import by_search
from autopar.experts.co_activation import checked_pairs, kept_on_nodes, on_one_node
from autopar.experts.load import checked_load, read_load
from autopar.experts.ranks_load import Holders, Request, rows_of_ranks, spare_slots
from autopar.units import check_time_limit

# Where the busiest rank is this close to the bound, no solver is asked.
CLOSE = 1e-3


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """`holders[e]`: the ranks with a copy of expert e. `busiest`, `bound`, `contiguous`,
    `round_robin`: rows of the busiest rank here, at least under any assignment, with neighbours
    on a rank (as programs start), and dealt out by turns. `on_node`: the share of pairs chosen
    together that are on one node, or None."""

    holders: Holders
    busiest: float
    bound: float
    contiguous: float
    round_robin: float
    seconds: float
    on_node: float | None = None

    @property
    def most(self) -> int:
        """Experts, copies among them, on the rank that holds most."""
        return max(Counter(rank for ranks in self.holders for rank in ranks).values())

    @property
    def optimal(self) -> bool:
        return self.busiest <= self.bound * (1 + 1e-9)

    @property
    def gap(self) -> float:
        """By which part of `busiest` another assignment could be better at most."""
        return 0.0 if self.optimal else 1 - self.bound / self.busiest


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment of every layer's experts to `ranks`."""

    ranks: int
    layers: Mapping[str, LayerAssignment]

    @property
    def spare_experts(self) -> int:
        """What the plan of a program has to have that executes it (`rebalance`): slots of each rank
        beyond an even part of the experts."""
        return max(
            spare_slots(layer.most, len(layer.holders), self.ranks)
            for layer in self.layers.values()
        )

    @property
    def status(self) -> str:
        """optimal, when every layer is; else bounded, and by how much."""
        worst = max(layer.gap for layer in self.layers.values())
        return "optimal" if not worst else f"bounded, at most {worst:.2%} from the best"

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; `from_dict` reads the ranks and the holders."""
        layers = {
            name: {
                "holders": [list(ranks) for ranks in layer.holders],
                "busiest": layer.busiest,
                "bound": layer.bound,
                "contiguous": layer.contiguous,
                "round_robin": layer.round_robin,
                "optimal": layer.optimal,
                "on_node": layer.on_node,
                "seconds": layer.seconds,
            }
            for name, layer in self.layers.items()
        }
        return {"ranks": self.ranks, "spare_experts": self.spare_experts, "layers": layers}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Assignment:
        """Raises `UsageError` when it is not what `to_dict` gives."""
        try:
            layers = {name: _read_layer(layer) for name, layer in found["layers"].items()}
            return Assignment(int(found["ranks"]), layers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"no assignment of experts: {type(error).__name__} {error}",
                next_step="give what to_dict() of an assignment returned",
            ) from error


def _read_layer(found: Mapping[str, Any]) -> LayerAssignment:
    return LayerAssignment(
        holders=tuple(tuple(int(r) for r in ranks) for ranks in found["holders"]),
        busiest=float(found["busiest"]),
        bound=float(found["bound"]),
        contiguous=float(found["contiguous"]),
        round_robin=float(found["round_robin"]),
        seconds=float(found["seconds"]),
        on_node=found["on_node"],
    )


def assign_experts(
    load: Mapping[str, Sequence[float]] | str | Path,
    ranks: int,
    *,
    nodes: int = 1,
    experts: int | None = None,
    replicas: int = 0,
    most: int | None = None,
    together: Mapping[str, Sequence[Sequence[float]]] | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
) -> Assignment:
    """The experts of each layer for each of `ranks`, minimising the rows of the busiest.

    `load`: rows per expert by layer, as `expert_load()` of a program gives them, or a JSON file of
    it. `experts`: how many the model's layers have, if the load may be of another. `most`: experts
    that fit on a rank; ranks then need not hold equally many. `replicas`: copies of hot experts
    beyond one each, per layer; a copy takes the memory of an expert, and a program holds it under a
    plan with `spare_experts` (of the assignment says how many). `together[layer]` [e, e]: how
    often two experts are chosen by one token; those often together are kept on one of `nodes`
    (neighbouring ranks) where that costs no rows. `time_limit`: seconds for the solver on all
    layers.
    Raises `UsageError` for counts that do not divide, more ranks than experts, and loads that are
    negative, no numbers, or not as many as the experts.
    """
    read = read_load(load, experts) if isinstance(load, str | Path) else checked_load(load, experts)
    pairs = _pairs(together)
    if replicas and pairs:
        raise UsageError(
            "together= goes with replicas=0: which copy a token takes decides on which node it is",
            next_step="give one of the two",
        )
    unknown = [name for name in pairs if name not in read]
    if unknown:
        raise UsageError(
            f"together= has layer {unknown[0]!r}, the load has not",
            next_step=f"its layers are {', '.join(list(read)[:4])}",
        )
    requests = {
        name: Request.of(name, rows, ranks, nodes, replicas, most) for name, rows in read.items()
    }
    check_time_limit(time_limit)
    deadline = time.monotonic() + time_limit
    layers: dict[str, LayerAssignment] = {}
    for done, (name, request) in enumerate(requests.items()):
        own = (deadline - time.monotonic()) / (len(requests) - done)
        matrix = checked_pairs(name, pairs[name], len(request.load)) if name in pairs else None
        layers[name] = _layer(request, matrix, max(0.0, own), seed)
    return Assignment(ranks, layers)


def _pairs(together: Any) -> dict[str, Any]:
    if together is not None and not isinstance(together, Mapping):
        raise UsageError(
            f"together= is a mapping of layers to matrices, not {type(together).__name__}",
            next_step="give {layer: [[0, 5], [5, 0]]}",
        )
    return dict(together or {})


def _layer(request: Request, pairs: Any, seconds: float, seed: int) -> LayerAssignment:
    start = time.monotonic()
    bound = least_busiest(request)
    found = by_search(request)
    busiest = max(rows_of_ranks(request, found))
    if busiest > bound * (1 + CLOSE):
        left = seconds - (time.monotonic() - start)
        found, proven = improved_by_solver(request, found, bound, left, seed)
        busiest, bound = max(rows_of_ranks(request, found)), max(bound, proven)
    share = None
    if pairs is not None:
        found = kept_on_nodes(request, found, pairs)
        share = on_one_node(request, found, pairs)
    count = len(request.load)
    neighbours = tuple((e * request.ranks // count,) for e in range(count))
    by_turns = tuple((e % request.ranks,) for e in range(count))
    return LayerAssignment(
        found,
        busiest,
        min(bound, busiest),
        max(rows_of_ranks(request, neighbours)),
        max(rows_of_ranks(request, by_turns)),
        time.monotonic() - start,
        share,
    )
