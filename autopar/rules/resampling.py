"""Pooling, interpolation and their like: batch and channels are free, space is whole."""

from __future__ import annotations

import re

from autopar.op_call import OpCall
from autopar.rules.dims import describe, free, named, shape_of
from autopar.rules.language import Dims, NoRuleError, Rule

_SPACE = re.compile(r"(\d)d")
_POOLS_TEXT = """
max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
NAMES = _POOLS_TEXT.split()


def spatial(op: OpCall) -> Rule:
    """x[b, c, ...] -> [b, c, ...]; the name says how many dims are space."""
    found = _SPACE.search(op.op_name)
    if found is None:
        raise NoRuleError(f"{op.op_name} names no number of dims", next_step="it is replicated")
    name = "self" if op.named("self") is not None else "input"
    shape = shape_of(op, name)
    space = int(found.group(1))
    lead = named(shape[: len(shape) - space])

    def dims(prefix: str) -> Dims:
        return (*lead, *((f"_{prefix}{i}",) for i in range(space)))

    linear = [] if "max" in op.op_name else [[name]]
    return describe(op, {name: dims("x")}, dims("y"), linear=linear)


def pixel_shuffle(op: OpCall) -> Rule:
    """x[..., (c r1 r2), h, w] -> [..., c, (h r1), (w r2)]: all but the r are free."""
    shape = shape_of(op, "self")
    r = int(op.named("upscale_factor"))
    lead = named(shape[:-3])
    return describe(
        op,
        {"self": (*lead, ("c", "r1", "r2"), ("h",), ("w",))},
        (*lead, ("c",), ("h", "r1"), ("w", "r2")),
        sizes={"c": shape[-3] // (r * r), "r1": r, "r2": r, "h": shape[-2], "w": shape[-1]},
        whole=["r1", "r2"],
        linear=[["self"]],
    )


def pixel_unshuffle(op: OpCall) -> Rule:
    """x[..., c, (h r1), (w r2)] -> [..., (c r1 r2), h, w]"""
    shape = shape_of(op, "self")
    r = int(op.named("downscale_factor"))
    lead = named(shape[:-3])
    return describe(
        op,
        {"self": (*lead, ("c",), ("h", "r1"), ("w", "r2"))},
        (*lead, ("c", "r1", "r2"), ("h",), ("w",)),
        sizes={"c": shape[-3], "r1": r, "r2": r, "h": shape[-2] // r, "w": shape[-1] // r},
        whole=["r1", "r2"],
        linear=[["self"]],
    )


def channel_shuffle(op: OpCall) -> Rule:
    """x[b, (g c), ...] -> [b, (c g), ...]: channels are whole."""
    shape = shape_of(op, "self")
    dims: Dims = (("b",), ("_c",), *named(shape[2:]))
    return describe(op, {"self": dims}, dims, linear=[["self"]])


def grid_sampler(op: OpCall) -> Rule:
    """x[b, c, ...], grid[b, ..., n] -> [b, c, ...]: every place of the grid by itself."""
    x, grid = shape_of(op, "input"), shape_of(op, "grid")
    places = named(grid[1:-1], "p")
    space = tuple((f"_x{i}",) for i in range(len(x) - 2))
    return describe(
        op,
        {"input": (*free("b", "c"), *space), "grid": (("b",), *places, ("_n",))},
        (*free("b", "c"), *places),
    )


def affine_grid(op: OpCall) -> Rule:
    """theta[b, n, n + 1] -> [b, ..., n]; the argument `size` holds the batch."""
    space = tuple((f"_s{i}",) for i in range(len(op.result.shape) - 2))
    return describe(
        op,
        {"theta": (("b",), ("_n",), ("_m",))},
        (("b",), *space, ("_k",)),
        fixed=frozenset({"b"}),
    )
