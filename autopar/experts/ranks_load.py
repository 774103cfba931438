"""What is asked of an assignment of one layer's experts to ranks, and the rows that ranks get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UsageError

# Of each expert, the ranks that hold a copy.
Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """`slots`: copies that a rank holds (`equal`), or holds at most. `replicas`: copies there may
    be beyond one of each expert; with `equal` there are that many."""

    load: tuple[float, ...]
    ranks: int
    nodes: int
    replicas: int
    slots: int
    equal: bool

    @property
    def most_copies(self) -> int:
        """Of one expert: copies are on different ranks."""
        return min(self.ranks, 1 + self.replicas)

    @staticmethod
    def of(
        layer: str,
        load: tuple[float, ...],
        ranks: int,
        nodes: int,
        replicas: int,
        most: int | None,
    ) -> Request:
        """Raises `UsageError` for what no assignment can be."""
        experts = len(load)
        for name, value, least in (
            ("ranks", ranks, 1), ("nodes", nodes, 1), ("replicas", replicas, 0)
        ):  # fmt: skip
            if value < least:
                raise UsageError(f"{name}={value}", next_step=f"give {name} of {least} or more")
        if ranks % nodes:
            raise UsageError(
                f"{ranks} ranks on {nodes} nodes: not equally many on each",
                next_step="give a number of nodes that divides the ranks",
            )
        copies = experts + replicas
        if ranks > copies or (ranks > experts and not replicas):
            raise UsageError(
                f"{ranks} ranks for the {copies} experts of layer {layer!r}: some would have none",
                next_step=f"split them over at most {experts} ranks, or give replicas",
            )
        if replicas > experts * (ranks - 1):
            raise UsageError(
                f"replicas={replicas}: {experts} experts on each of {ranks} ranks are "
                f"{experts * (ranks - 1)} more than one of each",
                next_step="give fewer replicas",
            )
        if most is None and copies % ranks:
            down = [n for n in range(1, ranks) if copies % n == 0]
            more = replicas + ranks - copies % ranks
            each = -(-copies // ranks)
            raise UsageError(
                f"{copies} experts of layer {layer!r} do not divide by {ranks} ranks",
                next_step=f"give {down[-1]} ranks, replicas={more}, or most= "
                f"(experts that fit on a rank){_told_slots(each, experts, ranks)}",
            )
        if most is not None and most * ranks < experts:
            raise UsageError(
                f"most={most}: {ranks} ranks hold {most * ranks} of the {experts} experts of "
                f"layer {layer!r}",
                next_step=f"give most={-(-experts // ranks)} or more ranks",
            )
        slots = copies // ranks if most is None else min(most, experts)
        extra = replicas if most is None else min(replicas, slots * ranks - experts)
        return Request(load, ranks, nodes, extra, slots, most is None)


def spare_slots(most: int, experts: int, ranks: int) -> int:
    """`spare_experts` of a plan in which a rank holds `most` of a layer's experts."""
    return max(0, most - experts // ranks)


def _told_slots(most: int, experts: int, ranks: int) -> str:
    needed = spare_slots(most, experts, ranks)
    if not needed or experts % ranks:
        return ""
    return f"; {most} on a rank run under a plan with spare_experts={needed}"


def rows_of_ranks(request: Request, holders: Sequence[Sequence[int]]) -> list[float]:
    """Rows of each rank; copies of an expert get equal parts of its rows."""
    rows = [0.0] * request.ranks
    for expert, ranks in enumerate(holders):
        for rank in ranks:
            rows[rank] += request.load[expert] / len(ranks)
    return rows
