"""Sharding candidates: every legal strategy of every op of a block, priced, as a placement
problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.collective import collective_time
from autopar.cost.op_cost import CONTRACTIONS, is_view, op_cost
from autopar.marks import REPLICATE
from autopar.op_call import STATIC, OpCall, op_call, types_of
from autopar.parts import Slot
from autopar.passes.analysis.blocks import local_op_names
from autopar.passes.analysis.saved_tensors import saved_by
from autopar.placement import Placement, Replicate, ReplicatePartialGrad, Shard
from autopar.placement_problem import Choice, OpNode, Problem
from autopar.program import TensorType, outputs_of
from autopar.reshard import reshard
from autopar.rules import rule_for
from autopar.rules.strategy import Strategy, strategies


@dataclass(frozen=True)
class Axis:
    """The mesh axis that is planned: `ranks` neighbours with `stride`, on a cluster."""

    ranks: int
    stride: int
    cluster: Cluster


@dataclass(slots=True)
class Candidates:
    """Per node of a static block graph: the call, its rule text and its strategies."""

    calls: dict[str, OpCall]
    strategies: dict[str, list[Strategy]]
    flops: dict[str, float]
    unknown: tuple[str, ...]


def candidates(graph: fx.GraphModule, ranks: int) -> Candidates:
    """Strategies of every op of a static graph; ops that no rule covers can only be replicated."""
    found = Candidates({}, {}, {}, ())
    unknown: dict[str, None] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        call = op_call(node, STATIC)
        rule = rule_for(call)
        if rule is None and call.types and call.results:
            unknown[str(call.target)] = None
        found.calls[node.name] = call
        legal = strategies(call, rule, ranks)
        if node.meta.get(REPLICATE):
            legal = [s for s in legal if s.name.startswith("replicate")]
        found.strategies[node.name] = legal
        found.flops[node.name] = rule.flops if rule else 0.0
    found.unknown = tuple(unknown)
    return found


def local_call(call: OpCall, strategy: Strategy, ranks: int) -> OpCall:
    """The call with the types a rank sees under a strategy."""
    types = tuple(_local(t, p, ranks) for t, p in zip(call.types, strategy.operands, strict=True))
    results = tuple(_local(t, strategy.result, ranks) for t in call.results)
    return replace(call, types=types, results=results)


def _local(kind: TensorType, placement: Placement, ranks: int) -> TensorType:
    return replace(kind, shape=placement.local_shape(kind.shape, ranks))


def build_problem(
    parts: list[tuple[str, fx.GraphModule, tuple[Slot, ...]]],
    axis: Axis,
    boundary: Placement,
    state_bytes: float,
    *,
    split_weights: bool = False,
) -> Problem:
    """One problem for blocks that share parameters (usually a single block).

    `parts`: prefix, graph and slots of each block. `state_bytes`: bytes of parameter, gradient
    and optimizer state per byte of parameter. Values with gradient cross blocks in `boundary`.
    `split_weights`: parameters of two and more dims are stored split over the axis where a dim
    divides.
    Every rank doing the same matrix product is no way to use an axis: where a product can be
    split at all, its replicating strategies are left out.
    """
    problem = Problem()
    for prefix, graph, slots in parts:
        found = candidates(graph, axis.ranks)
        names = source_names(prefix, graph, slots)
        types: dict[str, TensorType] = {}
        placeholders = graph.graph.find_nodes(op="placeholder")
        for node, slot in zip(placeholders, slots, strict=True):
            name = names[node.name]
            types[name] = types_of(node, STATIC)[0]
            source = f"parameter {slot.name}" if slot.kind == "parameter" else name
            _add_source(
                problem, source, types[name], slot, boundary, axis, state_bytes, split_weights
            )
            if source != name:
                _add_use(problem, name, source)
        for node in graph.graph.find_nodes(op="get_attr"):
            names[node.name] = f"{prefix}|<{node.name}"
            kind = types[names[node.name]] = types_of(node, STATIC)[0]
            slot = Slot("buffer", node.name)
            _add_source(problem, names[node.name], kind, slot, boundary, axis, state_bytes, False)
        for node in graph.graph.nodes:
            if node.op == "call_function":
                _add_op(problem, names, types, node.name, found, axis)
        for node in outputs_of(graph.graph):
            if names[node.name] in types:
                kind = types[names[node.name]]
                target = boundary if kind.requires_grad and kind.shape else Replicate
                problem.sinks[names[node.name]] = target
                _add_moves(problem, names[node.name], kind, target, axis, fixed=False)
    return problem


def source_names(prefix: str, graph: fx.GraphModule, slots: tuple[Slot, ...]) -> dict[str, str]:
    """Graph node name -> name in the problem, prefixed by the block's."""
    names = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, slot in zip(placeholders, slots, strict=True):
        # "<": an input may have the name of an op of the block.
        label = f"parameter {slot.name}" if slot.kind == "parameter" else f"<{node.name}"
        names[node.name] = f"{prefix}|{label}"
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    for node, local in zip(calls, local_op_names(calls), strict=True):
        names[node.name] = f"{prefix}|{local}"
    return names


