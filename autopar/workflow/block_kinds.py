"""The distinct blocks of a program as static graphs, and what is derived from them, kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.cluster import Cluster
from autopar.op_call import Bindings
from autopar.parts import Slot
from autopar.passes.analysis.assumed_load import annotate_load
from autopar.passes.analysis.blocks import Blocks
from autopar.passes.analysis.candidates import Candidates, RuledCall, candidates, ruled_calls
from autopar.passes.analysis.fusion import annotate_fusion
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.program import Program


@dataclass(frozen=True)
class Kind:
    """A distinct block as a static graph for one micro-batch size, its ops and their rules."""

    name: str
    graph: fx.GraphModule
    slots: tuple[Slot, ...]
    calls: dict[str, RuledCall]
    candidates: dict[int, Candidates] = field(default_factory=dict)

    def over(self, ranks: int) -> Candidates:
        """The strategies of every op over `ranks` ranks; kept."""
        if ranks not in self.candidates:
            self.candidates[ranks] = candidates(self.graph, ranks, self.calls)
        return self.candidates[ranks]


class BlockKinds:
    """Implements the mapping micro-batch size -> name of the kind -> `Kind` of a program."""

    def __init__(
        self, program: Program, blocks: Blocks, sizes: Mapping[str, int], cluster: Cluster
    ) -> None:
        self.program, self.blocks, self.sizes, self.cluster = program, blocks, sizes, cluster
        self._kinds: dict[int, dict[str, Kind]] = {}

    def bindings(self, microbatch: int) -> Bindings:
        return Bindings(self.program.symbols, {**self.sizes, "batch": microbatch})

    def at(self, microbatch: int) -> dict[str, Kind]:
        """All kinds for one micro-batch size."""
        if microbatch not in self._kinds:
            bindings = self.bindings(microbatch)
            cut = {
                name: cut_block(self.program, self.blocks.block(name), bindings)
                for name in self.blocks.kinds
            }
            if self.cluster.device.execution == "compile":
                annotate_fusion(*(graph for graph, _ in cut.values()))
            for name, (graph, _) in cut.items() if self.program.expert_load else ():
                annotate_load(graph, name, self.blocks.kinds[name], self.program.expert_load)
            self._kinds[microbatch] = {
                name: Kind(name, graph, slots, ruled_calls(graph))
                for name, (graph, slots) in cut.items()
            }
        return self._kinds[microbatch]

    def groups(self) -> list[list[str]]:
        """Kinds that share parameters, together: they have to agree on how those are stored."""
        items = {i.name: i.target for i in self.program.inputs}
        groups: list[tuple[set[str], list[str]]] = []
        for kind in self.blocks.kinds:
            names, members = {items[n] for n in self.blocks.block(kind).parameters}, []
            apart = []
            for shared, group in groups:
                if shared & names:
                    names |= shared
                    members += group
                else:
                    apart.append((shared, group))
            groups = [*apart, (names, [*members, kind])]
        return [group for _, group in groups]

    def tied(self) -> dict[str, str]:
        """Parameter that more than one block holds -> the first that the same blocks hold."""
        items = {i.name: i.target for i in self.program.inputs}
        holders: dict[str, list[str]] = {}
        for block in self.blocks.chain:
            for name in block.parameters:
                holders.setdefault(items[name], []).append(block.name)
        first: dict[tuple[str, ...], str] = {}
        return {
            name: first.setdefault(tuple(held), name)
            for name, held in holders.items()
            if len(held) > 1
        }
