"""Generators of random calls of element-by-element ops."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.draws import Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call

# Element by element.

_UNARY_TEXT = """
neg negative abs absolute exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan sigmoid
special_expit relu relu6 gelu silu mish softplus elu selu celu leaky_relu hardswish hardsigmoid
hardtanh hardshrink softshrink erf erfc sinc floor ceil round trunc frac sign sgn square isnan
isinf isfinite clone contiguous alias detach positive nan_to_num zeros_like ones_like empty_like
lift_fresh_copy zero real conj resolve_conj resolve_neg angle
"""
_UNARY = _UNARY_TEXT.split()
_POSITIVE = ["log", "log2", "log1p", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma"]
# Between 0 and 1.
_UNIT = ["asin", "acos", "atanh", "erfinv", "logit", "special_logit"]
_BINARY_TEXT = """
mul multiply div divide true_divide minimum maximum fmax fmin add sub subtract rsub pow
float_power eq ne lt le gt ge greater less greater_equal less_equal not_equal remainder fmod
floor_divide isclose logaddexp logaddexp2 atan2 hypot copysign heaviside xlogy copy
"""
_BINARY = _BINARY_TEXT.split()
_ROUGH = {"floor_divide", "isclose", "heaviside", "copy"}  # without a derivative
_LOGICAL_TEXT = """
logical_and logical_or logical_xor __and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor
"""
_LOGICAL = _LOGICAL_TEXT.split()
_SHIFTS = ["bitwise_left_shift", "bitwise_right_shift"]
_DRAWN_IN_PLACE_TEXT = """
normal_ uniform_ bernoulli_ exponential_ log_normal_ geometric_ cauchy_ random_
"""

_DRAWN_TEXT = "uniform normal_functional exponential random log_normal cauchy poisson"


def unary(name: str, low: float = -2.0, high: float = 2.0) -> Case:
    return lambda draw: call(
        overload(name), real(*shape(draw, 0), grad=grad(draw), low=low, high=high)
    )


def binary(name: str) -> Case:
    def make(draw: Draw) -> Call:
        whole = shape(draw)
        power = name in ("pow", "float_power")
        low = 0.5 if power else -2.0
        # Never near zero: quotients stay of order one.
        smooth = name not in _ROUGH
        a = real(*whole, grad=smooth and grad(draw), low=low)
        b = real(*broadcast(draw, whole), low=0.7, grad=smooth and grad(draw))
        kind = "Tensor_Tensor" if power else "Tensor"
        if name in ("add", "mul", "sub", "multiply", "subtract"):
            operands = draw(st.sampled_from([(a, b), (b, a), (a, a), (a, 1.5)]))
            return call(overload(name, kind), *operands)
        scalar = "Tensor_Scalar" if power else "Scalar"
        if name != "copy" and scalar in getattr(aten, name).overloads() and draw(st.booleans()):
            return call(overload(name, scalar), a, 1.5)
        return call(overload(name, kind), a, b)

    return make


def logical(name: str) -> Case:
    def make(draw: Draw) -> Call:
        whole = shape(draw)
        a, b = torch.rand(whole) > 0.5, torch.rand(broadcast(draw, whole)) > 0.5
        return call(overload(name, "Tensor"), a, b)

    return make


def where(draw: Draw) -> Call:
    whole = shape(draw)
    condition = torch.rand(broadcast(draw, whole)) > 0.5
    return call(
        aten.where.self, condition, real(*whole), real(*broadcast(draw, whole), grad=grad(draw))
    )


def masked_fill(draw: Draw) -> Call:
    whole = shape(draw)
    return call(
        aten.masked_fill.Scalar, real(*whole), torch.rand(broadcast(draw, whole)) > 0.5, -3.0
    )


def clamp(draw: Draw) -> Call:
    x = real(*shape(draw))
    if draw(st.booleans()):
        return call(
            aten.clamp.Tensor, x, real(*broadcast(draw, list(x.shape)), grad=False, high=0.0)
        )
    return call(aten.clamp.default, x, -1.0, 1.0)


def ternary(name: str) -> Case:
    def make(draw: Draw) -> Call:
        whole = shape(draw)
        a, b = real(*whole), real(*broadcast(draw, whole), grad=grad(draw))
        target = aten.lerp.Tensor if name == "lerp" else overload(name)
        return call(target, a, b, real(*broadcast(draw, whole), low=0.5))

    return make


def shifted(name: str) -> Case:
    def make(draw: Draw) -> Call:
        whole = shape(draw)
        a, b = torch.randint(0, 9, whole), torch.randint(0, 3, broadcast(draw, whole))
        return call(overload(name, "Tensor"), a, b)

    return make


def dropout(name: str) -> Case:
    def make(draw: Draw) -> Call:
        x = real(*shape(draw, 2), grad=grad(draw))
        return call(overload(name), x, draw(st.sampled_from([0.0, 0.3])), draw(st.booleans()))

    return make


def drawn(name: str) -> Case:
    return lambda draw: call(overload(name), real(*shape(draw, 0), low=0.1, high=0.9, grad=False))


def drawn_in_place(name: str) -> Case:
    chance = {"bernoulli_": aten.bernoulli_.float, "geometric_": aten.geometric_.default}
    target, *rest = (chance[name], 0.3) if name in chance else (overload(name),)
    return lambda draw: call(target, real(*shape(draw, 0), grad=False), *rest)


def prelu(draw: Draw) -> Call:
    sizes = shape(draw, 1, 3)
    channels = sizes[1] if len(sizes) > 1 else 1
    weight = real(draw(st.sampled_from([1, channels])), grad=grad(draw))
    return call(aten.prelu.default, real(*sizes, grad=grad(draw)), weight)


def fill(draw: Draw) -> Call:
    x = real(*shape(draw))
    if draw(st.booleans()):
        return call(aten.fill.Scalar, x, 2.5)
    return call(aten.fill.Tensor, x, real())


def complex_pair(name: str) -> Case:
    def make(draw: Draw) -> Call:
        whole = shape(draw)
        return call(overload(name), real(*whole), real(*broadcast(draw, whole), grad=grad(draw)))

    return make


POINTWISE: dict[str, Case] = {
    **{name: unary(name) for name in _UNARY},
    **{name: unary(name, 0.2) for name in _POSITIVE},
    **{name: unary(name, 0.1, 0.9) for name in _UNIT},
    "acosh": unary("acosh", 1.5),
    **{name: binary(name) for name in _BINARY},
    **{name: logical(name) for name in _LOGICAL},
    **{name: shifted(name) for name in _SHIFTS},
    **{name: ternary(name) for name in ("addcmul", "addcdiv", "lerp")},
    **{name: complex_pair(name) for name in ("complex", "polar")},
    **{
        name: dropout(name)
        for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    },
    **{name: drawn(name) for name in ("bernoulli", "rand_like", "randn_like", "rrelu")},
    **{name: drawn(name) for name in _DRAWN_TEXT.split()},
    "normal": lambda draw: call(aten.normal.Tensor_float, real(*shape(draw, 0), grad=False), 2.0),
    "geometric": lambda draw: call(aten.geometric.default, real(*shape(draw, 0), grad=False), 0.3),
    "randint_like": lambda draw: call(
        aten.randint_like.default, real(*shape(draw, 0), grad=False), 9
    ),
    **{name: drawn_in_place(name) for name in _DRAWN_IN_PLACE_TEXT.split()},
    "prelu": prelu,
    "fill": fill,
    "imag": lambda draw: call(
        aten.imag.default, torch.randn(shape(draw), dtype=torch.cdouble).requires_grad_()
    ),
    "log_sigmoid": lambda draw: call(aten.log_sigmoid.default, real(*shape(draw))),
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "clip": lambda draw: call(aten.clip.default, real(*shape(draw)), -1.0, 1.0),
    "clamp_min": lambda draw: call(aten.clamp_min.default, real(*shape(draw)), 0.25),
    "clamp_max": lambda draw: call(aten.clamp_max.default, real(*shape(draw)), 0.25),
    "threshold": lambda draw: call(aten.threshold.default, real(*shape(draw)), 0.25, 7.0),
    "full_like": lambda draw: call(aten.full_like.default, real(*shape(draw)), 2.5),
    "logical_not": lambda draw: call(aten.logical_not.default, torch.rand(shape(draw)) > 0.5),
    "bitwise_not": lambda draw: call(aten.bitwise_not.default, torch.rand(shape(draw)) > 0.5),
    "to": lambda draw: call(
        aten.to.dtype, real(*shape(draw), grad=grad(draw)), torch.float64, False, True
    ),
    "_to_copy": lambda draw: call(aten._to_copy.default, real(*shape(draw)), dtype=torch.float64),
    "type_as": lambda draw: call(aten.type_as.default, real(*shape(draw)), real(3, grad=False)),
}
