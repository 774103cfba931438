"""Convolutions: batch, groups, output and input channels are factors, space is whole."""

from __future__ import annotations

from math import prod

from autopar.op_call import OpCall
from autopar.rules.dims import describe, shape_of
from autopar.rules.language import Dim, Dims, Rule


def convolution(op: OpCall) -> Rule:
    """x[b, (g c), ...], weight[(g o), c, ...], bias[(g o)] -> [b, (g o), ...]

    FLOPs as torch's counter has them: each result takes c products for each place of the kernel.
    """
    weight = shape_of(op, "weight")
    groups = int(op.named("groups"))
    flops = 2.0 * op.result.numel * prod(weight[1:])
    sizes = {"g": groups, "c": weight[1], "o": weight[0] // groups}
    outer: Dim = ("g", "o") if groups > 1 else ("o",)
    return _rule(op, (outer, ("c",)), sizes, flops)


def transposed(op: OpCall) -> Rule:
    """x[b, (g c), ...], weight[(g c), o, ...], bias[(g o)] -> [b, (g o), ...]

    Every element of x goes to o channels at each place of the kernel.
    """
    weight = shape_of(op, "weight")
    groups = int(op.named("groups"))
    flops = 2.0 * prod(shape_of(op, "input")) * prod(weight[1:])
    sizes = {"g": groups, "c": weight[0] // groups, "o": weight[1]}
    inner: Dim = ("g", "c") if groups > 1 else ("c",)
    return _rule(op, (inner, ("o",)), sizes, flops)


def _rule(op: OpCall, channels: tuple[Dim, Dim], sizes: dict[str, int], flops: float) -> Rule:
    """A group works on its own channels: with some of the groups, `groups` is their number."""
    x, weight = shape_of(op, "input"), shape_of(op, "weight")
    space = len(weight) - 2
    grouped = sizes["g"] > 1
    batch: Dims = (("b",),) if len(x) == space + 2 else ()
    inner: Dim = ("g", "c") if grouped else ("c",)
    outer: Dim = ("g", "o") if grouped else ("o",)

    def spatial(prefix: str) -> Dims:
        return tuple((f"_{prefix}{i}",) for i in range(space))

    return describe(
        op,
        {
            "input": (*batch, inner, *spatial("x")),
            "weight": (*channels, *spatial("k")),
            "bias": (outer,),
        },
        (*batch, outer, *spatial("y")),
        sizes=sizes,
        linear=[["input", "bias"], ["weight", "bias"]],
        additive=["bias"],
        divided={"g": ("groups",)},
        flops=flops,
    )


def patches(op: OpCall) -> Rule:
    """im2col: x[b, c, h, w] -> [b, (c k), l]; channels are independent, patches overlap."""
    x = shape_of(op, "self")
    batch: Dims = (("b",),) if len(x) == 4 else ()
    kernel = prod(int(k) for k in op.named("kernel_size"))
    return describe(
        op,
        {"self": (*batch, ("c",), ("_h",), ("_w",))},
        (*batch, ("c", "k"), ("_l",)),
        sizes={"c": x[-3], "k": kernel},
        linear=[["self"]],
    )


def from_patches(op: OpCall) -> Rule:
    """col2im: x[b, (c k), l] -> [b, c, h, w], the sum of overlapping patches."""
    x = shape_of(op, "self")
    batch: Dims = (("b",),) if len(x) == 3 else ()
    kernel = prod(int(k) for k in op.named("kernel_size"))
    return describe(
        op,
        {"self": (*batch, ("c", "k"), ("_l",))},
        (*batch, ("c",), ("_h",), ("_w",)),
        sizes={"c": x[-2] // kernel, "k": kernel},
        whole=["k"],
        linear=[["self"]],
    )
