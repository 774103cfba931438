"""Generators of random calls of element-by-element ops."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.rules.draws import Case, Draw, aten, broadcast, grad, overload, real, shape
from tests.rules.execution import Call, call

# Element by element.

_UNARY_TEXT = """
neg abs exp exp2 expm1 sin cos tanh sigmoid relu relu6 gelu silu mish softplus elu selu celu
leaky_relu hardswish hardsigmoid hardtanh erf floor ceil round sign square softshrink isnan
isinf isfinite clone contiguous alias detach positive nan_to_num zeros_like ones_like empty_like
"""
_UNARY = _UNARY_TEXT.split()
_POSITIVE = ["log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal"]
_BINARY_TEXT = """
mul div minimum maximum add sub rsub pow eq ne lt le gt ge remainder fmod floor_divide
"""
_BINARY = _BINARY_TEXT.split()
_LOGICAL_TEXT = """
logical_and logical_or __and__ __or__ bitwise_and bitwise_or bitwise_xor
"""
_LOGICAL = _LOGICAL_TEXT.split()


def unary(name: str, low: float = -2.0) -> Case:
    return lambda draw: call(overload(name), real(*shape(draw, 0), grad=grad(draw), low=low))


def binary(name: str) -> Case:
    def make(draw: Draw) -> Call:
        whole = shape(draw)
        low = 0.5 if name == "pow" else -2.0
        # Never near zero: quotients stay of order one.
        smooth = name != "floor_divide"  # it has no derivative
        a = real(*whole, grad=smooth and grad(draw), low=low)
        b = real(*broadcast(draw, whole), low=0.7, grad=smooth and grad(draw))
        kind = "Tensor_Tensor" if name == "pow" else "Tensor"
        if name in ("add", "mul", "sub"):
            operands = draw(st.sampled_from([(a, b), (b, a), (a, a), (a, 1.5)]))
            return call(overload(name, kind), *operands)
        scalar = "Tensor_Scalar" if name == "pow" else "Scalar"
        if scalar in getattr(aten, name).overloads() and draw(st.booleans()):
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


POINTWISE: dict[str, Case] = {
    **{name: unary(name) for name in _UNARY},
    **{name: unary(name, 0.2) for name in _POSITIVE},
    **{name: binary(name) for name in _BINARY},
    **{name: logical(name) for name in _LOGICAL},
    **{name: ternary(name) for name in ("addcmul", "addcdiv", "lerp")},
    "log_sigmoid": lambda draw: call(aten.log_sigmoid.default, real(*shape(draw))),
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
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
