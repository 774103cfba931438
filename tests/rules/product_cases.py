"""Generators of random calls of products."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call


def linear(draw: Draw) -> Call:
    k, n = draw(SIZE), draw(SIZE)
    x, weight = real(*shape(draw, 0, 2), k, grad=grad(draw)), real(n, k, grad=grad(draw))
    bias = [real(n, grad=grad(draw))] if draw(st.booleans()) else []
    return call(aten.linear.default, x, weight, *bias)


def mm(draw: Draw) -> Call:
    m, k, n = draw(SIZE), draw(SIZE), draw(SIZE)
    return call(aten.mm.default, real(m, k, grad=grad(draw)), real(k, n))


def added(name: str) -> Case:
    """An addend that broadcasts, scales, and a product."""

    def make(draw: Draw) -> Call:
        b, m, k, n = draw(SIZE), draw(EVEN), draw(EVEN), draw(SIZE)
        a, x, out = {
            "addmm": ([m, k], [k, n], [m, n]),
            "baddbmm": ([b, m, k], [b, k, n], [b, m, n]),
            "addbmm": ([b, m, k], [b, k, n], [m, n]),
            "addmv": ([m, k], [k], [m]),
            "addr": ([m], [n], [m, n]),
        }[name]
        addend = real(*broadcast(draw, out), grad=grad(draw))
        scale = draw(st.sampled_from([{}, {}, {"alpha": 0.5, "beta": 2}]))
        return call(overload(name), addend, real(*a, grad=grad(draw)), real(*x), **scale)

    return make


def bmm(draw: Draw) -> Call:
    b, m, k, n = draw(SIZE), draw(SIZE), draw(SIZE), draw(SIZE)
    return call(aten.bmm.default, real(b, m, k), real(b, k, n, grad=grad(draw)))


def matmul(name: str) -> Case:
    def make(draw: Draw) -> Call:
        batch, k = shape(draw, 0, 2), draw(SIZE)
        a = real(*batch, draw(SIZE), k)
        b = real(*broadcast(draw, batch), k, draw(SIZE), grad=grad(draw))
        form = draw(st.sampled_from(["matrices", "matrices", "right", "left", "vectors"]))
        if form in ("right", "vectors"):
            b = real(k, grad=grad(draw))
        if form in ("left", "vectors"):
            a = real(k)
        return call(overload(name), a, b)

    return make


def vectors(name: str) -> Case:
    def make(draw: Draw) -> Call:
        k = draw(EVEN)
        n = k if name in ("dot", "vdot") else draw(EVEN)
        return call(overload(name), real(k, grad=grad(draw)), real(n))

    return make


def mv(draw: Draw) -> Call:
    m, k = draw(EVEN), draw(EVEN)
    return call(aten.mv.default, real(m, k, grad=grad(draw)), real(k))


def inner(draw: Draw) -> Call:
    k = draw(SIZE)
    a, b = real(*shape(draw, 0, 2), k, grad=grad(draw)), real(*shape(draw, 0, 1), k)
    return call(aten.inner.default, a, b)


def tensordot(draw: Draw) -> Call:
    k, j = draw(SIZE), draw(SIZE)
    a, b = real(k, draw(SIZE), j, grad=grad(draw)), real(draw(SIZE), j, k)
    dims = draw(st.sampled_from([([0, 2], [2, 1]), ([-1], [1]), ([0], [-1])]))
    return call(aten.tensordot.default, a, b, *dims)


def bilinear(draw: Draw) -> Call:
    lead, i, j, o = shape(draw, 1, 2), draw(SIZE), draw(SIZE), draw(SIZE)
    bias = [real(o, grad=grad(draw))] if draw(st.booleans()) else []
    x, y = real(*lead, i), real(*lead, j, grad=grad(draw))
    return call(aten.bilinear.default, x, y, real(o, i, j), *bias)


EQUATIONS = (
    "ij,jk->ik",
    "bij,bkj->bik",
    "bhqd,bhkd->bhqk",
    "b h q k, b h k d -> b q h d",
    "...ij,...jk->...ik",
    "bi,ij,bj->b",
    "bi,bj->bij",
    "ij->ji",
    "bij->bi",
    "ij,kj",
    "i,i->",
    "...i,i",
    "bij,k->ik",
    "ii->i",
)


def einsum(draw: Draw) -> Call:
    equation = draw(st.sampled_from(EQUATIONS))
    left = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {letter: draw(SIZE) for letter in "".join(left) if letter != "."}
    lead = shape(draw, 0, 2)
    operands = []
    for text in left:
        before, dots, after = text.partition("...")
        spread = broadcast(draw, lead) if dots and len(left) > 1 else []
        dims = [*(sizes[x] for x in before), *spread, *(sizes[x] for x in after)]
        operands.append(real(*dims, grad=grad(draw)))
    return call(aten.einsum.default, equation, operands)


def attention(draw: Draw) -> Call:
    """Batched or not, grouped or not, lengths that differ, a mask that broadcasts, dropout."""
    b, g, r = draw(SIZE), draw(EVEN), draw(st.sampled_from([1, 2]))
    q, k, e, f = draw(EVEN), draw(SIZE), draw(SIZE), draw(SIZE)
    causal = draw(st.booleans())
    lead = [[b], [], [2, b]][draw(st.sampled_from([0, 0, 0, 1, 2]))]
    operands = [real(*lead, g * r, q, e), real(*lead, g, k, e)]
    if r == 1 and draw(st.sampled_from([False, False, True])):
        operands[1] = real(*(s if draw(st.booleans()) else 1 for s in [*lead, g]), k, e)
    operands.append(real(*lead, g, k, f, grad=grad(draw)))
    mask = None
    if not causal and draw(st.booleans()):
        full = [*lead, g * r, q, k]
        mask_shape = [s if draw(st.booleans()) else 1 for s in full][draw(st.integers(0, 2)) :]
        mask = real(*mask_shape, grad=grad(draw))
    dropout = draw(st.sampled_from([0.0, 0.0, 0.0, 0.3])) if r == 1 else 0.0
    target = aten.scaled_dot_product_attention.default
    return call(target, *operands, mask, dropout, causal, enable_gqa=r > 1)


PRODUCTS: dict[str, Case] = {
    "linear": linear,
    "mm": mm,
    "bmm": bmm,
    **{name: added(name) for name in ("addmm", "baddbmm", "addbmm", "addmv", "addr")},
    "matmul": matmul("matmul"),
    "linalg_matmul": matmul("linalg_matmul"),
    "mv": mv,
    **{name: vectors(name) for name in ("dot", "vdot", "outer", "ger")},
    "inner": inner,
    "tensordot": tensordot,
    "bilinear": bilinear,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
}
