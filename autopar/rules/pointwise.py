"""Element by element ops: every dim of the result is a factor, operands broadcast to it."""

from __future__ import annotations

from autopar.op_call import OpCall, Operand
from autopar.rules.language import Dim, Dims, Rule

# Sum-preserving in their one tensor operand: f(a + b) = f(a) + f(b).
_LINEAR_UNARY = {"neg", "clone", "contiguous", "alias", "to", "_to_copy", "detach", "positive"}
_NAMES_TEXT = """
add sub rsub mul div neg abs exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal pow square sin
cos tanh sigmoid log_sigmoid relu relu6 gelu silu mish softplus elu selu celu leaky_relu
hardswish hardsigmoid hardtanh erf clamp clamp_min clamp_max minimum maximum floor ceil round
sign where masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_and
bitwise_or bitwise_not bitwise_xor __and__ __or__ remainder fmod floor_divide clone contiguous
alias to _to_copy detach positive isnan isinf isfinite threshold softshrink zeros_like ones_like
full_like empty_like addcmul addcdiv lerp nan_to_num type_as
"""
NAMES = _NAMES_TEXT.split()


def rule(op: OpCall) -> Rule:
    """`add(x, y)`: right-aligned broadcasting; a dim of size 1 that broadcasts has no factor."""
    shape = op.result.shape
    operands = tuple(_aligned(t.shape, shape) for t in op.types)
    result: Dims = tuple((f"d{i}",) for i in range(len(shape)))
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    return Rule(operands, (result,) * len(op.results), sizes, linear=_linear(op))


def _aligned(shape: tuple[int, ...], to: tuple[int, ...]) -> Dims:
    offset = len(to) - len(shape)
    dims: list[Dim] = []
    for i, size in enumerate(shape):
        dims.append((f"d{i + offset}",) if size == to[i + offset] else ())
    return tuple(dims)


def _linear(op: OpCall) -> tuple[frozenset[int], ...]:
    name = op.op_name.rstrip("_")
    tensors = [a for a in op.args if isinstance(a, Operand)]
    if name in _LINEAR_UNARY:
        same = (
            op.types and op.types[0].dtype.is_floating_point and op.result.dtype.is_floating_point
        )
        return (frozenset({0}),) if same else ()
    if name in ("add", "sub"):
        # x + x is one operand used twice, still linear; x + 1 is not.
        return (frozenset(range(len(op.types))),) if len(tensors) == 2 else ()
    if name == "mul":
        if len(tensors) == 2 and len(op.types) == 1:
            return ()
        return tuple(frozenset({i}) for i in range(len(op.types)))
    if name == "div" and "rounding_mode" not in op.kwargs and isinstance(op.args[0], Operand):
        return (frozenset({op.args[0].index}),) if len(op.types) == len(tensors) else ()
    return ()
