"""Run an op on simulated ranks as a strategy says, and compare value and gradients with the whole
op.

Everything is in one process: a value on n ranks is a list of n tensors. What the placements
promise is applied by hand, independently of the rewrites and of torch.distributed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.op_call import OpCall, Operand
from autopar.placement import Placement
from autopar.program import TensorType
from autopar.rules import rule_for
from autopar.rules.strategy import Strategy, strategies

Tensor = torch.Tensor
SHAPE_ARGUMENT = {"view", "reshape", "_unsafe_view", "expand", "broadcast_to"}


@dataclass(frozen=True)
class Call:
    """An op with real operands: `args` and `kwargs` hold the tensors themselves."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(target, args, kwargs)


def as_list(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]


def substitute(value: Any, of: Callable[[Any], Any]) -> Any:
    """Apply `of` to every leaf of nested lists and tuples."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(substitute(v, of) for v in value)
    return of(value)


def op_call_of(made: Call) -> tuple[OpCall, list[Tensor]]:
    """The `OpCall` that the rules see, and the operands in its order."""
    operands: list[Tensor] = []

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for index, known in enumerate(operands):
            if known is leaf:
                return Operand(index)
        operands.append(leaf)
        return Operand(len(operands) - 1)

    args = substitute(made.args, mark)
    kwargs = {k: substitute(v, mark) for k, v in made.kwargs.items()}
    with torch.enable_grad():
        results = as_list(run(made.target, args, kwargs, operands))
    found = OpCall(
        "op",
        made.target,
        args,
        kwargs,
        tuple(f"x{i}" for i in range(len(operands))),
        tuple(_type(t) for t in operands),
        tuple(_type(t) for t in results),
    )
    if made.target is operator.getitem:
        # As `op_call` does: the operand of a getitem is the member that it takes.
        member = made.args[0][made.args[1]]
        found = OpCall(
            "op",
            made.target,
            (Operand(0), made.args[1]),
            {},
            ("x0",),
            (_type(member),),
            (_type(member),),
        )
        return found, [member]
    return found, operands


def _type(t: Tensor) -> TensorType:
    return TensorType(tuple(t.shape), t.dtype, t.requires_grad)


def run(target: Any, args: Any, kwargs: Any, operands: list[Tensor], random_seed: int = 1) -> Any:
    """The op itself, on operands in the places that `Operand`s mark."""

    def fill(leaf: Any) -> Any:
        return operands[leaf.index] if isinstance(leaf, Operand) else leaf

    if target is operator.getitem and isinstance(args[0], Operand):
        return operands[0]
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.is_mutable:
        # A leaf can't be written into, and the caller's values stay.
        operands = [t.clone() for t in operands]
    filled = substitute(args, fill), {k: substitute(v, fill) for k, v in kwargs.items()}
    state = torch.default_generator.get_state()
    # Every rank draws the same numbers, as replication asks for.
    torch.default_generator.manual_seed(random_seed)
    result = target(*filled[0], **filled[1])
    torch.default_generator.set_state(state)
    # Memory that nobody wrote has no value to compare.
    return torch.zeros_like(result) if "empty" in target.__name__ else result


def pieces(value: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """What each rank holds of a value."""
    if placement.is_shard:
        return [c.contiguous() for c in value.chunk(ranks, placement.dim)]
    return terms(value, ranks) if placement.kind == "P" else [value] * ranks


def gradient_pieces(gradient: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """The gradient each rank gets for a value in this placement."""
    if placement.is_shard:
        return list(gradient.chunk(ranks, placement.dim))
    return terms(gradient, ranks) if placement.gradient_is_partial else [gradient] * ranks


def terms(value: Tensor, ranks: int) -> list[Tensor]:
    """Random tensors that sum to `value`."""
    found = [torch.randn_like(value) for _ in range(ranks - 1)]
    return [*found, value - sum(found)] if found else [value]


def check_pieces(
    what: str, got: list[Tensor], placement: Placement, whole: Tensor, *, gradient: bool
) -> None:
    """The ranks' tensors are `whole` in the form of the placement."""
    partial = placement.gradient_is_partial if gradient else placement.kind == "P"
    if placement.is_shard:
        together = [torch.cat(got, placement.dim)]
    elif partial:
        together = [sum(got[1:], got[0])]
    else:
        together = got
    for tensor in together:
        torch.testing.assert_close(
            tensor, whole, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def check_strategy(op: OpCall, operands: list[Tensor], strategy: Strategy, ranks: int) -> None:
    """Value and every gradient under a strategy equal those of the whole op."""
    what = f"{op.op_name} {[t.shape for t in op.types]} {op.args} {strategy} on {ranks} ranks"
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in operands]
    whole = as_list(run(op.target, op.args, op.kwargs, leaves))
    local = [
        [piece.detach().requires_grad_(t.requires_grad) for piece in pieces(t.detach(), p, ranks)]
        for t, p in zip(operands, strategy.operands, strict=True)
    ]
    per_rank = [[values[r] for values in local] for r in range(ranks)]
    results = run_local(op, per_rank, strategy, ranks)
    for index, value in enumerate(whole):
        got = [r[index].detach() for r in results]
        check_pieces(
            f"{what}, result {index}", got, strategy.result, value.detach(), gradient=False
        )
    differentiable = [i for i, v in enumerate(whole) if v.requires_grad]
    wanted = [i for i, t in enumerate(operands) if t.requires_grad]
    if not differentiable or not wanted:
        return
    gradients = [torch.randn_like(whole[i]) for i in differentiable]
    split = [gradient_pieces(g, strategy.result, ranks) for g in gradients]
    expected = _gradients(
        [whole[i] for i in differentiable], [leaves[i] for i in wanted], gradients
    )
    found = [
        _gradients(
            [results[r][i] for i in differentiable],
            [local[i][r] for i in wanted],
            [s[r] for s in split],
        )
        for r in range(ranks)
    ]
    for position, operand in enumerate(wanted):
        got = [f[position] for f in found]
        check_pieces(
            f"{what}, gradient of operand {operand}",
            got,
            strategy.operands[operand],
            expected[position],
            gradient=True,
        )


