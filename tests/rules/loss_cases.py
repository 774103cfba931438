"""Generators of random calls of losses."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.draws import EVEN, SIZE, Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call

REDUCTION = st.sampled_from([0, 1, 2])


def classes(draw: Draw, *, soft: bool) -> tuple[list[torch.Tensor | None], list[int]]:
    """Logits, target (class numbers or probabilities), and perhaps a weight for each class."""
    t, c = draw(EVEN), draw(EVEN)
    space = shape(draw, 0, 1)
    x = real(t, c, *space, grad=grad(draw))
    target = torch.randint(0, c, (t, *space))
    if draw(st.booleans()):
        target.view(-1)[draw(st.integers(0, target.numel() - 1))] = -100
        target.view(-1)[0] = 1  # at least one counts
    if soft and draw(st.sampled_from([False, False, True])):
        target = real(t, c, *space, low=0.1, grad=draw(st.booleans()))
    weight = real(c, low=0.2, grad=False) if draw(st.booleans()) else None
    return [x, target, weight], space


def cross_entropy(draw: Draw) -> Call:
    (x, target, weight), space = classes(draw, soft=True)
    assert x is not None and target is not None
    if draw(st.booleans()) and not target.is_floating_point() and not space:
        return call(aten.cross_entropy_loss.default, x, target)
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    reduction = draw(REDUCTION)
    return call(aten.cross_entropy_loss.default, x, target, weight, reduction, -100, smoothing)


def nll(draw: Draw) -> Call:
    operands, _ = classes(draw, soft=False)
    return call(aten.nll_loss_nd.default, *operands, draw(REDUCTION))


def elementwise(name: str, *, low: float = -2.0, high: float = 2.0, signs: bool = False) -> Case:
    """x and target of one shape; `signs`: the target is 1 or -1."""

    def make(draw: Draw) -> Call:
        sizes = shape(draw)
        x = real(*sizes, low=low, high=high, grad=grad(draw))
        target = real(*sizes, low=low, high=high, grad=grad(draw) and not signs)
        target = target.sign() if signs else target
        return call(overload(name), x, target, reduction=draw(REDUCTION))

    return make


def binary(name: str) -> Case:
    def make(draw: Draw) -> Call:
        sizes = shape(draw)
        x = real(*sizes, low=0.1, high=0.9, grad=grad(draw))
        target = real(*sizes, low=0.1, high=0.9, grad=False)
        weight = real(*broadcast(draw, sizes), low=0.2, grad=False)
        weights = [weight if draw(st.booleans()) else None]
        if name.endswith("logits"):
            positive = real(*sizes[-1:], low=0.2, grad=False)
            weights.append(positive if draw(st.booleans()) else None)
        return call(overload(name), x, target, *weights, draw(REDUCTION))

    return make


def margin_ranking(draw: Draw) -> Call:
    sizes = shape(draw)
    a, b, sign = real(*sizes), real(*sizes, grad=grad(draw)), real(*sizes, grad=False).sign()
    return call(aten.margin_ranking_loss.default, a, b, sign, 0.5, draw(REDUCTION))


def cosine_embedding(draw: Draw) -> Call:
    lead, d = shape(draw, 0, 1), draw(SIZE)
    a, b = real(*lead, d), real(*lead, d, grad=grad(draw))
    sign = real(*lead, grad=False).sign()
    return call(aten.cosine_embedding_loss.default, a, b, sign, 0.1, draw(REDUCTION))


def triplet(draw: Draw) -> Call:
    lead, d = shape(draw, 1, 2), draw(SIZE)
    a, b, c = real(*lead, d), real(*lead, d, grad=grad(draw)), real(*lead, d)
    return call(aten.triplet_margin_loss.default, a, b, c, 3.0, reduction=draw(REDUCTION))


def poisson(draw: Draw) -> Call:
    sizes = shape(draw)
    a, b = real(*sizes), real(*sizes, low=0.1, grad=False)
    return call(aten.poisson_nll_loss.default, a, b, True, False, 1e-8, draw(REDUCTION))


LOSSES: dict[str, Case] = {
    "cross_entropy_loss": cross_entropy,
    "nll_loss_nd": nll,
    **{name: elementwise(name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")},
    "kl_div": elementwise("kl_div", low=0.1),
    "soft_margin_loss": elementwise("soft_margin_loss", signs=True),
    "hinge_embedding_loss": elementwise("hinge_embedding_loss", signs=True),
    **{name: binary(name) for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits")},
    "margin_ranking_loss": margin_ranking,
    "cosine_embedding_loss": cosine_embedding,
    "triplet_margin_loss": triplet,
    "poisson_nll_loss": poisson,
}
