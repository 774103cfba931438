"""The placement problem of a block: what each strategy, reshard and saved value costs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.axis import Axis
from autopar.cost.collective import collective_time
from autopar.cost.op_cost import is_view
from autopar.experts import EXPERTS
from autopar.op_call import STATIC, OpCall, types_of
from autopar.parts import Slot
from autopar.passes.analysis.beside_exchange import Hiding
from autopar.passes.analysis.blocks import local_op_names
from autopar.passes.analysis.candidates import Candidates, local_type
from autopar.passes.analysis.expert_moves import NOTHING, exposed_moves, hidings
from autopar.passes.analysis.saved_tensors import Saved, saved_by
from autopar.passes.analysis.sequence_moves import sequence_moves
from autopar.placement import Placement, Replicate, ReplicatePartialGrad, Shard
from autopar.placement_problem import Choice, OpNode, Problem
from autopar.program import TensorType, outputs_of
from autopar.reshard import reshard

_ONCE_A_STEP = 1e-6


def build_problem(
    parts: Sequence[tuple[str, fx.GraphModule, tuple[Slot, ...], Candidates]],
    axis: Axis,
    boundary: Placement,
    state_bytes: float,
    *,
    split_weights: bool = False,
    replicas: bool = False,
) -> Problem:
    """One problem for blocks that share parameters (usually a single block).

    `parts`: prefix, graph, slots and candidates of each block. `state_bytes`: bytes of parameter,
    gradient and optimizer state per byte of parameter. Values with gradient cross blocks in
    `boundary`.
    `split_weights`: parameters of two and more dims are stored split over the axis where a dim
    divides. `replicas`: the ranks of the axis are replicas, so parameters are whole and their
    gradients terms of a sum (cp).
    Every rank doing the same matrix product is no way to use an axis: where a product can be
    split at all, its replicating strategies are left out.
    """
    problem, moves = Problem(replicas=replicas), _Moves(axis)
    for prefix, graph, slots, found in parts:
        names = source_names(prefix, graph, slots)
        hidden = hidings(graph, found, axis.cluster.device)
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
                behind = hidden.get(node.name, NOTHING)
                _add_op(problem, names, types, node.name, found, moves, behind)
        for node in outputs_of(graph.graph):
            if names[node.name] in types:
                kind = types[names[node.name]]
                target = boundary if kind.requires_grad and kind.shape else Replicate
                problem.sinks[names[node.name]] = target
                _add_moves(problem, names[node.name], kind, target, moves, fixed=False)
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
    if slot.kind == "parameter" and problem.replicas:
        options = [ReplicatePartialGrad if kind.requires_grad else Replicate]
        problem.stored[name] = 0.0
    elif slot.kind == "parameter":
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
        problem.sizes[name][placement] = local_type(kind, placement, ranks).nbytes


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
    had one micro-batch (the step model spreads it; here the number is not known yet). A little
    less, as summing in every micro-batch costs the same otherwise and must not win the tie."""
    if not placement.gradient_is_partial:
        return 0.0
    seconds = collective_time("all_reduce", kind.nbytes, axis.ranks, axis.stride, axis.cluster)
    return (1 - _ONCE_A_STEP) * seconds


def _add_op(
    problem: Problem,
    names: dict[str, str],
    types: dict[str, TensorType],
    node: str,
    found: Candidates,
    moves: _Moves,
    behind: Hiding,
) -> None:
    axis = moves.axis
    call = found.calls[node]
    name = names[node]
    if call.results:
        types[name] = call.results[0]
    saved = saved_by(call)
    choices = []
    for strategy, local, price in found.prices(node, axis.cluster.device):
        exchange = sum(exposed_moves(local, axis, behind))
        if move := sequence_moves(local, axis):
            exchange = move[1] + move[2]
        choices.append(
            Choice(
                strategy.name,
                strategy.operands,
                strategy.result,
                price.forward_seconds + price.backward_seconds + exchange,
                _own_bytes(saved, call, local),
            )
        )
    reads = tuple(names[o] for o in call.operands)
    problem.add(OpNode(name, reads, choices, saved.operands, saved.result))
    for choice in choices:
        total = sum(local_type(t, choice.result, axis.ranks).nbytes for t in call.results)
        problem.sizes[name][choice.result] = total
    if is_view(call) and reads:
        problem.roots[name] = problem.roots.get(reads[0], reads[0])
    tupled = call.op_name == "getitem"
    for position, value in enumerate(reads):
        kind = call.types[position]
        for target in {c.operands[position]: None for c in choices}:
            _add_moves(problem, value, kind, target, moves, fixed=tupled)


def _own_bytes(saved: Saved, call: OpCall, local: OpCall) -> float:
    """Bytes of further memory that one rank keeps."""
    if call.op_name in EXPERTS:
        # Rows of tokens and choices, which are neither operands nor results.
        return saved_by(local).extra_bytes
    return saved.extra_bytes * _share(call, local)


def _share(call: OpCall, local: OpCall) -> float:
    """Part of an op's own saved memory that a rank holds: that of its largest tensor."""
    whole = max((t.numel for t in (*call.types, *call.results)), default=1)
    part = max((t.numel for t in (*local.types, *local.results)), default=1)
    return part / max(whole, 1)


class _Moves:
    """`move_seconds` on one axis; blocks have many values of few types, so each is asked once."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._known: dict[tuple[Placement, Placement, TensorType], float | None] = {}

    def seconds(self, source: Placement, target: Placement, kind: TensorType) -> float | None:
        key = (source, target, kind)
        if key not in self._known:
            self._known[key] = move_seconds(source, target, kind, self.axis)
        return self._known[key]


def _add_moves(
    problem: Problem,
    value: str,
    kind: TensorType,
    target: Placement,
    moves: _Moves,
    *,
    fixed: bool,
) -> None:
    """All legal reshards of a value to `target`; `fixed` allows none (one result of several)."""
    sizes = problem.sizes[value]
    if target not in sizes:
        sizes[target] = local_type(kind, target, moves.axis.ranks).nbytes
    for source in problem.results(value):
        if fixed and source != target:
            continue
        if (
            problem.roots.get(value) in problem.stored
            and not problem.replicas
            and source != target
            and "S" in (source.kind, target.kind)
        ):
            continue  # A parameter is stored as it is used: gathering it is the task of ZeRO.
        seconds = moves.seconds(source, target, kind)
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