def check_shapes(op: OpCall, operands: list[Tensor], strategy: Strategy, ranks: int) -> None:
    """Shards of a random op have numbers of their own: only their shapes can be compared. Without
    randomness the same rule is checked in full (a dropout of probability 0)."""
    local = [
        [piece.detach() for piece in pieces(t.detach(), p, ranks)]
        for t, p in zip(operands, strategy.operands, strict=True)
    ]
    results = run_local(op, [[v[r] for v in local] for r in range(ranks)], strategy, ranks)
    for values in results:
        shapes = [tuple(v.shape) for v in values]
        assert shapes == [strategy.result.local_shape(t.shape, ranks) for t in op.results]


def _gradients(
    results: list[Tensor], leaves: list[Tensor], gradients: list[Tensor]
) -> list[Tensor]:
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    found = (
        torch.autograd.grad(
            [r for r, _ in pairs],
            leaves,
            [g for _, g in pairs],
            allow_unused=True,
            retain_graph=True,
        )
        if pairs
        else [None] * len(leaves)
    )
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def run_local(
    op: OpCall, per_rank: list[list[Tensor]], strategy: Strategy, ranks: int
) -> list[list[Tensor]]:
    """Results of every rank; an op with a local form is computed here by a formula of its own."""
    if strategy.local_op:
        from tests.rules.expert_cases import own_experts  # it makes calls itself

        known = {**LOCAL, "own_experts": own_experts}
        return [[known[strategy.local_op](op, per_rank, rank)] for rank in range(ranks)]
    args, kwargs = list(op.args), dict(op.kwargs)
    for name in strategy.divided:
        position = [a.name for a in op.target._schema.arguments].index(name)
        if position < len(args):
            args[position] //= ranks
        else:
            kwargs[name] //= ranks
    shape = strategy.result.local_shape(op.result.shape, ranks)
    if op.op_name in SHAPE_ARGUMENT:
        args[1] = list(shape)
    if op.op_name == "unflatten":
        dim = args[1] % len(op.types[0].shape)
        args[2] = list(shape[dim : dim + len(args[2])])
    return [as_list(run(op.target, tuple(args), kwargs, values)) for values in per_rank]


def _vocab_embedding(op: OpCall, per_rank: list[list[Tensor]], rank: int) -> Tensor:
    weight, ids = per_rank[rank]
    hits = torch.nn.functional.one_hot(ids, op.types[0].shape[0]).to(weight.dtype)
    padding = op.argument(2, "padding_idx", -1)
    rows = weight.shape[0]
    mine = hits[..., rank * rows : (rank + 1) * rows]
    result = mine @ weight
    if padding >= 0:
        # The row of the padding index is read, but gets no gradient.
        kept = mine * (ids != padding).unsqueeze(-1)
        result = kept @ weight + ((mine - kept) @ weight.detach())
    return result


def _vocab_cross_entropy(op: OpCall, per_rank: list[list[Tensor]], rank: int) -> Tensor:
    target = per_rank[rank][1]
    ignore = op.argument(4, "ignore_index", -100)
    # Other ranks' logits are constants: a rank's gradient is that of its own classes.
    logits = torch.cat(
        [values[0] if r == rank else values[0].detach() for r, values in enumerate(per_rank)], 1
    )
    valid = target != ignore
    picked = logits.gather(1, torch.where(valid, target, 0).unsqueeze(1)).squeeze(1)
    smoothing = op.named("label_smoothing")
    wanted = (1 - smoothing) * picked + smoothing * logits.mean(1)
    return torch.where(valid, logits.logsumexp(1) - wanted, 0).sum() / valid.sum()


def _token_cross_entropy(op: OpCall, per_rank: list[list[Tensor]], rank: int) -> Tensor:
    ignore = op.argument(4, "ignore_index", -100)
    count = sum((values[1] != ignore).sum() for values in per_rank)
    logits, target = per_rank[rank]
    valid = target != ignore
    picked = logits.gather(1, torch.where(valid, target, 0).unsqueeze(1)).squeeze(1)
    return torch.where(valid, logits.logsumexp(1) - picked, 0).sum() / count


LOCAL = {
    "vocab_embedding": _vocab_embedding,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "token_cross_entropy": _token_cross_entropy,
}


# On real ranks alone (`test_exchanged_experts`): a rank's gradients come from others' results too.
EXCHANGING = {"exchanged_experts"}


def check_all(op: OpCall, operands: list[Tensor], seed: int = 0) -> set[str]:
    """Every strategy on 2 and 4 ranks; the names of the strategies that were run."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed records a traceback
    rule = rule_for(op)
    names = set()
    for ranks in (2, 4):
        for strategy in strategies(op, rule, ranks):
            if strategy.local_op in EXCHANGING:
                continue
            if rule is not None and rule.random and strategy.result.is_shard:
                check_shapes(op, operands, strategy, ranks)
            else:
                check_strategy(op, operands, strategy, ranks)
            names.add(strategy.name)
    return names
