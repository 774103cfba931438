"""A generator of random calls for every op that has a rule. Sizes divide by 2 and 4 often."""

from __future__ import annotations

import operator

import torch
from hypothesis import strategies as st

from tests.rules.convolution_cases import CONVOLUTION
from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call
from tests.rules.expert_cases import EXPERTS
from tests.rules.indexing_cases import INDEXING
from tests.rules.loss_cases import LOSSES
from tests.rules.pointwise_cases import POINTWISE
from tests.rules.product_cases import PRODUCTS
from tests.rules.rearrange_cases import REARRANGE
from tests.rules.reduction_cases import REDUCTION

# Lookups.


def embedding(draw: Draw) -> Call:
    v, d = draw(EVEN), draw(SIZE)
    ids = torch.randint(0, v, shape(draw, 1, 2))
    padding = draw(st.sampled_from([[], [1]]))
    return call(aten.embedding.default, real(v, d, grad=grad(draw)), ids, *padding)


# Ops that rearrange.


def view(name: str) -> Case:
    def make(draw: Draw) -> Call:
        factors = draw(st.lists(SIZE, min_size=2, max_size=4))
        before, after = _grouped(draw, factors), _grouped(draw, factors)
        if draw(st.sampled_from([False, False, True])):
            after = _grouped(draw, sorted(factors))  # shapes that need not share factors
        return call(overload(name), real(*before), after)

    return make


def _grouped(draw: Draw, factors: list[int]) -> list[int]:
    """Neighbouring factors multiplied at random, and ones strewn in."""
    dims = [factors[0]]
    for factor in factors[1:]:
        if draw(st.booleans()):
            dims[-1] *= factor
        else:
            dims.append(factor)
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), 1)
    return dims


def flatten(draw: Draw) -> Call:
    x = real(*shape(draw, 2))
    start = draw(st.integers(0, x.dim() - 1))
    return call(aten.flatten.using_ints, x, start, draw(st.sampled_from([-1, x.dim() - 1])))


def unflatten(draw: Draw) -> Call:
    a, b = draw(EVEN), draw(SIZE)
    x = real(draw(SIZE), a * b, draw(SIZE))
    sizes = draw(st.sampled_from([[a, b], [-1, b], [a, -1]]))
    return call(aten.unflatten.int, x, draw(st.sampled_from([1, -2])), sizes)


def expand(draw: Draw) -> Call:
    whole = shape(draw)
    source = broadcast(draw, whole)
    asked = [
        -1 if i >= len(whole) - len(source) and draw(st.booleans()) else s
        for i, s in enumerate(whole)
    ]
    asked = [
        s if s != -1 or source[i - len(whole)] == s or source[i - len(whole)] != 1 else whole[i]
        for i, s in enumerate(asked)
    ]
    return call(aten.expand.default, real(*source), asked)


def transpose(draw: Draw) -> Call:
    x = real(*shape(draw))
    dims = st.integers(-x.dim(), x.dim() - 1)
    return call(aten.transpose.int, x, draw(dims), draw(dims))


def permute(draw: Draw) -> Call:
    x = real(*shape(draw))
    return call(aten.permute.default, x, draw(st.permutations(range(x.dim()))))


def unsqueeze(draw: Draw) -> Call:
    x = real(*shape(draw, 0))
    return call(aten.unsqueeze.default, x, draw(st.integers(-x.dim() - 1, x.dim())))


def squeeze(draw: Draw) -> Call:
    x = real(*shape(draw, 1))
    kind = draw(st.sampled_from(["default", "dim", "dims"]))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    arguments = {"default": [], "dim": [dim], "dims": [[dim]]}[kind]
    return call(getattr(aten.squeeze, kind), x, *arguments)


def slice_(draw: Draw) -> Call:
    x = real(*shape(draw, 1))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    start = draw(st.integers(0, x.shape[dim] - 1))
    end = draw(st.sampled_from([2**63 - 1, x.shape[dim], start + 1]))
    return call(aten.slice.Tensor, x, dim, start, end)


def split(draw: Draw) -> Call:
    x = real(draw(SIZE), draw(EVEN), draw(SIZE))
    return call(
        aten.split.Tensor, x, draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([0, 1, -1]))
    )


def split_with_sizes(draw: Draw) -> Call:
    a, b = draw(SIZE), draw(SIZE)
    x = real(draw(SIZE), a + b, draw(SIZE))
    return call(aten.split_with_sizes.default, x, [a, b], draw(st.sampled_from([1, -2])))


def chunk(draw: Draw) -> Call:
    return call(
        aten.chunk.default, real(draw(SIZE), draw(SIZE), 2), 2, draw(st.sampled_from([0, 1, -1]))
    )


def cat(name: str) -> Case:
    def make(draw: Draw) -> Call:
        base = shape(draw, 2)
        dim = draw(st.integers(-len(base), len(base) - 1))
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            base = list(base)
            base[dim] = draw(SIZE)
            parts.append(real(*base, grad=grad(draw)))
        if draw(st.booleans()):
            parts.append(parts[0])
        return call(overload(name), parts, dim)

    return make


def stack(draw: Draw) -> Call:
    sizes = shape(draw)
    parts = [real(*sizes, grad=grad(draw)) for _ in range(draw(st.integers(1, 3)))]
    return call(aten.stack.default, parts, draw(st.integers(-len(sizes) - 1, len(sizes))))


def select(draw: Draw) -> Call:
    x = real(*shape(draw))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    return call(aten.select.int, x, dim, draw(st.integers(-x.shape[dim], x.shape[dim] - 1)))


def pad(draw: Draw) -> Call:
    x = real(*shape(draw, 2))
    amounts = draw(
        st.lists(st.integers(0, 2), min_size=2, max_size=4).filter(lambda a: len(a) % 2 == 0)
    )
    return call(aten.pad.default, x, amounts, "constant", draw(st.sampled_from([None, 0.0, 1.5])))


def getitem(draw: Draw) -> Call:
    x = real(draw(EVEN), draw(SIZE), 2)
    return call(operator.getitem, list(aten.split.Tensor(x, 1, 2)), 1)


CASES: dict[str, Case] = {
    **POINTWISE,
    **PRODUCTS,
    **CONVOLUTION,
    **REARRANGE,
    **REDUCTION,
    **INDEXING,
    **LOSSES,
    **EXPERTS,
    "embedding": embedding,
    "view": view("view"),
    "reshape": view("reshape"),
    "_unsafe_view": view("_unsafe_view"),
    "flatten": flatten,
    "unflatten": unflatten,
    "expand": expand,
    "transpose": transpose,
    "permute": permute,
    "t": lambda draw: call(aten.t.default, real(*shape(draw, 1, 2))),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "slice": slice_,
    "split": split,
    "split_with_sizes": split_with_sizes,
    "chunk": chunk,
    **{name: cat(name) for name in ("cat", "concat", "concatenate")},
    "stack": stack,
    "select": select,
    "pad": pad,
    "getitem": getitem,
}
