"""What the search asks about a model: prices of all blocks for a tp degree and micro-batch size.

`ModelCosts` joins the passes and the placement search: for every distinct block it builds the
placement problem, has it solved, rewrites a copy of the block as the solution says, and prices the
rewritten graph. The two prices must agree: that is asserted for every block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from autopar.block_cost import BlockCost, ChainCost
from autopar.cluster import Cluster
from autopar.cost.op_cost import op_cost
from autopar.errors import InfeasibleError
from autopar.op_call import Bindings, types_of
from autopar.parts import Parts, Slot
from autopar.passes.analysis.block_costs import block_cost
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.analysis.coupled_samples import coupling_op
from autopar.passes.analysis.fusion import annotate_fusion
from autopar.passes.analysis.loss_form import loss_form
from autopar.passes.analysis.strategies import (
    Axis,
    build_problem,
    candidates,
    local_call,
    searched,
    source_names,
)
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import front_pipeline
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import PARAMETER, place, relative
from autopar.placement import Placement, Replicate, Shard
from autopar.placement_problem import Problem
from autopar.program import Program, copy_graph, module_path, user_line
from autopar.search.placements import Model

# Seconds per byte at which memory is traded for time: points of the placement frontier.
# 1e-12: a GiB for a millisecond of every micro-batch; 1e-10: a GiB for a tenth of a second.
PRICES = (0.0, 1e-12, 1e-10)


def prepare(program: Program, sizes: dict[str, int]) -> Program:
    """The front half of the passes: what the search and the back half start from."""
    own = program.with_graph(copy_graph(program.graph_module))
    parts, _ = run_passes(Parts(own, sizes=sizes), front_pipeline())
    return replace(parts.program, batch_stays_whole=_why_whole(parts.program))


def _why_whole(program: Program) -> str:
    """Why the loss of a batch does not follow from those of its parts; '' when it does."""
    if program.updates:
        return f"a step changes the buffer {program.updates[0]!r}"
    if loss_form(program).kind == "unknown":
        return "the loss is no mean or sum over samples that could be recognised"
    if (op := coupling_op(program)) is None:
        return ""
    return f"samples depend on each other in {op.name} ({user_line(op) or module_path(op)})"


@dataclass(frozen=True)
class _Kind:
    """A distinct block as a static graph for one micro-batch size."""

    graph: fx.GraphModule
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class _GroupModel:
    """The placement problem of kinds that share parameters, and its integer program."""

    parts: list[tuple[str, fx.GraphModule, tuple[Slot, ...]]]
    problem: Problem
    model: Model


class ModelCosts:
    """Implements `autopar.block_cost.CostProvider` for a prepared program on a cluster.

    `state_bytes`: bytes of parameter, gradient and optimizer state per byte of parameter: only
    steers which points of the frontier are tried. `split_weights`: no weight matrix is whole on a
    tp rank that could hold a slice. Results are kept.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        sizes: dict[str, int],
        *,
        state_bytes: float = 8.0,
        boundary: str | None = None,
        split_weights: bool = False,
    ) -> None:
        self.program = program
        self.cluster = cluster
        self.sizes = sizes
        self.state_bytes = state_bytes
        self.pinned_boundary = boundary
        self.split_weights = split_weights
        self.blocks = analyse_blocks(program)
        self.block_names = tuple(b.name for b in self.blocks.chain)
        self.notes: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        self.tied = self._tied()
        self._kinds: dict[int, dict[str, _Kind]] = {}
        self._chains: dict[tuple[int, int], list[ChainCost]] = {}
        self._optimistic: dict[tuple[int, int], ChainCost] = {}

    def tp_degrees(self, limit: int) -> list[int]:
        """Degrees up to `limit` at which at least one matrix product of the model can be split."""
        degrees = [1]
        sizes = self._kinds_for(self.sizes["batch"])
        for degree in range(2, limit + 1):
            if any(self._splits(kind, degree) for kind in sizes.values()):
                degrees.append(degree)
        return degrees

    def microbatch_sizes(self, most: int) -> list[int]:
        """Sizes that the captured program allows: any when the batch is symbolic, else the
        captured one."""
        if "batch" in self.program.symbols:
            return list(range(1, most + 1))
        return [self.sizes["batch"]] if self.sizes["batch"] <= most else []

    def chains(self, tp: int, microbatch: int) -> list[ChainCost]:
        """One alternative per boundary placement and point of the time-memory frontier."""
        import autopar.runtime.collectives  # noqa: F401 - registers the ops that the passes insert

        key = (tp, microbatch)
        if key not in self._chains:
            if tp == 1:
                found = [self._chain({}, Replicate, 1, microbatch, "whole")]
            else:
                found = list(self._alternatives(tp, microbatch, self.split_weights))
                if not found and self.split_weights:
                    self.notes[f"tp={tp}: not every weight can be split, some are whole"] = None
                    found = list(self._alternatives(tp, microbatch, False))
            self._chains[key] = found
        return self._chains[key]

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        """Every op with its fastest strategy and no communication; a tp-th part of all memory."""
        key = (tp, microbatch)
        if key not in self._optimistic:
            kinds = self._kinds_for(microbatch)
            whole = self.chains(1, microbatch)[0]
            by_kind = {b.kind: b for b in whole.blocks}
            found = {k: self._bound(by_kind[k], kinds[k], tp) for k in kinds}
            blocks = tuple(replace(found[b.kind], name=b.name) for b in self.blocks.chain)
            self._optimistic[key] = ChainCost("", "bound", blocks)
        return self._optimistic[key]

    def flops_per_sample(self, microbatch: int) -> float:
        """Forward and backward of the whole model, nothing split and nothing recomputed."""
        return sum(b.flops for b in self.chains(1, microbatch)[0].blocks) / microbatch

    def all_notes(self) -> tuple[str, ...]:
        """What the search left out, and ops without a rule (they are replicated)."""
        found = [f"op without a sharding rule, replicated: {op}" for op in self.unknown]
        if "batch" not in self.program.symbols:
            found.append(
                f"the batch could not be captured as a symbol: microbatch is {self.sizes['batch']}"
            )
        if self.program.batch_stays_whole:
            found.append(
                f"{self.program.batch_stays_whole}, so the batch is not split: dp 1, one "
                "micro-batch"
            )
        return (*found, *self.program.notes, *self.notes)

    def placed_graph(
        self, kind: str, tp: int, microbatch: int, chosen: dict[str, str], boundary: Placement
    ) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
        """A copy of a distinct block, rewritten for placements: what one rank runs."""
        found = self._kinds_for(microbatch)[kind]
        graph = copy_graph(found.graph)
        place(kind, graph, found.slots, chosen, boundary, tp)
        if tp > 1:
            insert_collectives(graph, boundary, tp)
        localize_shapes(graph, tp)
        return graph, found.slots

    def price(
        self, kind: str, tp: int, microbatch: int, chosen: dict[str, str], boundary: Placement
    ) -> BlockCost:
        """Price of one distinct block under given placements, from its rewritten graph."""
        graph, slots = self.placed_graph(kind, tp, microbatch, chosen, boundary)
        return block_cost(kind, kind, graph, slots, self._axis(tp), self.tied)

    def _axis(self, tp: int) -> Axis:
        return Axis(tp, 1, self.cluster)

    def _kinds_for(self, microbatch: int) -> dict[str, _Kind]:
        if microbatch not in self._kinds:
            bindings = Bindings(self.program.symbols, {**self.sizes, "batch": microbatch})
            self._kinds[microbatch] = {
                kind: _Kind(*cut_block(self.program, self.blocks.block(kind), bindings))
                for kind in self.blocks.kinds
            }
            if self.cluster.device.execution == "compile":
                annotate_fusion(*(k.graph for k in self._kinds[microbatch].values()))
        return self._kinds[microbatch]

    def _tied(self) -> set[str]:
        """Parameters that more than one block holds."""
        seen: dict[str, str] = {}
        tied = set()
        items = {i.name: i.target for i in self.program.inputs}
        for block in self.blocks.chain:
            for name in block.parameters:
                if seen.setdefault(items[name], block.name) != block.name:
                    tied.add(items[name])
        return tied

    def _splits(self, kind: _Kind, degree: int) -> bool:
        for node in kind.graph.graph.nodes:
            if node.op == "call_function" and getattr(node.target, "_opname", "") in (
                "linear",
                "addmm",
                "mm",
                "matmul",
                "bmm",
                "embedding",
            ):
                value = node.args[1 if node.target._opname in ("linear", "embedding") else 0]
                shape = value.meta["val"].shape if isinstance(value, fx.Node) else ()
                if any(size % degree == 0 and size >= degree for size in shape):
                    return True
        return False

    def _boundaries(self, tp: int, microbatch: int) -> list[Placement]:
        """Placements that every value between blocks can take: whole, or split along dim 1."""
        if self.pinned_boundary is not None:
            return [Placement.parse(self.pinned_boundary)]
        bindings = Bindings(self.program.symbols, {**self.sizes, "batch": microbatch})
        found = [Replicate]
        crossing = [
            types_of(n, bindings)[0]
            for i in range(len(self.blocks.chain) - 1)
            for n in self.blocks.crossing(i)
        ]
        shapes = {t.shape for t in crossing if t.requires_grad}
        if shapes and all(len(s) > 1 and s[1] % tp == 0 and s[1] >= tp for s in shapes):
            found.append(Shard(1))
        elif shapes:
            self.notes[
                f"tp={tp}: no sequence parallelism, dim 1 of {sorted(shapes)[0]} does not divide"
            ] = None
        return found

    def _alternatives(self, tp: int, microbatch: int, split: bool) -> Iterable[ChainCost]:
        kinds = self._kinds_for(microbatch)
        self._note_heads(kinds, tp)
        seen = set()
        for boundary in self._boundaries(tp, microbatch):
            models = [self._model(group, kinds, tp, boundary, split) for group in self._groups()]
            for price in PRICES:
                placements: dict[str, dict[str, str]] = {}
                expected: dict[str, float] = {}
                try:
                    for model in models:
                        self._solve(model, price, placements, expected)
                except InfeasibleError:
                    break
                text = repr((str(boundary), placements))
                if text in seen:
                    continue
                seen.add(text)
                label = f"boundary {boundary}, memory at {price:g} s/B"
                chain = self._chain(placements, boundary, tp, microbatch, label)
                self._assert_agree(chain, expected)
                yield chain

    def _groups(self) -> list[list[str]]:
        """Kinds that share parameters are solved together."""
        items = {i.name: i.target for i in self.program.inputs}
        groups: list[tuple[set[str], list[str]]] = []
        for kind in self.blocks.kinds:
            names = {items[n] for n in self.blocks.block(kind).parameters}
            for shared, group in groups:
                if shared & names:
                    shared |= names
                    group.append(kind)
                    break
            else:
                groups.append((names, [kind]))
        return [group for _, group in groups]

    def _model(
        self, group: list[str], kinds: dict[str, _Kind], tp: int, boundary: Placement, split: bool
    ) -> _GroupModel:
        parts = [(k, kinds[k].graph, kinds[k].slots) for k in group]
        problem = build_problem(
            parts, self._axis(tp), boundary, self.state_bytes, split_weights=split
        )
        return _GroupModel(parts, problem, Model(problem))

    def _solve(
        self,
        model: _GroupModel,
        price: float,
        placements: dict[str, dict[str, str]],
        expected: dict[str, float],
    ) -> None:
        found = model.model.solve(price)
        late = sum(
            next(c.seconds for c in op.choices if c.name == found.choice[op.name])
            for op in model.problem.ops
            if op.name in model.problem.stored
        )
        expected["+".join(k for k, _, _ in model.parts)] = found.seconds - late
        for kind, graph, slots in model.parts:
            names = source_names(kind, graph, slots)
            chosen: dict[str, str] = {}
            placeholders = graph.graph.find_nodes(op="placeholder")
            for node, slot in zip(placeholders, slots, strict=True):
                if slot.kind == "parameter":
                    chosen[PARAMETER + relative(slot.name, kind)] = found.choice[names[node.name]]
            for node in graph.graph.nodes:
                if node.op == "call_function":
                    local = names[node.name].split("|", 1)[1]
                    chosen[local] = found.choice[names[node.name]]
            placements[kind] = chosen

    def _chain(
        self,
        placements: dict[str, dict[str, str]],
        boundary: Placement,
        tp: int,
        microbatch: int,
        label: str,
    ) -> ChainCost:
        priced = {
            k: self.price(k, tp, microbatch, placements.get(k, {}), boundary)
            for k in self.blocks.kinds
        }
        blocks = tuple(replace(priced[b.kind], name=b.name) for b in self.blocks.chain)
        return ChainCost(str(boundary), label, blocks, placements)

    def _assert_agree(self, chain: ChainCost, expected: dict[str, float]) -> None:
        """The placement search's objective is the price of the graph that will run."""
        priced = {b.kind: b for b in chain.blocks}
        for group, seconds in expected.items():
            graph = sum(priced[k].seconds for k in group.split("+"))
            if abs(graph - seconds) > 1e-9 * max(graph, seconds):
                raise AssertionError(
                    f"placement search says {seconds:.12g} s for {group}, "
                    f"its graph costs {graph:.12g} s"
                )

    def _note_heads(self, kinds: dict[str, _Kind], tp: int) -> None:
        for name, kind in kinds.items():
            found = candidates(kind.graph, tp)
            for unknown in found.unknown:
                self.unknown[unknown] = None
            for node, call in found.calls.items():
                names = {s.name for s in found.strategies[node]}
                if call.op_name == "scaled_dot_product_attention" and "shard g" not in names:
                    heads = call.types[0].shape[1], call.types[1].shape[1]
                    self.notes[
                        f"tp={tp}: attention of {name} is not split by heads, {heads[0]} query and "
                        f"{heads[1]} key heads do not divide by {tp}"
                    ] = None

    def _bound(self, whole: BlockCost, kind: _Kind, tp: int) -> BlockCost:
        forward = backward = 0.0
        found = candidates(kind.graph, tp)
        for node, call in found.calls.items():
            prices = [
                op_cost(local_call(call, s, tp), found.flops[node] * s.share, self.cluster.device)
                for s in searched(call, found.strategies[node])
            ]
            forward += min(p.forward_seconds for p in prices)
            backward += min(p.backward_seconds for p in prices)
        return replace(
            whole,
            forward_compute=forward,
            backward_compute=backward,
            forward_comm=0.0,
            backward_comm=0.0,
            parameters=whole.parameters // tp,
            trainable=whole.trainable // tp,
            saved_bytes=whole.saved_bytes // tp,
            input_bytes=whole.input_bytes // tp,
            transient_bytes=0,
            boundary_bytes=whole.boundary_bytes // tp,
            backward_weights=0.0,
            parameter_reduce_seconds=0.0,
            tied_parameters=whole.tied_parameters // tp,
        )
