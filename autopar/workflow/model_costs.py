"""What the search asks about a model: prices of all blocks for a tp degree and micro-batch size.

`ModelCosts` joins the passes and the placement search: for every distinct block it builds the
placement problem and has it solved. A solution that the outer search wants to know more about is
carried out on a copy of the block, and the rewritten graph is priced. The two prices must agree:
that is asserted for every block.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial

from torch import fx

from autopar.axis import Axis
from autopar.block_cost import Alternative, BlockCost, ChainCost, with_last_holders
from autopar.cluster import Cluster
from autopar.experts import EXPERTS
from autopar.op_call import OpCall, Operand, types_of
from autopar.parts import Slot
from autopar.passes.analysis.block_costs import block_cost
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.analysis.loss_form import loss_form
from autopar.placement import Placement, Replicate, Shard, boundary_of
from autopar.program import Program, copy_graph
from autopar.workflow.block_kinds import BlockKinds, Kind
from autopar.workflow.expert_kinds import ExpertKinds, check_room, expert_count
from autopar.workflow.expert_ways import missing_ways
from autopar.workflow.placed_blocks import PlacedBlocks, Solved, confirm, placed_blocks
from autopar.workflow.price_bounds import (
    block_bound,
    only_seconds,
    part_of_experts,
    part_of_sequence,
)
from autopar.workflow.rank_block import to_rank_block
from autopar.workflow.sequence_kinds import SequenceKinds, splits

_PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "embedding"})


class ModelCosts:
    """Implements `autopar.block_cost.CostProvider` for a prepared program on a cluster.

    `state_bytes`: bytes of parameter, gradient and optimizer state per byte of parameter: only
    steers which points of the frontier are tried. `split_weights`: no weight matrix is whole on a
    tp rank that could hold a slice. `spare_experts`: slots of a rank beyond its part of a layer's
    experts. Results are kept.
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
        spare_experts: int = 0,
    ) -> None:
        self.program = program
        self.cluster = cluster
        self.sizes = sizes
        self.state_bytes = state_bytes
        self.pinned_boundary = boundary
        self.split_weights = split_weights
        self.spare_experts = spare_experts
        self.blocks = analyse_blocks(program)
        self.kinds: BlockKinds = BlockKinds(program, self.blocks, sizes, cluster)
        self.block_names = tuple(b.name for b in self.blocks.chain)
        self.holds_parameters = tuple(bool(b.parameters) for b in self.blocks.chain)
        # What blocks of one kind differ in: whether they can end a stage, and what they share.
        self._own = list(zip(self.blocks.can_end_stages(), self.blocks.shared_keys(), strict=True))
        self.notes: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        self.tied = self.kinds.tied()
        self.groups = self.kinds.groups()
        self._alternatives: dict[tuple[int, int], tuple[Alternative, ...]] = {}
        self._optimistic: dict[tuple[int, int], ChainCost] = {}
        self._prices: dict[object, BlockCost] = {}
        self._solved: dict[object, Solved] = {}
        self._bounds: dict[tuple[int, int], BlockCost] = {}
        self._points: dict[tuple[int, int, str], tuple[PlacedBlocks, bool]] = {}
        self.cp = self.ep = 1
        self._root = self
        self._over: dict[tuple[int, int, int], ModelCosts] = {}
        if spare_experts:
            check_room(spare_experts, self.no_experts)

    def cp_degrees(self, limit: int) -> list[int]:
        """Degrees up to `limit` that divide the sequence (1 alone where there is none)."""
        return [d for d in range(1, limit + 1) if self.sequence % d == 0]

    @property
    def sequence(self) -> int:
        """The length that cp may split; 1 when there is none."""
        return self._splits[0]

    @property
    def no_sequence(self) -> str:
        """Why there is no sequence to split, '' where there is one."""
        return self._splits[1]

    @cached_property
    def _splits(self) -> tuple[int, str]:
        return splits(self.program, self.blocks, self.kinds.bindings(self.sizes["batch"]))

    @property
    def experts(self) -> int:
        """The number that ep has to divide; 1 when no experts can be split."""
        return self._experts[0]

    @property
    def no_experts(self) -> str:
        """Why no experts can be split, '' where they can."""
        return self._experts[1]

    @cached_property
    def _experts(self) -> tuple[int, str]:
        return expert_count(self.kinds.at(self.sizes["batch"]), self.tied)

    def over(self, cp: int, tp: int, ep: int = 1) -> ModelCosts:
        """The prices on one of `cp` ranks that split the sequence, each of `tp` neighbours, when
        `ep` of them split the experts of every layer."""
        if cp == ep == 1:
            return self
        # How experts are split does not depend on tp, how sequences are does.
        key = cp, tp if cp > 1 else 1, ep
        if key not in self._over:
            if ep > 1:
                outer = self.over(cp, tp)
                kinds: BlockKinds = ExpertKinds(outer.kinds, ep)
            else:
                axis = Axis(cp, tp, self.cluster)
                kinds = SequenceKinds(self.kinds, self.groups, axis, self.notes)
            found = copy(self)
            found.cp, found.ep, found.kinds = cp, ep, kinds
            found._alternatives, found._optimistic, found._points = {}, {}, {}
            if cp > 1:
                found._prices, found._solved, found._bounds = {}, {}, {}
            self._over[key] = found
        return self._over[key]

    def on(self, cluster: Cluster) -> ModelCosts:
        """The prices on a larger cluster whose groups of ranks are linked as those here: what is
        known here holds there, and the other way round."""
        found = copy(self)
        found.cluster, found._over = cluster, {}
        return found

    def tp_degrees(self, limit: int) -> list[int]:
        """Degrees up to `limit` at which at least one matrix product of the model can be split."""
        kinds = self.kinds.at(self.sizes["batch"]).values()
        sizes = {size for kind in kinds for size in _product_sizes(kind)}
        return [d for d in range(1, limit + 1) if d == 1 or any(not s % d for s in sizes)]

    def microbatch_sizes(self, most: int) -> list[int]:
        """Sizes that the captured program allows: any when the batch is symbolic, else the
        captured one."""
        if "batch" in self.program.symbols:
            return list(range(1, most + 1))
        return [self.sizes["batch"]] if self.sizes["batch"] <= most else []

    def alternatives(self, tp: int, microbatch: int) -> tuple[Alternative, ...]:
        """One per boundary placement and point of the time-memory frontier."""
        key = (tp, microbatch)
        if key not in self._alternatives:
            if tp == 1:
                whole = self._chain({}, Replicate, 1, microbatch, "whole")
                found = [Alternative(whole.boundary, whole, lambda: whole)]
            else:
                found = self._placed(tp, microbatch, self.split_weights)
                if not found and self.split_weights:
                    self.notes[f"tp={tp}: not every weight can be split, some are whole"] = None
                    found = self._placed(tp, microbatch, False)
            self._alternatives[key] = tuple(found)
        return self._alternatives[key]

    def confirm(self, chain: ChainCost, tp: int, microbatch: int) -> int:
        """Have the placements of an alternative proven by a second solver; see
        `placed_blocks.confirm`. Nothing is placed when tp is 1."""
        if tp == 1:
            return 0
        placed, split = self._points[tp, microbatch, chain.label]
        return confirm(
            placed,
            self.kinds.at(microbatch),
            self.groups,
            self._axis(tp),
            self.state_bytes,
            split_weights=split,
        )

    def whole(self, microbatch: int) -> ChainCost:
        """The model on one rank, nothing split."""
        return self.alternatives(1, microbatch)[0].least

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        """Every op with its fastest strategy, no communication but that of ep; a tp-th part of all
        memory."""
        key = (tp, microbatch)
        if key not in self._optimistic and self.cp > 1:
            least = self._root.over(1, tp, self.ep).optimistic(tp, microbatch)
            blocks = tuple(part_of_sequence(b, self.cp) for b in least.blocks)
            self._optimistic[key] = replace(least, blocks=blocks)
        if key not in self._optimistic:
            kinds = self.kinds.at(microbatch)
            by_kind = {b.kind: b for b in self._root.whole(microbatch).blocks}
            axis, found = self._axis(tp), {}
            for name, kind in kinds.items():
                if (id(kind), tp) not in self._bounds:
                    whole = part_of_experts(by_kind[name], kind, self.ep)
                    self._bounds[id(kind), tp] = block_bound(whole, kind, axis)
                found[name] = self._bounds[id(kind), tp]
            self._optimistic[key] = self._along_chain("", "bound", found)
        return self._optimistic[key]

    def flops_per_sample(self, microbatch: int) -> float:
        """Forward and backward of the whole model, nothing split and nothing recomputed."""
        return sum(b.flops for b in self.whole(microbatch).blocks) / microbatch

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
        if self.program.one_micro_batch:
            found.append(
                f"{self.program.one_micro_batch}: one micro-batch, whose statistics dp ranks sum "
                "(the time of these messages is not predicted)"
            )
        if loss_form(self.program).even:
            found.append(
                "the loss adds a mean over targets and one over samples: a step whose "
                "micro-batches have unequal numbers of targets is refused (dp=1,microbatches=1 "
                "takes any)"
            )
        return (*found, *self.program.notes, *self.notes)

    def placed_graph(
        self, kind: str, tp: int, microbatch: int, chosen: Mapping[str, str], boundary: Placement
    ) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
        """A copy of a distinct block, rewritten for placements: what one rank runs."""
        found = self.kinds.at(microbatch)[kind]
        graph = copy_graph(found.graph)
        over = found.over(tp)
        to_rank_block(kind, graph, found.slots, chosen, boundary, tp, over, self.cluster)
        return graph, found.slots

    def price(
        self, kind: str, tp: int, microbatch: int, chosen: Mapping[str, str], boundary: Placement
    ) -> BlockCost:
        """Price of one distinct block under given placements, from its rewritten graph; kept, as
        points of the frontier often differ in one kind only."""
        # Kinds that are the same object are the same block, however experts are split.
        of = self.kinds.at(microbatch)[kind]
        key = (id(of), tp, boundary, frozenset(chosen.items()))
        if key not in self._prices:
            graph, slots = self.placed_graph(kind, tp, microbatch, chosen, boundary)
            known = kind, graph, slots, self._axis(tp), self.tied, self.spare_experts
            self._prices[key] = block_cost(kind, *known)
        return self._prices[key]

    def _axis(self, tp: int) -> Axis:
        return Axis(tp, 1, self.cluster, self.cp)

    def _boundaries(self, tp: int, microbatch: int) -> list[Placement]:
        """Placements that every value between blocks can take: whole, or split along dim 1."""
        bindings = self.kinds.bindings(microbatch)
        crossing = [types_of(n, bindings)[0] for n in self.blocks.crossing_any]
        shapes = {t.shape for t in crossing if t.requires_grad}
        if self.pinned_boundary is not None:
            return [boundary_of(self.pinned_boundary, shapes)]
        if not shapes:
            return [Replicate]
        ranks = tp * self.cp  # cp has split dim 1 already
        if all(len(s) > 1 and s[1] % ranks == 0 and s[1] >= ranks for s in shapes):
            return [Replicate, Shard(1)]
        self.notes[
            f"tp={tp}: no sequence parallelism, dim 1 of {sorted(shapes)[0]} does not divide"
        ] = None
        return [Replicate]

    def _placed(self, tp: int, microbatch: int, split: bool) -> list[Alternative]:
        """The placements of the search, each to be rewritten and priced when it is asked for."""
        kinds = self.kinds.at(microbatch)
        self._note_heads(kinds, tp)
        floor = {b.kind: b for b in self.optimistic(tp, microbatch).blocks}
        found = []
        for boundary in self._boundaries(tp, microbatch):
            for placed in placed_blocks(
                kinds,
                self.groups,
                self._axis(tp),
                boundary,
                self.state_bytes,
                split_weights=split,
                known=self._solved,
            ):
                least = {k: only_seconds(floor[k], placed.seconds[k]) for k in kinds}
                chain = self._along_chain(str(boundary), placed.label, least)
                price = cache(partial(self._priced, placed, tp, microbatch))
                self._points[tp, microbatch, placed.label] = placed, split
                found.append(Alternative(str(boundary), chain, price))
        return found

    def _priced(self, placed: PlacedBlocks, tp: int, microbatch: int) -> ChainCost:
        """The full price; the placement search's objective must be that of the graph that runs."""
        chain = self._chain(placed.placements, placed.boundary, tp, microbatch, placed.label)
        for block in {b.kind: b for b in chain.blocks}.values():
            seconds = placed.seconds[block.kind]
            if abs(block.seconds - seconds) > 1e-9 * max(block.seconds, seconds):
                raise AssertionError(
                    f"placement search says {seconds:.12g} s for {block.kind}, "
                    f"its graph costs {block.seconds:.12g} s"
                )
        return chain

    def _chain(
        self,
        placements: Mapping[str, Mapping[str, str]],
        boundary: Placement,
        tp: int,
        microbatch: int,
        label: str,
    ) -> ChainCost:
        priced = {
            k: self.price(k, tp, microbatch, placements.get(k, {}), boundary)
            for k in self.blocks.kinds
        }
        found = self._along_chain(str(boundary), label, priced, placements)
        kinds = self.kinds.whole if isinstance(self.kinds, ExpertKinds) else self.kinds
        if not isinstance(kinds, SequenceKinds):
            return found
        return replace(found, cp_placements=kinds.placements[microbatch])

    def _along_chain(
        self,
        boundary: str,
        label: str,
        by_kind: Mapping[str, BlockCost],
        placements: Mapping[str, Mapping[str, str]] | None = None,
    ) -> ChainCost:
        """The cost of every block of the model from that of its kind."""
        blocks = tuple(
            replace(by_kind[b.kind], name=b.name, can_end_stage=can, shared_key=key)
            for b, (can, key) in zip(self.blocks.chain, self._own, strict=True)
        )
        return ChainCost(boundary, label, with_last_holders(blocks), placements or {})

    def _note_heads(self, kinds: Mapping[str, Kind], tp: int) -> None:
        for name, kind in kinds.items():
            found = kind.over(tp)
            for unknown in found.unknown:
                self.unknown[unknown] = None
            for node, call in found.calls.items():
                names = {s.name for s in found.strategies[node]}
                if call.op_name == "scaled_dot_product_attention" and "shard g" not in names:
                    why = _why_not_by_heads(call, tp)
                    self.notes[f"tp={tp}: attention of {name} is not split by heads, {why}"] = None
                elif call.op_name in EXPERTS and self.ep == 1:
                    for way, why in missing_ways(call, names, tp).items():
                        self.notes[f"tp={tp}: experts of {name} are not {way}: {why}"] = None


def _product_sizes(kind: Kind) -> set[int]:
    """Sizes of the dims of every weight or second factor of a matrix product or lookup, and of
    experts."""
    found: set[int] = set()
    for call, _, _ in kind.calls.values():
        if call.op_name in _PRODUCTS and len(call.args) > 1:
            factor = call.args[1 if call.op_name in ("linear", "embedding") else 0]
            if isinstance(factor, Operand):
                found.update(call.types[factor.index].shape)
        elif call.op_name in EXPERTS:
            down = call.named("down")
            assert isinstance(down, Operand)
            found.update(call.types[down.index].shape)
    return found


def _why_not_by_heads(call: OpCall, tp: int) -> str:
    """Why attention has no strategy that gives each rank its own heads."""
    query, key = (call.types[a.index].shape for a in call.args[:2] if isinstance(a, Operand))
    if len(query) < 4 or len(key) < 4:
        return f"queries of shape {list(query)} have no dim of heads"
    if query[-3] % tp or key[-3] % tp:
        return f"{query[-3]} query and {key[-3]} key heads do not divide by {tp}"
    return "as one tensor is query, key or value at once, or keys and values don't fit the queries"