def _add_source(
    problem: Problem,
    name: str,
    kind: TensorType,
    slot: Slot,
    boundary: Placement,
    axis: Axis,
    state_bytes: float,
    split: bool,
) -> None:
    ranks = axis.ranks
    if name in problem.sizes:
        return
    if slot.kind == "parameter":
        options = [Replicate]
        if kind.requires_grad:
            options.append(ReplicatePartialGrad)
        shards = [
            Shard(d) for d, size in enumerate(kind.shape) if size % ranks == 0 and size >= ranks > 1
        ]
        options = shards if split and shards and len(kind.shape) > 1 else [*options, *shards]
        problem.stored[name] = state_bytes if kind.requires_grad else 1.0
    else:
        options = [boundary if slot.kind == "value" and kind.requires_grad else Replicate]
    problem.add(
        OpNode(name, (), [Choice(str(p), (), p, _late_sum(p, kind, axis)) for p in options])
    )
    for placement in options:
        problem.sizes[name][placement] = _local(kind, placement, ranks).nbytes


def _add_use(problem: Problem, name: str, parameter: str) -> None:
    """A parameter as one block sees it: stored alike in all blocks, but each reshards it for
    itself."""
    options = problem.results(parameter)
    problem.add(OpNode(name, (parameter,), [Choice(str(p), (p,), p, 0.0) for p in options]))
    problem.sizes[name] = problem.sizes[parameter]
    problem.moves[parameter] = {(p, p): 0.0 for p in options}
    problem.roots[name] = parameter


def _late_sum(placement: Placement, kind: TensorType, axis: Axis) -> float:
    """Summing the gradient of an `R*` parameter over the axis: once a step, priced as if the step
    had one micro-batch (the step model spreads it; here the number is not known yet)."""
    if not placement.gradient_is_partial:
        return 0.0
    return collective_time("all_reduce", kind.nbytes, axis.ranks, axis.stride, axis.cluster)


def _add_op(
    problem: Problem,
    names: dict[str, str],
    types: dict[str, TensorType],
    node: str,
    found: Candidates,
    axis: Axis,
) -> None:
    call = found.calls[node]
    name = names[node]
    if call.results:
        types[name] = call.results[0]
    saved = saved_by(call)
    choices = []
    for strategy in searched(call, found.strategies[node]):
        local = local_call(call, strategy, axis.ranks)
        price = op_cost(local, found.flops[node] * strategy.share, axis.cluster.device)
        choices.append(
            Choice(
                strategy.name,
                strategy.operands,
                strategy.result,
                price.forward_seconds + price.backward_seconds,
                saved.extra_bytes * _share(call, local),
            )
        )
    reads = tuple(names[o] for o in call.operands)
    problem.add(OpNode(name, reads, choices, saved.operands, saved.result))
    for choice in choices:
        total = sum(_local(t, choice.result, axis.ranks).nbytes for t in call.results)
        problem.sizes[name][choice.result] = total
    if is_view(call) and reads:
        problem.roots[name] = problem.roots.get(reads[0], reads[0])
    tupled = call.op_name == "getitem"
    for position, value in enumerate(reads):
        kind = call.types[position]
        for choice in choices:
            _add_moves(problem, value, kind, choice.operands[position], axis, fixed=tupled)


def searched(call: OpCall, legal: list[Strategy]) -> list[Strategy]:
    """The strategies worth searching: a product that can be split is not replicated."""
    if call.op_name not in CONTRACTIONS:
        return legal
    return [s for s in legal if s.name.startswith("shard")] or legal


def _share(call: OpCall, local: OpCall) -> float:
    """Part of an op's own saved memory that a rank holds: that of its largest tensor."""
    whole = max((t.numel for t in (*call.types, *call.results)), default=1)
    part = max((t.numel for t in (*local.types, *local.results)), default=1)
    return part / max(whole, 1)


def _add_moves(
    problem: Problem, value: str, kind: TensorType, target: Placement, axis: Axis, *, fixed: bool
) -> None:
    """All legal reshards of a value to `target`; `fixed` allows none (one result of several)."""
    sizes = problem.sizes[value]
    if target not in sizes:
        sizes[target] = _local(kind, target, axis.ranks).nbytes
    for source in problem.results(value):
        if fixed and source != target:
            continue
        if (
            problem.roots.get(value) in problem.stored
            and source != target
            and "S" in (source.kind, target.kind)
        ):
            continue  # A parameter is stored as it is used: gathering it is the task of ZeRO.
        seconds = move_seconds(source, target, kind, axis)
        if seconds is not None:
            problem.moves[value][source, target] = seconds


def move_seconds(
    source: Placement, target: Placement, kind: TensorType, axis: Axis
) -> float | None:
    """Seconds of the collectives of an edge, forward and backward; None when it is illegal."""
    if not _divides(kind, source, axis.ranks) or not _divides(kind, target, axis.ranks):
        return None
    edge = reshard(source, target, requires_grad=kind.requires_grad)
    if edge is None:
        return None
    return sum(
        collective_time(c, kind.nbytes, axis.ranks, axis.stride, axis.cluster)
        for c in (edge.forward, edge.backward)
        if c
    )


def _divides(kind: TensorType, placement: Placement, ranks: int) -> bool:
    return not placement.is_shard or (
        placement.dim < len(kind.shape) and kind.shape[placement.dim] % ranks == 0
    )
