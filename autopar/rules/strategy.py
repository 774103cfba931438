"""From a rule to every legal strategy of an op on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.op_call import OpCall
from autopar.placement import Partial, Placement, Replicate, ReplicatePartialGrad, Shard
from autopar.rules.language import Dims, Rule


@dataclass(frozen=True, slots=True)
class Strategy:
    """What each operand must be and what all results then are.

    `name` is the text a plan holds: `replicate`, `replicate*` (gradients stay terms of a sum),
    `shard F` (factor F), `shard F,G` (each tensor by the one it has) or `partial I` (operands I are
    terms of a sum, and so is the result).
    `share`: the part of the op's FLOPs that one rank does. `local_op`: the `autopar` op that takes
    the place of the original on shards, if the original would be wrong there. `divided`: names of
    the integer arguments that a rank gets divided by the number of ranks.
    """

    name: str
    operands: tuple[Placement, ...]
    result: Placement
    share: float = 1.0
    local_op: str = ""
    divided: tuple[str, ...] = ()


def strategies(op: OpCall, rule: Rule | None, ranks: int) -> list[Strategy]:
    """All legal strategies over `ranks` ranks, plain replication first, in a fixed order."""
    grads = tuple(t.requires_grad for t in op.types)
    result_grad = any(t.requires_grad for t in op.results)
    whole = tuple(Replicate for _ in op.types)
    found = [Strategy("replicate", whole, Replicate)]
    if rule is None or ranks == 1 or len({r for r in rule.results}) > 1:
        return found
    if op.writes_in_place or (rule.random and len(rule.results) > 1):
        # A write into a shard would not reach the value that it was cut from; and around a random
        # op on shards stands a mark on its one result.
        return found
    if any(grads) and result_grad:
        found.append(Strategy("replicate*", tuple(_whole(g) for g in grads), ReplicatePartialGrad))
    for factor in rule.sizes:
        strategy = _shard(rule, factor, grads, result_grad, ranks)
        if strategy is not None:
            found.append(strategy)
    for pair, local_op in rule.together.items():
        strategy = _shard_together(rule, pair, local_op, grads, ranks)
        if strategy is not None:
            found.append(strategy)
    for operands in rule.linear:
        if result_grad and all(grads[i] for i in operands):
            placements = tuple(Partial if i in operands else _whole(g) for i, g in enumerate(grads))
            name = "partial " + ",".join(str(i) for i in sorted(operands))
            found.append(Strategy(name, placements, Partial))
    return found


def _whole(grad: bool) -> Placement:
    return ReplicatePartialGrad if grad else Replicate


def _shard(
    rule: Rule, factor: str, grads: tuple[bool, ...], result_grad: bool, ranks: int
) -> Strategy | None:
    size = rule.sizes[factor]
    if factor in rule.whole or factor in rule.fixed or size < ranks or size % ranks:
        return None
    tensors = (*rule.operands, *rule.results)
    positions = [_position(dims, factor) for dims in tensors]
    if any(p == _MINOR for p in positions) or not rule.operands:
        return None
    result_at = positions[len(grads)]
    contracted = result_at is None
    if contracted and rule.random:
        return None
    operands: list[Placement] = []
    for index, (at, grad) in enumerate(zip(positions[: len(grads)], grads, strict=True)):
        if at is not None:
            operands.append(Shard(at))
        elif contracted and index in rule.additive:
            operands.append(Partial)
        else:
            operands.append(_whole(grad))
    if factor in rule.outcomes:
        result = rule.outcomes[factor]
    elif contracted:
        if not result_grad:
            return None
        result = Partial
    else:
        result = Shard(result_at) if result_at is not None else Partial
    return Strategy(
        f"shard {factor}",
        tuple(operands),
        result,
        1.0 / ranks,
        rule.local_ops.get(factor, ""),
        rule.divided.get(factor, ()),
    )


def _shard_together(
    rule: Rule, pair: tuple[str, str], local_op: str, grads: tuple[bool, ...], ranks: int
) -> Strategy | None:
    """Every tensor sharded by the one of two factors that it has."""
    for factor in pair:
        size = rule.sizes[factor]
        if factor in rule.whole | rule.fixed or size < ranks or size % ranks:
            return None
    placements: list[Placement] = []
    for dims in (*rule.operands, *rule.results):
        at = [p for p in (_position(dims, factor) for factor in pair) if p is not None]
        if len(at) != 1 or at[0] == _MINOR:
            return None
        placements.append(Shard(at[0]))
    name = f"shard {','.join(pair)}"
    operands = tuple(placements[: len(grads)])
    return Strategy(name, operands, placements[len(grads)], 1.0 / ranks, local_op)


_MINOR = -2


def _position(dims: Dims, factor: str) -> int | None:
    """The dim whose major factor it is; `_MINOR` where it occurs otherwise, None where absent."""
    found: int | None = None
    for index, dim in enumerate(dims):
        if factor in dim:
            if dim[0] != factor or found is not None:
                return _MINOR
            found = index
    return found
