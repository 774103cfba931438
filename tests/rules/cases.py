"""A generator of random calls for every op that has a rule. Sizes divide by 2 and 4 often."""

from __future__ import annotations

import operator
from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call
from tests.rules.pointwise_cases import POINTWISE

# Products.


def linear(draw: Draw) -> Call:
    k, n = draw(SIZE), draw(SIZE)
    x, weight = real(*shape(draw, 0, 2), k, grad=grad(draw)), real(n, k, grad=grad(draw))
    bias = [real(n, grad=grad(draw))] if draw(st.booleans()) else []
    return call(aten.linear.default, x, weight, *bias)


def mm(draw: Draw) -> Call:
    m, k, n = draw(SIZE), draw(SIZE), draw(SIZE)
    return call(aten.mm.default, real(m, k, grad=grad(draw)), real(k, n))


def addmm(draw: Draw) -> Call:
    m, k, n = draw(SIZE), draw(SIZE), draw(SIZE)
    bias = real(*draw(st.sampled_from([(n,), (m, n)])), grad=grad(draw))
    scale = draw(st.sampled_from([{}, {}, {"alpha": 2}]))
    return call(aten.addmm.default, bias, real(m, k), real(k, n), **scale)


def bmm(draw: Draw) -> Call:
    b, m, k, n = draw(SIZE), draw(SIZE), draw(SIZE), draw(SIZE)
    return call(aten.bmm.default, real(b, m, k), real(b, k, n, grad=grad(draw)))


def baddbmm(draw: Draw) -> Call:
    b, m, k, n = draw(SIZE), draw(SIZE), draw(SIZE), draw(SIZE)
    addend = real(b, draw(st.sampled_from([1, m])), n, grad=grad(draw))
    scale = draw(st.sampled_from([{}, {"alpha": 0.5, "beta": 2}]))
    return call(aten.baddbmm.default, addend, real(b, m, k), real(b, k, n), **scale)


def matmul(draw: Draw) -> Call:
    batch = shape(draw, 0, 2)
    m, k, n = draw(SIZE), draw(SIZE), draw(SIZE)
    a, b = real(*batch, m, k), real(*broadcast(draw, batch), k, n, grad=grad(draw))
    return call(aten.matmul.default, a, b)


# Lookups.


def embedding(draw: Draw) -> Call:
    v, d = draw(EVEN), draw(SIZE)
    ids = torch.randint(0, v, shape(draw, 1, 2))
    padding = draw(st.sampled_from([[], [1]]))
    return call(aten.embedding.default, real(v, d, grad=grad(draw)), ids, *padding)


def cross_entropy(draw: Draw) -> Call:
    t, c = draw(EVEN), draw(EVEN)
    target = torch.randint(0, c, (t,))
    if draw(st.booleans()):
        target[draw(st.integers(0, t - 1))] = -100
        target[0] = 1  # at least one counts
    return call(aten.cross_entropy_loss.default, real(t, c), target)


# Attention.


def attention(draw: Draw) -> Call:
    b, g, r = draw(SIZE), draw(EVEN), draw(st.sampled_from([1, 2]))
    q, k, e, f = draw(EVEN), draw(SIZE), draw(SIZE), draw(SIZE)
    causal = draw(st.booleans())
    heads = g * r
    operands = [real(b, heads, q, e), real(b, g, k, e), real(b, g, k, f, grad=grad(draw))]
    mask = None
    if not causal and draw(st.booleans()):
        full = [b, heads, q, k]
        mask_shape = [s if draw(st.booleans()) else 1 for s in full][draw(st.integers(0, 2)) :]
        mask = real(*mask_shape, grad=grad(draw))
    return call(
        aten.scaled_dot_product_attention.default, *operands, mask, 0.0, causal, enable_gqa=r > 1
    )


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


def one_dim(target: Any, *, low: int = 1) -> Case:
    """Ops whose arguments are (x, dim)."""

    def make(draw: Draw) -> Call:
        x = real(*shape(draw, low), grad=grad(draw))
        return call(target, x, draw(st.integers(-x.dim(), x.dim() - 1)))

    return make


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


def cat(draw: Draw) -> Call:
    base = shape(draw, 2)
    dim = draw(st.integers(-len(base), len(base) - 1))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        base = list(base)
        base[dim] = draw(SIZE)
        parts.append(real(*base, grad=grad(draw)))
    if draw(st.booleans()):
        parts.append(parts[0])
    return call(aten.cat.default, parts, dim)


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


# Reductions.


def reduced(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=grad(draw))
        if name in ("sum", "mean") and draw(st.booleans()):
            return call(getattr(aten, name).default, x)
        dims = draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=2, unique=True))
        kind = {"sum": "dim_IntList", "mean": "dim"}.get(name, "default")
        return call(overload(name, kind), x, dims, draw(st.booleans()))

    return make


def one_reduced(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw), grad=False)
        x = x > 0 if name in ("any", "all") else x
        if draw(st.booleans()):
            return call(getattr(aten, name).default, x)
        kind = "default" if name == "argmax" else "dim"
        return call(
            getattr(getattr(aten, name), kind),
            x,
            draw(st.integers(0, x.dim() - 1)),
            draw(st.booleans()),
        )

    return make


def softmax(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw))
        dim = draw(st.integers(-x.dim(), x.dim() - 1))
        if name.startswith("_"):
            return call(overload(name), x, dim, False)
        return call(getattr(aten, name).int, x, dim)

    return make


def layer_norm(draw: Draw) -> Call:
    sizes = shape(draw, 1, 3)
    count = draw(st.integers(1, len(sizes)))
    normal = sizes[-count:]
    affine = [real(*normal, grad=grad(draw)), real(*normal)][: draw(st.integers(0, 2))]
    return call(aten.layer_norm.default, real(*sizes, grad=grad(draw)), normal, *affine)


def rms_norm(draw: Draw) -> Call:
    sizes = shape(draw, 1, 3)
    weight = [real(sizes[-1])] if draw(st.booleans()) else []
    return call(aten.rms_norm.default, real(*sizes), sizes[-1:], *weight)


CASES: dict[str, Case] = {
    **POINTWISE,
    "linear": linear,
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": baddbmm,
    "matmul": matmul,
    "embedding": embedding,
    "cross_entropy_loss": cross_entropy,
    "scaled_dot_product_attention": attention,
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
    "cat": cat,
    "stack": stack,
    "select": select,
    "pad": pad,
    "getitem": getitem,
    "sum": reduced("sum"),
    "mean": reduced("mean"),
    "amax": reduced("amax"),
    "amin": reduced("amin"),
    "argmax": one_reduced("argmax"),
    "any": one_reduced("any"),
    "all": one_reduced("all"),
    "softmax": softmax("softmax"),
    "_softmax": softmax("_softmax"),
    "log_softmax": softmax("log_softmax"),
    "_log_softmax": softmax("_log_softmax"),
    "cumsum": one_dim(aten.cumsum.default),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}
