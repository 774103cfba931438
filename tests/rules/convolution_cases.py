"""Generators of random calls of convolutions, pooling, interpolation and norms over channels."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, grad, overload, real, shape
from tests.rules.execution import Call, call

GROUPS = st.sampled_from([1, 1, 2, 4])


def convolution(space: int) -> Case:
    def make(draw: Draw) -> Call:
        groups, c, o = draw(GROUPS), draw(st.sampled_from([1, 2, 4])), draw(SIZE)
        batch = draw(st.sampled_from([[2], [4], []]))
        x = real(*batch, groups * c, *[draw(st.sampled_from([4, 5]))] * space, grad=grad(draw))
        weight = real(groups * o, c, *[draw(st.sampled_from([1, 3]))] * space, grad=grad(draw))
        bias = real(groups * o, grad=grad(draw)) if draw(st.booleans()) else None
        packet = getattr(aten, f"conv{space}d")
        if draw(st.booleans()):
            return call(packet.padding, x, weight, bias, [1] * space, "same", [1] * space, groups)
        stride = [draw(st.sampled_from([1, 2]))] * space
        return call(packet.default, x, weight, bias, stride, [1] * space, groups=groups)

    return make


def transposed(space: int) -> Case:
    def make(draw: Draw) -> Call:
        groups, c, o = draw(GROUPS), draw(st.sampled_from([1, 2, 4])), draw(SIZE)
        batch = draw(st.sampled_from([[2], [4], []]))
        x = real(*batch, groups * c, *[3] * space, grad=grad(draw))
        weight = real(groups * c, o, *[2] * space, grad=grad(draw))
        bias = real(groups * o, grad=grad(draw)) if draw(st.booleans()) else None
        packet = getattr(aten, f"conv_transpose{space}d")
        target = getattr(packet, "default" if space == 1 else "input")
        return call(target, x, weight, bias, [2] * space, [0] * space, [1] * space, groups)

    return make


def im2col(draw: Draw) -> Call:
    batch = draw(st.sampled_from([[2], []]))
    x = real(*batch, draw(SIZE), 4, 5)
    return call(aten.im2col.default, x, [2, 2], [1, 1], [1, 0], [1, 2])


def col2im(draw: Draw) -> Call:
    batch = draw(st.sampled_from([[4], []]))
    x = real(*batch, draw(SIZE) * 4, 12)
    return call(aten.col2im.default, x, [4, 5], [2, 2], [1, 1], [0, 0], [1, 1])


def pooled(name: str, *arguments: Any, kind: str = "default") -> Case:
    """Batch, channels and as many dims of space as the name says."""
    space = int(next(c for c in name if c.isdigit()))
    unbatched = "pool" in name

    def make(draw: Draw) -> Call:
        lead = [draw(SIZE), draw(EVEN)]
        lead = lead[draw(st.integers(0, 1)) if unbatched else 0 :]
        return call(overload(name, kind), real(*lead, *[8] * space), *arguments)

    return make


def shuffled(name: str) -> Case:
    def make(draw: Draw) -> Call:
        lead = shape(draw, 0, 1)
        r = draw(st.sampled_from([1, 2]))
        c, h, w = draw(SIZE), draw(SIZE), draw(SIZE)
        sizes = (c * r * r, h, w) if name == "pixel_shuffle" else (c, h * r, w * r)
        return call(overload(name), real(*lead, *sizes), r)

    return make


def grid_sampler(draw: Draw) -> Call:
    b, c = draw(SIZE), draw(SIZE)
    grid = real(b, draw(SIZE), draw(SIZE), 2, low=-0.9, high=0.9, grad=grad(draw))
    return call(aten.grid_sampler.default, real(b, c, 3, 3, grad=grad(draw)), grid, 0, 0, False)


def affine(draw: Draw) -> Call:
    b = draw(SIZE)
    return call(aten.affine_grid_generator.default, real(b, 2, 3), [b, 1, 4, 4], False)


def group_norm(draw: Draw) -> Call:
    groups, c = draw(SIZE), draw(st.sampled_from([1, 2, 4]))
    x = real(draw(SIZE), groups * c, *shape(draw, 1, 2), 3, grad=grad(draw))
    affine = [real(groups * c, grad=grad(draw)), real(groups * c)][: draw(st.integers(0, 2))]
    return call(aten.group_norm.default, x, groups, *affine)


def batch_norm(draw: Draw) -> Call:
    b, c = draw(EVEN), draw(SIZE)
    x = real(b, c, *shape(draw, 0, 2), grad=grad(draw))
    affine = [real(c, grad=grad(draw)), real(c)] if draw(st.booleans()) else [None, None]
    training, tracked = draw(st.booleans()), draw(st.booleans())
    stats = [None, None]
    if tracked or not training:
        stats = [real(c, grad=False), real(c, grad=False, low=0.5)]
    return call(aten.batch_norm.default, x, *affine, *stats, training, 0.1, 1e-5, False)


def instance_norm(draw: Draw) -> Call:
    b, c = draw(SIZE), draw(SIZE)
    x = real(b, c, 3, *shape(draw, 0, 1), grad=grad(draw))
    affine = [real(c, grad=grad(draw)), real(c)] if draw(st.booleans()) else [None, None]
    own, tracked = draw(st.booleans()), draw(st.booleans())
    stats = [None, None]
    if tracked or not own:
        stats = [real(c, grad=False), real(c, grad=False, low=0.5)]
    return call(aten.instance_norm.default, x, *affine, *stats, own, 0.1, 1e-5, False)


def weight_norm(draw: Draw) -> Call:
    sizes = shape(draw, 2)
    dim = draw(st.integers(-1, len(sizes) - 1))
    scale = [s if i == dim else 1 for i, s in enumerate(sizes)] if dim >= 0 else []
    return call(aten._weight_norm.default, real(*sizes, grad=grad(draw)), real(*scale), dim)


CONVOLUTION: dict[str, Case] = {
    **{f"conv{n}d": convolution(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": transposed(n) for n in (1, 2, 3)},
    "im2col": im2col,
    "col2im": col2im,
    **{f"max_pool{n}d": pooled(f"max_pool{n}d", [2] * n) for n in (1, 2, 3)},
    **{
        f"max_pool{n}d_with_indices": pooled(f"max_pool{n}d_with_indices", [2] * n)
        for n in (1, 2, 3)
    },
    **{f"avg_pool{n}d": pooled(f"avg_pool{n}d", [2] * n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": pooled(f"adaptive_avg_pool{n}d", [3] * n) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": pooled(f"adaptive_max_pool{n}d", [3] * n) for n in (1, 2, 3)},
    **{
        f"{kind}{n}d": pooled(f"{kind}{n}d", [5] * n, None, kind="vec")
        for n in (1, 2, 3)
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
    },
    **{
        name: pooled(name, None, False, [2.0] * n, kind="vec")
        for name, n in (
            ("upsample_linear1d", 1),
            ("upsample_bilinear2d", 2),
            ("upsample_bicubic2d", 2),
            ("upsample_trilinear3d", 3),
            ("_upsample_bilinear2d_aa", 2),
            ("_upsample_bicubic2d_aa", 2),
        )
    },
    "pixel_shuffle": shuffled("pixel_shuffle"),
    "pixel_unshuffle": shuffled("pixel_unshuffle"),
    "channel_shuffle": lambda draw: call(
        aten.channel_shuffle.default, real(draw(SIZE), 2 * draw(SIZE), 2, draw(SIZE)), 2
    ),
    "grid_sampler": grid_sampler,
    "affine_grid_generator": affine,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "_weight_norm": weight_norm,
}
