"""Price of a configuration: the placement search for its tp degree, its stages, the evaluator.

The same parts that search plans price here what a person decided: block prices come from the
placement search with the degree given, time and memory from `autopar.cost.evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.axis import Axis
from autopar.block_cost import BlockCost, ChainCost
from autopar.cluster import Cluster
from autopar.cost.evaluate import Evaluation, evaluate_setting
from autopar.cost.reserved import Footprint, footprint
from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.placement import Placement
from autopar.plan_document import StagePlan
from autopar.program import Program
from autopar.workflow.configuration import Configuration, cut_by_parameters, cut_evenly
from autopar.workflow.exchanged_parts import with_parts_exchanged
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.selective_recompute import (
    SELECTIVE,
    with_selective_recompute,
    without_gathered,
)


@dataclass(frozen=True)
class Prediction:
    """What a configuration costs. `parts` of the chain, in order: one per stage and chunk.
    `boundary`: the placement between blocks that was taken. `flops_per_sample`: forward and
    backward of the model, nothing repeated."""

    configuration: Configuration
    evaluation: Evaluation
    footprint: Footprint
    parts: tuple[StagePlan, ...]
    boundary: str
    flops_per_sample: float

    @property
    def fits(self) -> bool:
        """The fullest rank fits into its device, with what lies outside the allocator."""
        return self.footprint.needed_bytes <= self.configuration.cluster.device.memory_bytes

    @property
    def step_seconds(self) -> float:
        return self.evaluation.step_seconds


@dataclass
class Evaluator:
    """Prices of one model, kept between calls."""

    program: Program
    _costs: dict[object, ModelCosts] = field(default_factory=dict)
    _chains: dict[object, ChainCost] = field(default_factory=dict)

    def predict(self, configuration: Configuration, layers: int | None = None) -> Prediction:
        """Time and memory; of several boundary placements that are open, those of the fastest.

        `layers`: how many times the chain's repeated block really occurs, when the captured model
        holds fewer (None: as captured). Raises `UsageError` when the model can't be split as asked.
        """
        found = [self._predict(configuration, b, layers) for b in configuration.boundaries]
        priced = [p for p in found if p is not None]
        if not priced:
            raise UsageError(
                f"the sequence of {configuration.sequence} can't be split over "
                f"tp={configuration.mesh.tp}",
                next_step="pin sp=0",
            )
        return min(priced, key=lambda p: p.step_seconds)

    def _predict(
        self, configuration: Configuration, boundary: str, layers: int | None
    ) -> Prediction | None:
        chain = self._chain(configuration, boundary)
        if chain is None:
            return None
        blocks, ends = whole_chain(chain, layers)
        mesh, full = configuration.mesh, configuration.recompute == "full"
        parts = mesh.pp * configuration.chunks
        if parts > len(blocks) - sum(ends):
            raise UsageError(
                f"pp={mesh.pp} with {configuration.chunks} chunks, but the model has "
                f"{len(blocks) - sum(ends)} layers",
                next_step="choose fewer stages or chunks",
            )
        names = [b.name for b in blocks]
        cuts = cut_evenly(names, ends, parts, full)
        if configuration.by_parameters:
            cuts = cut_by_parameters(names, [b.parameters for b in blocks], ends, parts, full)
        if not configuration.reshards:
            cuts = tuple(replace(stage, keep_gathered=stage.blocks) for stage in cuts)
        setting = configuration.setting
        _refuse_two_copies(blocks, cuts, setting)
        evaluation = evaluate_setting(setting, cuts, blocks)
        flops = sum(b.flops for b in blocks) * mesh.tp / configuration.microbatch
        if mesh.cp > 1:
            # Not those of a rank times the ranks: they have unequal parts of causal attention.
            costs = self._model_costs(configuration, boundary)
            one, _ = whole_chain(costs.whole(configuration.microbatch), layers)
            flops = sum(b.flops for b in one) / configuration.microbatch
        return Prediction(
            configuration, evaluation, footprint(evaluation, setting), cuts, boundary, flops
        )

    def _chain(self, configuration: Configuration, boundary: str) -> ChainCost | None:
        c, mesh = configuration, configuration.mesh
        tp, cp, ep = mesh.tp, mesh.cp, mesh.ep
        policy = c.recompute if c.recompute in SELECTIVE else ""
        key = (
            *_price_key(c.cluster, tp * cp * ep),
            *(c.sequence, tp, cp, ep, c.microbatch, boundary, policy, c.regathers),
            c.exchanges_parts,
            c.host_layer_seconds,
        )
        if key not in self._chains:
            costs = self._model_costs(c, boundary)
            if cp not in costs.cp_degrees(cp):
                raise UsageError(
                    f"cp={cp}: "
                    + (costs.no_sequence or f"it does not divide the sequence of {c.sequence}"),
                    next_step="use a cp that divides the sequence, or none",
                )
            if costs.experts % ep:
                raise UsageError(
                    f"ep={ep}: "
                    + (costs.no_experts or f"it does not divide the {costs.experts} experts"),
                    next_step="use an ep that divides the experts of every layer, or none",
                )
            costs = costs.over(cp, tp, ep)
            if c.microbatch not in costs.microbatch_sizes(c.microbatch):
                raise UsageError(
                    f"microbatch={c.microbatch}: the batch could not be captured as a symbol",
                    next_step=f"use microbatch={costs.sizes['batch']}",
                )
            if tp > 1 and tp not in costs.tp_degrees(tp):
                raise UsageError(
                    f"tp={tp} splits no matrix product of this model", next_step="use a smaller tp"
                )
            if boundary != "R" and c.sequence % (tp * cp):
                return None
            alternatives = costs.alternatives(tp, c.microbatch)
            if not alternatives:
                return None
            found = alternatives[0].price()
            plain = not policy and not ((c.regathers or c.exchanges_parts) and tp > 1)
            plain = plain and not c.host_layer_seconds
            self._chains[key] = found if plain else _adjusted(found, costs, c)
        return self._chains[key]

    def _model_costs(self, c: Configuration, boundary: str) -> ModelCosts:
        mesh = c.mesh
        key = (*_price_key(c.cluster, mesh.tp * mesh.cp * mesh.ep), c.sequence, boundary)
        if key not in self._costs:
            sizes = dict(self.program.sizes)
            if "sequence" in self.program.symbols:
                sizes["sequence"] = c.sequence
            self._costs[key] = ModelCosts(
                self.program, c.cluster, sizes, boundary=boundary, split_weights=True
            )
        return self._costs[key]


def whole_chain(chain: ChainCost, layers: int | None) -> tuple[list[BlockCost], tuple[int, int]]:
    """All blocks of the real model, and how many at its front and back are no layers."""
    kinds = [b.kind for b in chain.blocks]
    most = max(dict.fromkeys(kinds), key=kinds.count)
    front, stop = kinds.index(most), len(kinds) - kinds[::-1].index(most)
    ends = (front, len(kinds) - stop)
    if layers is None or set(kinds[front:stop]) != {most}:
        return list(chain.blocks), ends
    layer = chain.blocks[front]
    repeated = [replace(layer, name=f"{most}#{i}") for i in range(layers)]
    return [*chain.blocks[:front], *repeated, *chain.blocks[stop:]], ends


def _price_key(cluster: Cluster, neighbours: int) -> tuple[object, ...]:
    """What block prices depend on: the device, and the links that the groups of tp, cp and ep
    use, of so many `neighbours` together."""
    device = cluster.device
    inner = cluster.links[0]
    within = neighbours <= inner.ranks and inner.ranks % neighbours == 0
    links = (inner,) if within else cluster.links
    kernel = device.attention.get(device.attention_kernel)
    return (
        *(device.name, device.memory_bytes_per_second, tuple(sorted(device.flops.items()))),
        *(device.execution, device.even_experts, device.overlap_experts, kernel, links),
    )


def _issued(block: BlockCost, seconds: float) -> BlockCost:
    """A pass of `block` takes at least the `seconds` that the host needs to issue it."""
    return replace(
        block,
        forward_compute=max(block.forward, seconds) - block.forward_comm,
        backward_compute=max(block.backward, seconds) - block.backward_comm,
    )


def _adjusted(chain: ChainCost, costs: ModelCosts, configuration: Configuration) -> ChainCost:
    """The chain as the configuration runs it: repeated blocks under a selective recomputation
    policy and no faster than the host issues them, gathered inputs dropped."""
    c, tp = configuration, configuration.mesh.tp
    boundary = Placement.parse(chain.boundary)
    axis = Axis(tp, 1, configuration.cluster, configuration.mesh.cp)
    kinds = [b.kind for b in chain.blocks]
    known: dict[str, BlockCost] = {}
    for block in chain.blocks:
        if block.kind in known:
            continue
        placed = dict(chain.placements.get(block.kind, {}))
        graph, slots = costs.placed_graph(block.kind, tp, c.microbatch, placed, boundary)
        found = block
        if c.recompute in SELECTIVE and kinds.count(block.kind) > 1:
            found = with_selective_recompute(found, graph, slots, axis, c.recompute)
        if c.regathers and tp > 1:
            found = without_gathered(found, graph, tp)
        if c.exchanges_parts and tp > 1:
            found = with_parts_exchanged(found, graph, axis)
        if kinds.count(block.kind) > 1:
            found = _issued(found, c.host_layer_seconds)
        known[block.kind] = found
    blocks = (replace(known[b.kind], name=b.name, tied=b.tied) for b in chain.blocks)
    return replace(chain, blocks=tuple(blocks))


def _refuse_two_copies(
    blocks: Sequence[BlockCost], parts: Sequence[StagePlan], setting: Setting
) -> None:
    """A V-shaped pipeline has both ends of the chain on one rank, which can't hold a tied parameter
    twice."""
    if not setting.turns:
        return
    tied = {b.name: {t.group for t in b.tied} for b in blocks}
    for rank in range(setting.mesh.pp):
        held = [
            {group for name in parts[part].blocks for group in tied[name]}
            for part in setting.parts_of(rank)
        ]
        if twice := sorted(set.intersection(*held)):
            raise UsageError(
                f"schedule={setting.schedule}: both parts of pp rank {rank} hold {twice[0]!r}, and "
                "the rank would need two copies",
                next_step="use another schedule, or give each its own parameter",
            )
