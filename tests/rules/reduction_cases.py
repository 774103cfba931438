"""Generators of random calls of reductions and of ops on whole rows."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call


def dims(draw: Draw, x: torch.Tensor) -> list[int]:
    return draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=2, unique=True))


def reduced(name: str) -> Case:
    """Several dims at a time, or all."""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=grad(draw))
        if name in ("sum", "mean") and draw(st.booleans()):
            return call(getattr(aten, name).default, x)
        kind = {"sum": "dim_IntList", "mean": "dim"}.get(name, "default")
        return call(overload(name, kind), x, dims(draw, x), draw(st.booleans()))

    return make


def one_reduced(name: str, *, whole: bool = True, before: tuple[Any, ...] = ()) -> Case:
    """One dim at a time; `whole`: or all. `before`: arguments before the dim."""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=name not in ("any", "all", "count_nonzero") and grad(draw))
        x = x > 0 if name in ("any", "all") else x
        if whole and draw(st.booleans()):
            return call(getattr(aten, name).default, x)
        at = draw(st.integers(-x.dim(), x.dim() - 1))
        kind = "dim_int" if name == "prod" else "dim"
        packet = getattr(aten, name)
        target = getattr(packet, kind) if kind in packet.overloads() else packet.default
        keep = [] if name == "count_nonzero" else [draw(st.booleans())]
        return call(target, x, *before, at, *keep)

    return make


def spread(name: str) -> Case:
    """var and std, in their three forms."""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw), 4, grad=grad(draw))
        packet = getattr(aten, name)
        kind = draw(st.sampled_from(["correction", "dim", "default"]))
        if kind == "default":
            return call(packet.default, x)
        at = sorted({x.dim() - 1, *dims(draw, x)})
        keep = draw(st.booleans())
        if kind == "dim":
            return call(packet.dim, x, at, True, keep)
        at = draw(st.sampled_from([at, None]))
        return call(packet.correction, x, at, correction=1, keepdim=keep)

    return make


def norm(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw), low=0.5, grad=grad(draw))
        at, keep, power = dims(draw, x), draw(st.booleans()), draw(st.sampled_from([2, 1, 3]))
        if name == "norm":
            if draw(st.booleans()):
                return call(aten.norm.Scalar, x, power)
            return call(aten.norm.ScalarOpt_dim, x, power, at, keep)
        order = None if name == "linalg_norm" else power
        return call(overload(name), x, order, draw(st.sampled_from([at, None])), keep)

    return make


def matrix_norm(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw, 3, 3), low=0.5)
        at, keep = draw(st.sampled_from([[-1, 0], [1, 2]])), draw(st.booleans())
        if name == "linalg_matrix_norm":
            return call(aten.linalg_matrix_norm.str_ord, x, "fro", at, keep)
        return call(getattr(aten, name).dim, x, at, keep)

    return make


def extreme(name: str) -> Case:
    """max and min: of all, over a dim, or of two tensors."""

    def make(draw: Draw) -> Call:
        packet = getattr(aten, name)
        if draw(st.sampled_from([False, False, True])):
            sizes = shape(draw)
            return call(packet.other, real(*sizes), real(*broadcast(draw, sizes), grad=grad(draw)))
        return one_reduced(name)(draw)

    return make


def aminmax(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    at = draw(st.sampled_from([None, *range(x.dim())]))
    return call(aten.aminmax.default, x, dim=at, keepdim=draw(st.booleans()))


def along(name: str, kind: str = "default", after: tuple[Any, ...] = (), low: int = 1) -> Case:
    """(x, dim, ...)"""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw, low), grad=grad(draw))
        at = draw(st.integers(-x.dim(), x.dim() - 1))
        return call(getattr(getattr(aten, name), kind), x, at, *after)

    return make


def softmax(name: str) -> Case:
    if name in ("softmax", "log_softmax"):
        return along(name, "int")
    return along(name, "default", (False,) if name in ("_softmax", "_log_softmax") else ())


_SOFTMAX_TEXT = """
softmax log_softmax special_softmax special_log_softmax _softmax _log_softmax _safe_softmax
"""
_SOFTMAX = _SOFTMAX_TEXT.split()


def diff(draw: Draw) -> Call:
    sizes = shape(draw)
    at = draw(st.integers(0, len(sizes) - 1))
    sizes[at] = 4
    ends = [
        real(*(2 if i == at else s for i, s in enumerate(sizes)), grad=grad(draw))
        if draw(st.booleans())
        else None
        for _ in range(2)
    ]
    return call(aten.diff.default, real(*sizes, grad=grad(draw)), 1, at, *ends)


def topk(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    at = draw(st.integers(-x.dim(), x.dim() - 1))
    return call(aten.topk.default, x, draw(st.integers(1, x.shape[at])), at)


def sort(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=name == "sort" and grad(draw))
        at = draw(st.integers(-x.dim(), x.dim() - 1))
        if draw(st.booleans()):
            return call(getattr(aten, name).stable, x, stable=True, dim=at)
        return call(getattr(aten, name).default, x, at, True)

    return make


def glu(draw: Draw) -> Call:
    sizes = shape(draw)
    at = draw(st.integers(0, len(sizes) - 1))
    sizes[at] *= 2
    return call(aten.glu.default, real(*sizes), at - len(sizes))


def several(name: str) -> Case:
    """flip, and Fourier transforms of several dims."""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw, 2), grad=grad(draw))
        at = dims(draw, x)
        if name == "flip":
            return call(aten.flip.default, x, at)
        if name.endswith("shift"):
            return call(overload(name), x, draw(st.sampled_from([at, None])))
        at = draw(st.sampled_from([at, None])) if name.endswith("n") else at
        x = real(*(s + 1 for s in x.shape)) if "irfft" in name else x
        return call(overload(name), x, None, at)

    return make


_SEVERAL_TEXT = """
flip fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift
fft_ifftshift
"""


def fourier(name: str) -> Case:
    def make(draw: Draw) -> Call:
        sizes = shape(draw)
        at = draw(st.integers(0, len(sizes) - 1))
        sizes[at] += 1
        return call(overload(name), real(*sizes, grad=grad(draw)), None, at)

    return make


def roll(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    if draw(st.booleans()):
        return call(aten.roll.default, x, [draw(st.integers(-2, 2))])
    return call(aten.roll.default, x, [1], [draw(st.integers(-x.dim(), x.dim() - 1))])


def rot90(draw: Draw) -> Call:
    x = real(*shape(draw, 2))
    return call(aten.rot90.default, x, draw(st.integers(0, 3)), [0, x.dim() - 1])


def renorm(draw: Draw) -> Call:
    x = real(*shape(draw, 2), low=0.5)
    return call(aten.renorm.default, x, 2, draw(st.integers(0, x.dim() - 1)), 1.0)


def cross(name: str) -> Case:
    def make(draw: Draw) -> Call:
        sizes = shape(draw, 1, 2)
        at = draw(st.integers(0, len(sizes)))
        sizes.insert(at, 3)
        a, b = real(*sizes), real(*sizes, grad=grad(draw))
        if name == "cross" and draw(st.booleans()):
            return call(aten.cross.default, a, b)
        return call(overload(name), a, b, dim=at)

    return make


def compared(name: str) -> Case:
    """cosine_similarity and pairwise_distance, of operands that broadcast."""

    def make(draw: Draw) -> Call:
        sizes = shape(draw, 1, 3)
        a, b = real(*sizes), real(*broadcast(draw, sizes[:-1]), sizes[-1], grad=grad(draw))
        if name == "pairwise_distance":
            return call(overload(name), a, b, keepdim=draw(st.booleans()))
        return call(overload(name), a, b, draw(st.sampled_from([-1, len(sizes) - 1])))

    return make


def cdist(draw: Draw) -> Call:
    lead, k = shape(draw, 0, 2), draw(SIZE)
    a, b = real(*lead, draw(EVEN), k), real(*broadcast(draw, lead), draw(SIZE), k)
    return call(aten.cdist.default, a, b, draw(st.sampled_from([2.0, 1.0])))


def layer_norm(draw: Draw) -> Call:
    sizes = shape(draw, 1, 3)
    normal = sizes[-draw(st.integers(1, len(sizes))) :]
    affine = [real(*normal, grad=grad(draw)), real(*normal)][: draw(st.integers(0, 2))]
    return call(aten.layer_norm.default, real(*sizes, grad=grad(draw)), normal, *affine)


def rms_norm(draw: Draw) -> Call:
    sizes = shape(draw, 1, 3)
    weight = [real(sizes[-1])] if draw(st.booleans()) else []
    return call(aten.rms_norm.default, real(*sizes), sizes[-1:], *weight)


REDUCTION: dict[str, Case] = {
    **{name: reduced(name) for name in ("sum", "mean", "amax", "amin", "nansum", "nanmean")},
    **{name: reduced(name) for name in ("logsumexp", "special_logsumexp")},
    **{
        name: one_reduced(name)
        for name in ("argmax", "argmin", "any", "all", "prod", "median", "nanmedian")
    },
    "count_nonzero": one_reduced("count_nonzero"),
    "mode": one_reduced("mode", whole=False),
    "kthvalue": one_reduced("kthvalue", whole=False, before=(1,)),
    **{name: spread(name) for name in ("var", "std", "var_mean", "std_mean")},
    **{name: norm(name) for name in ("norm", "linalg_vector_norm", "linalg_norm")},
    **{
        name: matrix_norm(name) for name in ("linalg_matrix_norm", "frobenius_norm", "nuclear_norm")
    },
    "max": extreme("max"),
    "min": extreme("min"),
    "aminmax": aminmax,
    **{name: softmax(name) for name in _SOFTMAX},
    **{name: along(name) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")},
    "diff": diff,
    "sort": sort("sort"),
    "argsort": sort("argsort"),
    "msort": lambda draw: call(aten.msort.default, real(*shape(draw))),
    "topk": topk,
    "glu": glu,
    **{name: several(name) for name in _SEVERAL_TEXT.split()},
    **{
        name: fourier(name)
        for name in ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
    },
    "roll": roll,
    "rot90": rot90,
    "renorm": renorm,
    "cross": cross("cross"),
    "linalg_cross": cross("linalg_cross"),
    "cosine_similarity": compared("cosine_similarity"),
    "pairwise_distance": compared("pairwise_distance"),
    "cdist": cdist,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}
