"""The distinct blocks of a program as one rank of ep sees them: a part of every layer's experts."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import gcd

from torch import fx

from autopar.cluster import Device
from autopar.errors import UsageError
from autopar.experts.operands import UP
from autopar.passes.analysis.candidates import Candidates, candidates, ruled_calls
from autopar.passes.rewrite.split_experts import (
    expert_calls,
    held_slots,
    not_split,
    split_experts,
)
from autopar.program import copy_graph
from autopar.workflow.block_kinds import BlockKinds, Kind

NO_EXPERTS = "the model has no experts that are one op (see autopar.declare_experts)"


def expert_count(kinds: Mapping[str, Kind], tied: Container[str]) -> tuple[int, str]:
    """The number that ep may divide: of all layers with experts; and '' or why there is none.
    `tied`: parameters that several blocks hold."""
    counts = []
    for kind in kinds.values():
        for node in expert_calls(kind.graph):
            why = not_split(kind.graph, kind.slots, 1)
            if any(slot.name in tied for slot in held_slots(kind.graph, kind.slots)):
                why = "other blocks hold them too"
            if why:
                return 1, f"the experts of {kind.name} can't be split: {why}"
            up = node.args[UP]
            assert isinstance(up, fx.Node)
            counts.append(int(up.meta["val"].shape[0]))
    return (gcd(*counts), "") if counts else (1, NO_EXPERTS)


def check_room(spare: int, why: str) -> None:
    """Raises `UsageError` when `why` (of `expert_count`) says that no rank can use spare slots."""
    if why == NO_EXPERTS:
        raise UsageError(f"spare_experts={spare}: {why}", next_step="leave spare_experts out")


@dataclass(frozen=True)
class ExpertKind(Kind):
    """A block with a part of the experts of `whole`. Its other ops are those of `whole`, and so are
    their strategies and prices."""

    whole: Kind | None = None
    device: Device | None = None

    def over(self, ranks: int) -> Candidates:
        assert self.whole is not None and self.device is not None
        if ranks not in self.candidates:
            of = self.whole.over(ranks)
            own = {n.name: self.calls[n.name] for n in expert_calls(self.graph)}
            part = candidates(self.graph, ranks, own)
            alike = {n: of.prices(n, self.device) for n in of.calls if n not in own}
            self.candidates[ranks] = Candidates(
                ranks,
                {**of.calls, **part.calls},
                {**of.strategies, **part.strategies},
                {**of.flops, **part.flops},
                of.unknown,
                alike,
            )
        return self.candidates[ranks]


class ExpertKinds(BlockKinds):
    """As `whole`, with a part of the experts of every layer; blocks without any are the same."""

    def __init__(self, whole: BlockKinds, ranks: int) -> None:
        super().__init__(whole.program, whole.blocks, whole.sizes, whole.cluster)
        self.whole, self._ranks = whole, ranks

    def at(self, microbatch: int) -> dict[str, Kind]:
        if microbatch not in self._kinds:
            whole = self.whole.at(microbatch)
            self._kinds[microbatch] = {name: self._split(kind) for name, kind in whole.items()}
        return self._kinds[microbatch]

    def _split(self, kind: Kind) -> Kind:
        import autopar.runtime.collectives  # noqa: F401 - registers the op that is inserted

        if not expert_calls(kind.graph):
            return kind
        graph = copy_graph(kind.graph)
        split_experts(graph, self._ranks)
        own = ruled_calls(graph, expert_calls(graph))
        return ExpertKind(
            *(kind.name, graph, kind.slots, {**kind.calls, **own}),
            whole=kind,
            device=self.cluster.device,
        )
