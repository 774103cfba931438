"""Generators of random calls of ops that read or write at indices."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, real, shape
from tests.rules.execution import Call, call


def ids(bound: int, *sizes: int) -> torch.Tensor:
    return torch.randint(0, bound, sizes)


def distinct(bound: int, count: int) -> torch.Tensor:
    return torch.randperm(bound)[:count]


def gather(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    sizes = [s if draw(st.sampled_from([True, True, False])) else 1 for s in x.shape]
    sizes[dim] = draw(SIZE)
    return call(aten.gather.default, x, dim, ids(x.shape[dim], *sizes))


def take_along_dim(draw: Draw) -> Call:
    sizes = shape(draw)
    dim = draw(st.integers(-len(sizes), len(sizes) - 1))
    other = [s if draw(st.booleans()) else 1 for s in sizes]
    other[dim] = draw(SIZE)
    x = real(*[s if draw(st.booleans()) else 1 for s in sizes])
    if draw(st.sampled_from([False, False, True])):
        return call(aten.take_along_dim.default, x, ids(x.numel(), draw(SIZE)))
    return call(aten.take_along_dim.default, x, ids(x.shape[dim], *other), dim)


def scatter(name: str) -> Case:
    """Indices are distinct along the dim: writes that collide have no order."""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=grad(draw))
        dim = draw(st.integers(-x.dim(), x.dim() - 1))
        at = dim % x.dim()
        sizes = [s if draw(st.sampled_from([True, True, False])) else 1 for s in x.shape]
        sizes[at] = draw(st.integers(1, x.shape[at]))
        order = torch.rand(*[s if i != at else x.shape[at] for i, s in enumerate(sizes)])
        index = order.argsort(at).narrow(at, 0, sizes[at])
        source = real(*sizes, grad=grad(draw))
        if name == "scatter_reduce":
            return call(aten.scatter_reduce.two, x, dim, index, source, "sum")
        if name == "scatter_add":
            return call(aten.scatter_add.default, x, dim, index, source)
        if draw(st.booleans()):
            return call(aten.scatter.value, x, dim, index, 1.5)
        return call(aten.scatter.src, x, dim, index, source)

    return make


def index_select(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    sizes = draw(st.sampled_from([[], [draw(SIZE)]]))
    return call(aten.index_select.default, x, dim, ids(x.shape[dim], *sizes))


def index_write(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=grad(draw))
        dim = draw(st.integers(-x.dim(), x.dim() - 1))
        at = dim % x.dim()
        index = distinct(x.shape[at], draw(st.integers(1, x.shape[at])))
        sizes = [len(index) if i == at else s for i, s in enumerate(x.shape)]
        if name == "index_fill":
            if draw(st.booleans()):
                return call(aten.index_fill.int_Tensor, x, dim, index, real())
            return call(aten.index_fill.int_Scalar, x, dim, index, 2.0)
        target: Any = getattr(aten, name).default
        return call(target, x, dim, index, real(*sizes, grad=grad(draw)))

    return make


def _indices(draw: Draw, x: torch.Tensor) -> tuple[list[torch.Tensor | None], list[int]]:
    """Integer indices of some dims, which broadcast, and their common shape."""
    dims = draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=2, unique=True))
    spread = shape(draw, 1, 2)
    indices: list[torch.Tensor | None] = [None] * (max(dims) + 1)
    for number, dim in enumerate(dims):
        sizes = spread if number == 0 else broadcast(draw, spread)
        indices[dim] = ids(x.shape[dim], *sizes)
    return indices, spread


def index(draw: Draw) -> Call:
    x = real(*shape(draw, 1, 3), grad=grad(draw))
    return call(aten.index.Tensor, x, _indices(draw, x)[0])


def index_put(draw: Draw) -> Call:
    """Accumulates, or writes one value everywhere: else the order of collisions would matter."""
    x = real(*shape(draw, 1, 3), grad=grad(draw))
    indices, _ = _indices(draw, x)
    picked = torch.ops.aten.index.Tensor(x.detach(), indices)
    if draw(st.booleans()):
        values = real(*broadcast(draw, list(picked.shape)), grad=grad(draw))
        return call(aten.index_put.default, x, indices, values, True)
    return call(aten.index_put.default, x, indices, torch.tensor(1.5, dtype=torch.float64), False)


def masked_scatter(draw: Draw) -> Call:
    sizes = shape(draw)
    mask = torch.rand(sizes) > 0.5
    return call(aten.masked_scatter.default, real(*sizes), mask, real(*sizes, grad=grad(draw)))


def searchsorted(draw: Draw) -> Call:
    lead, k = shape(draw, 1, 2), draw(SIZE)
    values = real(*lead, draw(SIZE), grad=False)
    rows = real(*(lead if draw(st.booleans()) else []), k, grad=False).sort(-1)[0]
    return call(aten.searchsorted.Tensor, rows, values)


def isin(draw: Draw) -> Call:
    elements = ids(6, *shape(draw, 0))
    if draw(st.booleans()):
        return call(aten.isin.Tensor_Scalar, elements, 3)
    return call(aten.isin.Tensor_Tensor, elements, ids(6, *shape(draw, 0, 2)))


INDEXING: dict[str, Case] = {
    "gather": gather,
    "take_along_dim": take_along_dim,
    **{name: scatter(name) for name in ("scatter", "scatter_add", "scatter_reduce")},
    "index_select": index_select,
    **{name: index_write(name) for name in ("index_add", "index_copy", "index_fill")},
    "index": index,
    "index_put": index_put,
    "masked_scatter": masked_scatter,
    "one_hot": lambda draw: call(
        aten.one_hot.default, ids(5, *shape(draw, 0)), draw(st.sampled_from([-1, 5]))
    ),
    "searchsorted": searchsorted,
    "bucketize": lambda draw: call(
        aten.bucketize.Tensor, real(*shape(draw, 0), grad=False), torch.tensor([-1.0, 0.0, 0.5])
    ),
    "isin": isin,
    "multinomial": lambda draw: call(
        aten.multinomial.default, real(*shape(draw, 0, 1), draw(EVEN), low=0.1, grad=False), 1
    ),
}
