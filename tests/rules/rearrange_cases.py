"""Generators of random calls of ops that repeat, cut out or lay out anew."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call


def repeat(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw, 0))
        more = draw(st.integers(0, 1)) if name == "repeat" else draw(st.sampled_from([-1, 0, 1]))
        counts = [draw(st.sampled_from([1, 1, 2])) for _ in range(max(x.dim() + more, 0))]
        return call(overload(name), x, counts)

    return make


def repeat_interleave(draw: Draw) -> Call:
    x = real(*shape(draw))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    if draw(st.sampled_from([False, False, True])):
        counts = torch.randint(0, 3, (x.shape[dim],))
        counts[0] += 1  # memory of an empty result can't be told from other empty memory
        told = {"output_size": int(counts.sum())}  # as a captured graph must have it
        return call(aten.repeat_interleave.self_Tensor, x, counts, dim, **told)
    dim = draw(st.sampled_from([dim, dim, None]))
    size = 2 * (x.numel() if dim is None else x.shape[dim])
    told = {"output_size": size} if draw(st.booleans()) else {}
    return call(aten.repeat_interleave.self_int, x, 2, dim, **told)


def with_dim(name: str, kind: str = "default") -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=grad(draw))
        return call(overload(name, kind), x, draw(st.integers(-x.dim(), x.dim() - 1)))

    return make


def narrow(draw: Draw) -> Call:
    x = real(*shape(draw))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    start = draw(st.integers(0, x.shape[dim] - 1))
    length = draw(st.integers(1, x.shape[dim] - start))
    return call(aten.narrow.default, x, dim, start, length)


def swapped(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw))
        dims = st.integers(-x.dim(), x.dim() - 1)
        return call(overload(name), x, draw(dims), draw(dims))

    return make


def moved(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw))
        dims = st.integers(0, x.dim() - 1)
        if draw(st.booleans()):
            return call(getattr(aten, name).int, x, draw(dims), draw(dims) - x.dim())
        some = st.permutations(range(x.dim()))
        count = draw(st.integers(1, x.dim()))
        return call(getattr(aten, name).intlist, x, draw(some)[:count], draw(some)[:count])

    return make


def matrix(name: str, low: int = 2) -> Case:
    return lambda draw: call(overload(name), real(*shape(draw, low, max(low, 3))))


def diagonal(draw: Draw) -> Call:
    x = real(*shape(draw, 2))
    a, b = draw(st.permutations(range(x.dim())))[:2]
    return call(aten.diagonal.default, x, 0, a, b - x.dim())


def diag_embed(draw: Draw) -> Call:
    x = real(*shape(draw, 1, 2))
    a, b = draw(st.permutations(range(x.dim() + 1)))[:2]
    return call(aten.diag_embed.default, x, draw(st.integers(-1, 1)), a, b)


def triangle(name: str) -> Case:
    return lambda draw: call(overload(name), real(*shape(draw, 2)), draw(st.integers(-2, 2)))


def select_scatter(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    dim = draw(st.integers(0, x.dim() - 1))
    source = real(*(s for i, s in enumerate(x.shape) if i != dim), grad=grad(draw))
    return call(aten.select_scatter.default, x, source, dim, x.shape[dim] - 1)


def slice_scatter(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    dim = draw(st.integers(0, x.dim() - 1))
    end = draw(st.integers(1, x.shape[dim]))
    source = real(*(end if i == dim else s for i, s in enumerate(x.shape)), grad=grad(draw))
    return call(aten.slice_scatter.default, x, source, dim, 0, end)


def unfold(draw: Draw) -> Call:
    x = real(*shape(draw), grad=grad(draw))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    size = draw(st.integers(1, x.shape[dim]))
    return call(aten.unfold.default, x, dim, size, draw(st.integers(1, 2)))


def expand_as(draw: Draw) -> Call:
    whole = shape(draw)
    return call(aten.expand_as.default, real(*broadcast(draw, whole)), real(*whole, grad=False))


def broadcast_to(draw: Draw) -> Call:
    whole = shape(draw)
    return call(aten.broadcast_to.default, real(*broadcast(draw, whole)), whole)


def as_another(name: str) -> Case:
    def make(draw: Draw) -> Call:
        a, b, c = draw(EVEN), draw(SIZE), draw(SIZE)
        sizes = draw(st.permutations([[a, b, c], [a * b, c], [a, b * c], [a * b * c]]))
        return call(overload(name), real(*sizes[0]), real(*sizes[1], grad=grad(draw)))

    return make


def meshgrid(draw: Draw) -> Call:
    members = [real(draw(SIZE), grad=grad(draw)) for _ in range(draw(st.integers(1, 3)))]
    indexing = draw(st.sampled_from(["ij", "xy"]))
    return call(aten.meshgrid.indexing, members, indexing=indexing)


def broadcast_tensors(draw: Draw) -> Call:
    whole = shape(draw)
    return call(aten.broadcast_tensors.default, [real(*whole), real(*broadcast(draw, whole))])


def constant(name: str) -> Case:
    def make(draw: Draw) -> Call:
        sizes = shape(draw, 0)
        more = {"new_full": (2.5,), "new_empty_strided": (list(torch.empty(sizes).stride()),)}
        return call(overload(name), real(*shape(draw)), sizes, *more.get(name, ()))

    return make


def positive_matrix(name: str) -> Case:
    """Well-conditioned, symmetric where the function looks at one triangle only."""

    def make(draw: Draw) -> Call:
        n = draw(st.integers(1, 3))
        half = real(*shape(draw, 0, 2), n, n, low=-0.3, high=0.3, grad=False)
        x = half @ half.mT + torch.eye(n, dtype=torch.float64)
        return call(overload(name), x.requires_grad_())

    return make


_MATRIX_TEXT = """
inverse linalg_inv linalg_cholesky cholesky linalg_det det logdet linalg_slogdet slogdet
linalg_matrix_exp matrix_exp linalg_svdvals linalg_eigvalsh
"""

REARRANGE: dict[str, Case] = {
    "repeat": repeat("repeat"),
    "tile": repeat("tile"),
    "repeat_interleave": repeat_interleave,
    "unbind": with_dim("unbind", "int"),
    "narrow": narrow,
    "swapaxes": swapped("swapaxes"),
    "swapdims": swapped("swapdims"),
    "movedim": moved("movedim"),
    "moveaxis": moved("moveaxis"),
    "numpy_T": matrix("numpy_T"),
    "mT": matrix("mT"),
    "adjoint": matrix("adjoint"),
    "matrix_H": lambda draw: call(aten.matrix_H.default, real(draw(SIZE), draw(SIZE))),
    "ravel": matrix("ravel", 1),
    "diagonal": diagonal,
    "diag_embed": diag_embed,
    "tril": triangle("tril"),
    "triu": triangle("triu"),
    "select_scatter": select_scatter,
    "slice_scatter": slice_scatter,
    "unfold": unfold,
    "expand_as": expand_as,
    "broadcast_to": broadcast_to,
    "view_as": as_another("view_as"),
    "reshape_as": as_another("reshape_as"),
    "view_as_complex": lambda draw: call(aten.view_as_complex.default, real(*shape(draw), 2)),
    "view_as_real": lambda draw: call(
        aten.view_as_real.default, torch.randn(shape(draw), dtype=torch.cdouble).requires_grad_()
    ),
    "meshgrid": meshgrid,
    "broadcast_tensors": broadcast_tensors,
    "tensor_split": lambda draw: call(
        aten.tensor_split.indices, real(draw(SIZE), 4), [2], draw(st.sampled_from([1, -1]))
    ),
    "unsafe_split": lambda draw: call(aten.unsafe_split.Tensor, real(draw(SIZE), 4), 2, 1),
    "unsafe_chunk": lambda draw: call(aten.unsafe_chunk.default, real(draw(SIZE), 4), 2, -1),
    **{
        name: constant(name)
        for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
    },
    **{name: positive_matrix(name) for name in _MATRIX_TEXT.split()},
}
