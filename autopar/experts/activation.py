"""The function between an expert's two projections, as text inside the call of the op.

    silu(gate) * up        a = split.Tensor(x, w // 2, -1); b = silu.default(a[0]); ...

A model keeps its own function (clamped gates, other activations): it is traced once, and equal
layers get equal text, so that graphs can be compared, copied and sent to other processes. The text
is Python: `x` are the projected rows [rows, w], each step is an op of aten, and sizes are constants
or multiples of `w`, so that it holds for a shard of the columns too.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.errors import CaptureError

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]
# Rows and columns to trace at, in no proportion; a number that differs and is no multiple of the
# columns is refused.
_SIZES = ((3, 24), (7, 40))
_CHECKED = (5, 56)


class NoText(CaptureError):
    """A function that the text can't hold; `CaptureError` as that is what fails without it."""


def text_of(function: Function, dtype: torch.dtype, width: int) -> str:
    """The text of a function of rows [rows, w]; `width`: how many times w is an expert's inner
    size (2 with a gate).

    Raises `NoText` where it reads tensors of its own, draws random numbers, depends on the sizes in
    another way than by multiples of w, or gives another width than w / `width`.
    """
    traced = [_trace(function, rows, columns, dtype) for rows, columns in _SIZES]
    text = _text(traced[0], traced[1])
    rows, columns = _CHECKED
    x = _probe(rows, columns, dtype)
    wide = _probe(rows, columns, torch.float64)
    try:
        with torch.no_grad():
            expected, got = function(x), evaluate(text, [x])
            some, all_of = evaluate(text, [wide[:3]]), evaluate(text, [wide])[:3]
    except Exception as error:
        raise _refused(f"at other sizes, {type(error).__name__}: {error}") from error
    if tuple(expected.shape) != (rows, columns // width):
        raise _refused(f"it turns {columns} columns into the shape {tuple(expected.shape)}")
    if not torch.equal(expected, got):
        raise _refused("it gives other values at other sizes")
    if not _alike(some, all_of):
        raise _refused("rows depend on each other")
    return text


def evaluate(text: str, parts: list[Tensor]) -> Tensor:
    """The function of the columns of `parts` joined: [rows, w] -> [rows, inner size].

    Two parts that the text splits in the middle at once are not joined.
    """
    program = _program(text)
    width = sum(p.shape[-1] for p in parts)
    values: list[Any] = [None]
    if not (len(parts) == 2 and program.halves):
        values[0] = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    for step in program.steps:
        if len(values) == 1 and values[0] is None:
            values.append(parts)
            continue
        args, kwargs = _fill(step.args, values, width), _fill(step.kwargs, values, width)
        values.append(step.target(*args, **kwargs))
        for number in step.last_reads:
            values[number] = None
    found: Tensor = _fill(program.result, values, width)
    return found


@lru_cache(maxsize=256)
def is_columnwise(text: str, parts: int) -> bool:
    """Whether a shard of the columns (of each of `parts`) gives that shard of the result."""
    rows, columns = _CHECKED
    x = _probe(rows, columns, torch.float64)
    whole = list(x.chunk(parts, -1))
    some = [p[:, : p.shape[-1] // 2] for p in whole]
    with torch.no_grad():
        result, part = evaluate(text, whole), evaluate(text, some)
    return part.shape[-1] * 2 == result.shape[-1] and _alike(result[:, : part.shape[-1]], part)


def _alike(a: Tensor, b: Tensor) -> bool:
    """But for rounding: kernels take the last elements of a row by other instructions."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def _probe(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def _refused(why: str) -> NoText:
    return NoText(
        f"the function between the projections of an expert can't be kept: {why}",
        next_step="use a function of each row that is made of torch's ops alone",
    )


# From a function to text.


def _trace(function: Function, rows: int, columns: int, dtype: torch.dtype) -> fx.Graph:
    try:
        with torch.no_grad():
            traced = make_fx(lambda x: function(x))(_probe(rows, columns, dtype))
    except Exception as error:
        raise _refused(f"{type(error).__name__}: {error}") from error
    traced.graph.eliminate_dead_code()
    return traced.graph


def _text(first: fx.Graph, second: fx.Graph) -> str:
    """One text for both graphs; `NoText` where they differ by more than the width."""
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    fresh = (f"v{i}" for i in count())
    nodes, others = list(first.nodes), list(second.nodes)
    if [n.target for n in nodes] != [n.target for n in others]:
        raise _refused("other ops run at other sizes")
    for node, other in zip(nodes, others, strict=True):
        if node.op == "placeholder":
            names[node] = "x"
        elif node.op == "output":
            lines.append(_term(node.args[0], other.args[0], names))
        elif node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            names[node] = f"{names[source]}[{index}]"
        else:
            lines.append(_step(node, other, names, next(fresh)))
    return "; ".join(lines)


def _step(node: fx.Node, other: fx.Node, names: dict[fx.Node, str], name: str) -> str:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise _refused(f"it reads or calls {target}")
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        raise _refused(f"{target} draws random numbers or writes in place")
    given = [_term(a, b, names) for a, b in zip(node.args, other.args, strict=True)]
    given += [f"{k}={_term(v, other.kwargs[k], names)}" for k, v in node.kwargs.items()]
    names[node] = name
    return f"{name} = {target._opname}.{target._overloadname}({', '.join(given)})"


def _term(value: Any, other: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        inner = [_term(a, b, names) for a, b in zip(value, other, strict=True)]
        return f"[{', '.join(inner)}]"
    if isinstance(value, torch.dtype):
        return f"dtype.{str(value).removeprefix('torch.')}"
    if type(value) is int and value != other:
        shares = [Fraction(v, w) for v, (_, w) in zip((value, other), _SIZES, strict=True)]
        if shares[0] != shares[1]:
            raise _refused(f"the number {value} follows from the sizes in no simple way")
        times, of = shares[0].numerator, shares[0].denominator
        return f"w * {times} // {of}" if times != 1 else f"w // {of}" if of != 1 else "w"
    if value is None or isinstance(value, bool | int | float | str):
        if repr(value) != repr(other):
            raise _refused(f"the value {value!r} follows from the sizes")
        return f"float({str(value)!r})" if repr(value) in ("inf", "-inf", "nan") else repr(value)
    raise _refused(f"an op reads {value!r}")


# From text to calls. Only what `_text` writes is read: nothing else of Python.


@dataclass
class _Step:
    """`last_reads`: values, by number, that no later step reads."""

    target: Any
    args: list[Any]
    kwargs: dict[str, Any]
    last_reads: tuple[int, ...] = ()


@dataclass
class _Program:
    """`halves`: whether the rows are only split in the middle."""

    steps: list[_Step]
    result: Any
    halves: bool


@lru_cache(maxsize=256)
def _program(text: str) -> _Program:
    order = {"x": 0}
    steps: list[_Step] = []
    *body, last = ast.parse(text).body
    for line in body:
        assert isinstance(line, ast.Assign) and isinstance(line.value, ast.Call)
        name, call = line.targets[0], line.value
        assert isinstance(name, ast.Name) and isinstance(call.func, ast.Attribute)
        assert isinstance(call.func.value, ast.Name)
        target = getattr(getattr(torch.ops.aten, call.func.value.id), call.func.attr)
        args = [_read(a, order) for a in call.args]
        kwargs = {str(k.arg): _read(k.value, order) for k in call.keywords}
        steps.append(_Step(target, args, kwargs))
        order[name.id] = len(steps)
    assert isinstance(last, ast.Expr)
    result = _read(last.value, order)
    seen = set(_reads(result))
    for step in reversed(steps):
        read = set(_reads([step.args, list(step.kwargs.values())]))
        step.last_reads = tuple(read - seen)
        seen |= read
    halves = text.startswith("v0 = split.Tensor(x, w // 2, -1);")
    halves = halves and 0 in steps[0].last_reads
    return _Program(steps, result, halves)


def _reads(term: Any) -> Iterator[int]:
    if isinstance(term, list):
        for each in term:
            yield from _reads(each)
    elif isinstance(term, _Part) and term.value is not None:
        yield term.value


def _read(term: ast.expr, order: dict[str, int]) -> Any:
    """A constant, or a function of the values so far and the width."""
    if isinstance(term, ast.Constant):
        return term.value
    if isinstance(term, ast.UnaryOp) and isinstance(term.op, ast.USub):
        return -_read(term.operand, order)
    if isinstance(term, ast.List):
        return [_read(e, order) for e in term.elts]
    if isinstance(term, ast.Attribute):
        return getattr(torch, term.attr)
    if isinstance(term, ast.Call):
        return float(_read(term.args[0], order))
    if isinstance(term, ast.Name) and term.id == "w":
        return _Part(None, 1)
    if isinstance(term, ast.Name):
        return _Part(order[term.id], None)
    if isinstance(term, ast.Subscript):
        return _Part(_read(term.value, order).value, _read(term.slice, order))
    assert isinstance(term, ast.BinOp)
    left, right = _read(term.left, order), _read(term.right, order)
    share = left.item * (right if isinstance(term.op, ast.Mult) else Fraction(1, right))
    return _Part(None, share)


class _Part:
    """Value number `value` (its member `item`), or, without one, `item` times the width."""

    def __init__(self, value: int | None, item: Any) -> None:
        self.value = value
        self.item = item


def _fill(term: Any, values: list[Any], width: int) -> Any:
    if isinstance(term, list):
        return [_fill(t, values, width) for t in term]
    if isinstance(term, dict):
        return {k: _fill(t, values, width) for k, t in term.items()}
    if not isinstance(term, _Part):
        return term
    if term.value is None:
        return int(term.item * width)
    found = values[term.value]
    return found if term.item is None else found[term.item]
