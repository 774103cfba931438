"""Put the blocks of each pipeline stage together: parameters by name, values that arrive and leave.

embed, layers 0-15 | layers 16-31, head   ->   stage 0: … send(add_54)
                                               stage 1: add_54 = recv() …
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError
from autopar.experts.spare_slots import spare_holders
from autopar.mesh import EP
from autopar.op_call import Bindings, types_of
from autopar.parts import Parts
from autopar.passes.analysis.blocks import Block, Blocks
from autopar.passes.analysis.loss_form import loss_form
from autopar.passes.analysis.random_ops import any_draws
from autopar.passes.rewrite.cut_blocks import cut_free
from autopar.passes.rewrite.split_sequence import BOUNDARY
from autopar.placement import Placement, Replicate
from autopar.plan_document import Plan
from autopar.program import Program, TensorType, outputs_of
from autopar.stage_program import BlockProgram, ParameterSpec, StageProgram, ValueSpec


@dataclass(frozen=True)
class CutStages:
    name: str = "cut-stages"

    def run(self, parts: Parts) -> Parts:
        blocks: Blocks = parts.blocks
        check_cuts(parts)
        bindings = Bindings(parts.program.symbols, parts.decided.sizes)
        specs = _parameters(parts, blocks)
        stages = []
        first = 0
        for index, planned in enumerate(parts.decided.stages):
            held = blocks.chain[first : first + len(planned.blocks)]
            stages.append(_stage(parts, blocks, bindings, specs, index, first, held))
            first += len(held)
        return parts.evolve(stages=tuple(stages))


def check_cuts(parts: Parts) -> None:
    """The plan's stages hold every block once, in order; raises `PlanError` naming the block."""
    names = [b.name for b in parts.blocks.chain]
    planned = [n for s in parts.decided.stages for n in s.blocks]
    if planned != names:
        unknown = [n for n in planned if n not in names]
        missing = [n for n in names if n not in planned]
        what = f"unknown block {unknown[0]!r}" if unknown else ""
        what = what or (
            f"block {missing[0]!r} is in no stage" if missing else "blocks are out of order"
        )
        raise PlanError(
            f"stage cuts do not fit the model: {what}",
            next_step=f"the blocks are, in order, {names[:3]} … {names[-2:]}",
        )
    for index, stage in enumerate(parts.decided.stages):
        if not stage.blocks:
            raise PlanError(f"stage {index} is empty", next_step="give every stage a block")
        wrong = [n for n in stage.recompute if n not in stage.blocks]
        if wrong:
            raise PlanError(
                f"stage {index} recomputes {wrong[0]!r}, which it does not hold",
                next_step="recompute only blocks of the same stage",
            )


def _parameters(parts: Parts, blocks: Blocks) -> dict[str, ParameterSpec]:
    """Every parameter of the graph: global shape, placement on tp, the stages that hold it."""
    stage_of = {n: i for i, s in enumerate(parts.decided.stages) for n in s.blocks}
    items = {i.name: i for i in parts.program.inputs}
    nodes = {n.name: n for n in parts.program.graph.find_nodes(op="placeholder")}
    specs: dict[str, ParameterSpec] = {}
    readers = Counter(name for block in blocks.chain for name in dict.fromkeys(block.parameters))
    for block in blocks.chain:
        graph = parts.graphs[block.kind]
        placeholders = graph.graph.find_nodes(op="placeholder")
        pairs = list(zip(block.parameters, placeholders, strict=False))
        shared = {local for name, local in pairs if readers[name] > 1}
        roomy = set(spare_holders(graph, shared)) if parts.decided.spare_experts else set()
        for name, local in pairs:
            fqn, value = items[name].target, nodes[name].meta["val"]
            placement: Placement = local.meta["placement"]
            before = specs.get(fqn)
            over_ep = bool(local.meta.get(EP))
            if before is not None and (before.placement, before.over_ep) != (placement, over_ep):
                raise PlanError(
                    f"parameter {fqn!r} is shared by blocks that place it differently: "
                    f"{before.placement} and {placement} (block {block.name!r})",
                    next_step="give both the same placement in the plan",
                )
            stages = sorted({*(before.stages if before else ()), stage_of[block.name]})
            _refuse_two_copies(fqn, stages, parts.decided)
            specs[fqn] = ParameterSpec(
                fqn,
                tuple(value.shape),
                value.dtype,
                placement,
                bool(nodes[name].meta.get("requires_grad")),
                tuple(stages),
                over_ep,
                parts.decided.spare_experts if local in roomy else 0,
            )
    return specs


def _refuse_two_copies(fqn: str, stages: list[int], plan: Plan) -> None:
    """Every stage has its own copy of a tied parameter."""
    on = [plan.pp_rank(stage) for stage in stages]
    if len(set(on)) < len(on):
        raise PlanError(
            f"parameter {fqn!r} is tied over stages {stages}, two of which are on one of "
            f"{plan.mesh.pp} pp ranks",
            next_step="move the cuts so that its blocks are on different pp ranks or in one stage",
        )


