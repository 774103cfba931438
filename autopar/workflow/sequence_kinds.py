"""The distinct blocks of a program as one rank of cp sees them: its part of every sequence.

How each op lies on cp is searched like any placement: the fastest for the collectives, arithmetic
and memory of that axis alone, with parameters whole. Ulysses attention (all-to-all from rows to
heads and back) and the gathering of keys and values are both points of that space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from autopar.axis import Axis
from autopar.cost.op_cost import CONTRACTIONS
from autopar.experts import EXPERTS
from autopar.op_call import Bindings, types_of
from autopar.passes.analysis.block_problem import build_problem
from autopar.passes.analysis.blocks import Blocks, local_op_names
from autopar.passes.analysis.candidates import Candidates, ruled_calls
from autopar.passes.analysis.fusion import annotate_fusion
from autopar.passes.analysis.sequence_candidates import sequence_candidates
from autopar.passes.rewrite.place import PARAMETER
from autopar.passes.rewrite.split_sequence import BOUNDARY, split_sequence
from autopar.program import Program, copy_graph
from autopar.search.placements import solve
from autopar.sequence_shards import ATTENTIONS
from autopar.workflow.block_kinds import BlockKinds, Kind
from autopar.workflow.placed_blocks import named_in_plan

# Seconds per byte of memory, as in `placed_blocks.PRICES`: a GiB for a millisecond.
_PRICE = 1e-12
Placements = dict[str, dict[str, str]]


def splits(program: Program, blocks: Blocks, bindings: Bindings) -> tuple[int, str]:
    """The length that cp may split, and '' or why there is none.

    It is dim 1 of the values that pass from block to block, and a sequence: dim 1 of an input.
    """
    if program.batch_statistics:
        return 1, f"{program.one_micro_batch}, and cp ranks hold a part of every sample"
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    lengths = {
        kind.shape[1]
        for item in program.of_kind("input")
        for kind in types_of(nodes[item.name], bindings)[:1]
        if len(kind.shape) > 1
    }
    crossing = [(n, types_of(n, bindings)[0]) for n in blocks.crossing_any]
    passed = [(n, t.shape) for n, t in crossing if t.requires_grad]
    if not passed:
        return 1, "no value with gradient passes between blocks"
    for node, shape in passed:
        if len(shape) < 2 or shape[1] not in lengths:
            return 1, (
                f"{node.name} of shape {list(shape)} passes between blocks, and its dim 1 is the "
                "length of no input"
            )
    return gcd(*{shape[1] for _, shape in passed}), ""


class SequenceKinds(BlockKinds):
    """As `BlockKinds`, with the shapes of one rank of `axis`, cp, whose stride is tp.

    `notes` gets what every cp rank computes whole.
    """

    def __init__(
        self, whole: BlockKinds, groups: Sequence[Sequence[str]], axis: Axis, notes: dict[str, None]
    ) -> None:
        super().__init__(whole.program, whole.blocks, whole.sizes, axis.cluster)
        self.whole, self._groups, self.axis, self._notes = whole, groups, axis, notes
        self.placements: dict[int, Placements] = {}

    def at(self, microbatch: int) -> dict[str, Kind]:
        if microbatch not in self._kinds:
            self._kinds[microbatch] = self._split(microbatch)
        return self._kinds[microbatch]

    def _split(self, microbatch: int) -> dict[str, Kind]:
        import autopar.runtime.collectives  # noqa: F401 - registers the ops that are inserted

        whole, ranks = self.whole.at(microbatch), self.axis.ranks
        found = {
            name: sequence_candidates(kind.graph, ranks, kind.calls, self.axis.stride)
            for name, kind in whole.items()
        }
        chosen: Placements = {}
        for group in self._groups:
            chosen |= self._placed(group, whole, found)
        self.placements[microbatch] = chosen
        made = {}
        for name, kind in whole.items():
            self._note_whole(kind, chosen[name])
            graph = copy_graph(kind.graph)
            split_sequence(name, graph, kind.slots, chosen[name], ranks, found[name])
            made[name] = (graph, kind.slots)
        if self.cluster.device.execution == "compile":
            for graph, _ in made.values():
                for node in graph.graph.nodes:
                    node.meta.pop("fusion", None)
            annotate_fusion(*(graph for graph, _ in made.values()))
        return {n: Kind(n, graph, slots, ruled_calls(graph)) for n, (graph, slots) in made.items()}

    def _note_whole(self, kind: Kind, chosen: Mapping[str, str]) -> None:
        """Products, attention and ops without a rule that no placement splits by position."""
        calls = [n for n in kind.graph.graph.nodes if n.op == "call_function"]
        for node, local in zip(calls, local_op_names(calls), strict=True):
            call, rule, _ = kind.calls[node.name]
            heavy = rule is None or call.op_name in CONTRACTIONS | ATTENTIONS | EXPERTS
            whole = chosen[local].startswith("replicate")
            if heavy and whole and any(t.requires_grad and len(t.shape) > 2 for t in call.results):
                self._notes[
                    f"cp={self.axis.ranks}: {local} of {kind.name} can't be split by position, "
                    "every cp rank computes all of it"
                ] = None

    def _placed(
        self, group: Sequence[str], whole: Mapping[str, Kind], found: Mapping[str, Candidates]
    ) -> Placements:
        parts = [(k, whole[k].graph, whole[k].slots, found[k]) for k in group]
        problem = build_problem(parts, self.axis, BOUNDARY, 0.0, replicas=True)
        solution = solve(problem, (_PRICE,))[0]
        return {
            k: {
                op: strategy
                for op, strategy in named_in_plan(whole[k], solution.choice).items()
                if not op.startswith(PARAMETER)
            }
            for k in group
        }
