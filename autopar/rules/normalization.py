"""Norms: what is averaged over stays whole, the rest is free."""

from __future__ import annotations

from autopar.op_call import OpCall, Operand
from autopar.rules.dims import describe, free, named, positive, shape_of, with_whole
from autopar.rules.language import Dims, NoRuleError, Rule

_STATISTICS = ("weight", "bias", "running_mean", "running_var")


def last_dims(op: OpCall) -> Rule:
    """layer_norm and rms_norm: x[..., d], weight[d], bias[d]; d must be whole."""
    normalized = len(op.named("normalized_shape"))
    shape = shape_of(op, "input")
    dims = named(shape)
    affine = dims[len(shape) - normalized :]
    whole = [d[0] for d in affine]
    return describe(op, {"input": dims, "weight": affine, "bias": affine}, dims, whole=whole)


def group_norm(op: OpCall) -> Rule:
    """x[b, (g c), ...], weight[(g c)], bias[(g c)]: groups are independent of each other."""
    shape = shape_of(op, "input")
    groups = int(op.named("num_groups"))
    channels = ("g", "c")
    dims: Dims = (("b",), channels, *_spatial(shape))
    return describe(
        op,
        {"input": dims, "weight": (channels,), "bias": (channels,)},
        dims,
        sizes={"g": groups, "c": shape[1] // groups},
        whole=["c"],
        divided={"g": ("num_groups",)},
    )


def batch_norm(op: OpCall) -> Rule:
    """x[b, c, ...]: with the batch's statistics all of a channel together, else everything is free.

    Running statistics are moved in place: a rank's slice of them would not reach the original.
    """
    shape = shape_of(op, "input")
    if not op.named("training"):
        return _channels(op, free("b", "c") + named(shape[2:], "s"), ())
    return _channels(op, (("_b",), ("c",), *_spatial(shape)), _kept_statistics(op))


def instance_norm(op: OpCall) -> Rule:
    """x[b, c, ...]: every channel of every sample by itself."""
    shape = shape_of(op, "input")
    if not op.named("use_input_stats"):
        return _channels(op, free("b", "c") + named(shape[2:], "s"), ())
    # The running statistics are the mean over the batch.
    kept = _kept_statistics(op)
    return _channels(op, (("b",), ("c",), *_spatial(shape)), ("b", *kept) if kept else ())


def weight_norm(op: OpCall) -> Rule:
    """`_weight_norm(v, g, dim)`: the slices of `dim` are scaled each by its own norm."""
    shape = shape_of(op, "v")
    dim = int(op.named("dim"))
    if dim == -1:
        raise NoRuleError("a norm over the whole weight", next_step="it is replicated")
    at = positive(dim, len(shape))
    dims = with_whole(len(shape), set(range(len(shape))) - {at})
    scale = tuple(d if i == at else () for i, d in enumerate(dims))
    return describe(op, {"v": dims, "g": scale}, dims)


def _spatial(shape: tuple[int, ...]) -> Dims:
    return tuple((f"_s{i}",) for i in range(len(shape) - 2))


def _kept_statistics(op: OpCall) -> tuple[str, ...]:
    return ("c",) if isinstance(op.named("running_mean"), Operand) else ()


def _channels(op: OpCall, dims: Dims, whole: tuple[str, ...]) -> Rule:
    operands = {"input": dims} | {name: (("c",),) for name in _STATISTICS}
    return describe(op, operands, dims, whole=whole)