def _stage(
    parts: Parts,
    blocks: Blocks,
    bindings: Bindings,
    specs: dict[str, ParameterSpec],
    index: int,
    first: int,
    held: list[Block],
) -> StageProgram:
    program, plan = parts.program, parts.decided
    count = len(plan.stages)
    items = {i.name: i for i in program.inputs}
    made = [
        BlockProgram(
            name=b.name,
            graph=parts.graphs[b.kind],
            parameters=tuple(items[n].target for n in b.parameters),
            buffers=tuple(items[n].target for n in b.buffers if items[n].kind == "buffer"),
            inputs=tuple(n.name for n in b.reads),
            outputs=tuple(n.name for n in b.writes),
            over_ep=frozenset(t for n in b.parameters if specs[t := items[n].target].over_ep),
            spare={t: n for p in b.parameters if (n := specs[t := items[p].target].spare)},
        )
        for b in held
    ]
    owned = {n for b in blocks.chain for n in b.nodes}
    wanted = list(dict.fromkeys(n for b in held for n in b.reads if n not in owned))
    shared = cut_free(program, blocks, wanted, bindings) if wanted else None
    _refuse_empty(index, count, made)
    reads = _placeholders(shared)
    last = index == count - 1
    specifications = _batch(program.of_kind("input"), program.graph, bindings)
    updates = _updates(program, held)
    read = [n for b in made for n in b.buffers] + _targets(reads, items, "buffer")
    return StageProgram(
        index=index,
        stages=count,
        blocks=made,
        parameters={n: specs[n] for b in made for n in b.parameters},
        buffers=tuple(dict.fromkeys([*read, *updates])),
        receive=_values(blocks.crossing(first - 1), plan, bindings) if index else (),
        send=() if last else _values(blocks.crossing(first + len(held) - 1), plan, bindings),
        shared=shared,
        shared_buffers=tuple(_targets(reads, items, "buffer")),
        shared_inputs=tuple(_targets(reads, items, "input")),
        shared_outputs=tuple(n.name for n in wanted),
        count=parts.count if last else None,
        count_inputs=tuple(_placeholders(parts.count)) if last else (),
        loss=program.loss if last else None,
        batch_inputs=specifications,
        draws=any_draws([*(b.graph for b in made), shared]),
        sums=last and loss_form(program).kind == "sum",
        even=loss_form(program).even,
        updates=updates,
        fixed=dict(program.fixed),
        whole_inputs=frozenset(i.name for i in program.of_kind("input") if i.batch_dim < 0),
    )


def _updates(program: Program, held: list[Block]) -> dict[str, str]:
    """The buffers whose new values these blocks make."""
    made = {n.name for b in held for n in b.writes}
    values = outputs_of(program.graph)[1:]
    return {t: n.name for t, n in zip(program.updates, values, strict=True) if n.name in made}


def _refuse_empty(index: int, count: int, made: list[BlockProgram]) -> None:
    """The pipeline engine needs a parameter on every stage."""
    if count > 1 and not any(b.parameters for b in made):
        raise PlanError(
            f"stage {index} ({made[0].name} to {made[-1].name}) holds no parameter",
            next_step="move the cut so that every stage has one, or pin a smaller pp",
        )


def _placeholders(graph: fx.GraphModule | None) -> list[str]:
    return [n.name for n in graph.graph.find_nodes(op="placeholder")] if graph is not None else []


def _targets(names: list[str], items: dict, kind: str) -> list[str]:  # type: ignore[type-arg]
    return [items[n].target for n in names if items[n].kind == kind]


def _values(nodes: list[fx.Node], plan: Plan, bindings: Bindings) -> tuple[ValueSpec, ...]:
    found = []
    for node in nodes:
        kind: TensorType = types_of(node, bindings)[0]
        placement = Placement.parse(plan.boundary) if kind.requires_grad else Replicate
        own = BOUNDARY if kind.requires_grad else Replicate
        shape = own.local_shape(kind.shape, plan.mesh.cp) if plan.mesh.cp > 1 else kind.shape
        shape = placement.local_shape(shape, plan.mesh.tp)
        found.append(ValueSpec(node.name, shape, kind.dtype, kind.requires_grad, placement))
    alone = [v.name for v in found if not v.requires_grad]
    if alone and len(alone) < len(found):
        raise PlanError(
            f"{alone[0]!r}, a value without gradient, passes from stage to stage beside values "
            "that have one: the pipeline can't send both",
            next_step="pin pp=1, or compute it in the block that reads it",
        )
    return tuple(found)


def _batch(inputs, graph: fx.Graph, bindings: Bindings) -> dict[str, ValueSpec]:  # type: ignore[no-untyped-def]
    nodes = {n.name: n for n in graph.find_nodes(op="placeholder")}
    found = {}
    for item in inputs:
        kinds = types_of(nodes[item.name], bindings)
        if kinds:
            found[item.name] = ValueSpec(item.name, kinds[0].shape, kinds[0].dtype)
    return found
