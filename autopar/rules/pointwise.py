"""Element by element ops: every dim of the result is a factor, operands broadcast to it."""

from __future__ import annotations

from autopar.op_call import OpCall, Operand
from autopar.rules.dims import aligned, describe, named, shape_of
from autopar.rules.language import NoRuleError, Rule

# Sum-preserving in their one tensor operand: f(a + b) = f(a) + f(b).
_LINEAR_UNARY_TEXT = """
neg negative clone contiguous alias to _to_copy detach positive lift_fresh_copy dropout
"""
_LINEAR_UNARY = frozenset(_LINEAR_UNARY_TEXT.split())
_NAMES_TEXT = """
add sub rsub mul div neg abs exp exp2 expm1 log log2 log1p log10 sqrt rsqrt reciprocal pow square
sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid log_sigmoid relu relu6 gelu
silu mish softplus elu selu celu leaky_relu hardswish hardsigmoid hardtanh hardshrink erf erfc
erfinv lgamma digamma sinc logit special_expit special_logit clamp clamp_min clamp_max clip
minimum maximum fmax fmin floor ceil round trunc frac sign sgn where masked_fill eq ne lt le gt ge
greater less greater_equal less_equal not_equal logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ bitwise_left_shift
bitwise_right_shift remainder fmod floor_divide true_divide divide multiply subtract clone
contiguous alias to _to_copy detach positive negative absolute isnan isinf isfinite isclose
threshold softshrink zeros_like ones_like full_like empty_like addcmul addcdiv lerp nan_to_num
logaddexp logaddexp2 atan2 hypot copysign heaviside xlogy float_power lift_fresh_copy fill copy
zero real imag conj resolve_conj resolve_neg angle complex polar broadcast_tensors
"""
NAMES = _NAMES_TEXT.split()


def rule(op: OpCall) -> Rule:
    """`add(x, y)`: right-aligned broadcasting; a dim of size 1 that broadcasts has no factor."""
    if op.op_name == "where" and op.overload == "default":
        raise NoRuleError("where() of a condition alone finds places", next_step="give it values")
    shape = op.result.shape
    operands = tuple(aligned(t.shape, shape) for t in op.types)
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    return Rule(operands, (named(shape),) * len(op.results), sizes, linear=_linear(op))


def dtype_of_another(op: OpCall) -> Rule:
    """`x.type_as(y)`: of y nothing is read but its dtype."""
    shape = shape_of(op, "self")
    other = tuple(() for _ in shape_of(op, "other"))
    return describe(op, {"self": named(shape), "other": other}, named(shape))


def membership(op: OpCall) -> Rule:
    """`isin(elements, test_elements)`: every element looks at all test elements."""
    elements = op.named("elements")
    shape = op.types[elements.index].shape if isinstance(elements, Operand) else ()
    operands = {"elements": named(shape)}
    if isinstance(op.named("test_elements"), Operand):
        operands["test_elements"] = named(shape_of(op, "test_elements"), "_t")
    return describe(op, operands, named(op.result.shape))


def buckets(op: OpCall) -> Rule:
    """`bucketize(x, boundaries)`: every element looks at all boundaries."""
    shape = shape_of(op, "self")
    return describe(op, {"self": named(shape), "boundaries": (("_k",),)}, named(shape))


def channel_slope(op: OpCall) -> Rule:
    """`prelu(x[b, c, ...], weight[c])`, or one weight for all."""
    shape, weight = shape_of(op, "self"), shape_of(op, "weight")
    dims = named(shape)
    slope = tuple((f"d{min(1, len(shape) - 1)}",) if s != 1 else () for s in weight)
    return describe(op, {"self": dims, "weight": slope}, dims)


def _linear(op: OpCall) -> tuple[frozenset[int], ...]:
    name = op.op_name.rstrip("_")
    tensors = [a for a in op.args if isinstance(a, Operand)]
    if name in _LINEAR_UNARY:
        same = (
            op.types and op.types[0].dtype.is_floating_point and op.result.dtype.is_floating_point
        )
        return (frozenset({0}),) if same else ()
    if name in ("add", "sub", "subtract"):
        # x + x is one operand used twice, still linear; x + 1 is not.
        return (frozenset(range(len(op.types))),) if len(tensors) == 2 else ()
    if name in ("mul", "multiply"):
        if len(tensors) == 2 and len(op.types) == 1:
            return ()
        return tuple(frozenset({i}) for i in range(len(op.types)))
    if name in ("div", "true_divide") and isinstance(op.args[0], Operand):
        plain = op.kwargs.get("rounding_mode") is None and len(op.types) == len(tensors)
        return (frozenset({op.args[0].index}),) if plain else ()
    return ()
