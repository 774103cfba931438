"""The name of a term of a sum: the expression of the model's code that is added.

    z = router(x).logsumexp(-1).mean()
    loss = loss + 0.1 * balance(x) - z

The names are "0.1 * balance(x)" and "router(x).logsumexp(-1).mean()".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch import fx

from autopar.program import user_line

# From a sum to a term of it: ops, each with the place of the argument that leads on.
Path = Sequence[tuple[fx.Node, int]]
_OPERATORS: dict[str, type[ast.AST]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "neg": ast.USub,
}


@dataclass(frozen=True, slots=True)
class _Frame:
    """`where`: file and line. `function`: file and function. `code`: the line's text."""

    where: str
    function: tuple[str, str]
    code: str


def term_name(path: Path, node: fx.Node) -> str:
    """Follows the ops of the path through the expressions of their lines; a term that was computed
    on another line of that function has the name of what was assigned there."""
    frames = _frames(node)
    at: _Frame | None = None
    expression: ast.expr | None = None
    for op, place in path:
        *_, frame = (at, *_frames(op))
        if frame is None:
            continue
        if at is None or frame.where != at.where or isinstance(expression, ast.Name):
            expression = _computed(frame.code)
        at = frame
        expression = _operand(expression, op, place)
    if at is not None and any(frame.where == at.where for frame in frames):
        if expression is not None and not isinstance(expression, ast.Name):
            return _text(at.code, _each_of_sum(expression) or expression)
        frames = [frame for frame in frames if frame.where == at.where]
    elif at is not None:
        frames = [frame for frame in frames if frame.function == at.function] or frames
    if not frames:
        return user_line(node) or node.name
    return _text(frames[-1].code, _made(frames[-1].code, expression))


def _frames(node: fx.Node) -> list[_Frame]:
    """Of the user's code, outermost first."""
    trace = str(node.meta.get("stack_trace") or "")
    rows = re.findall(r'File "(.+?)", line (\d+), in (.+)\n[ \t]*(?!File )(.*)', trace)
    found = [_Frame(f"{path}:{line}", (path, name), _bare(code)) for path, line, name, code in rows]
    own = [f for f in found if "/torch/" not in f.where and "<eval_with_key>" not in f.where]
    return own or found


def _bare(code: str) -> str:
    """Without the operator that a line of a longer expression begins with."""
    return re.sub(r"^[+-]\s+", "", code.strip())


def _text(code: str, expression: ast.expr | None) -> str:
    found = ast.get_source_segment(code, expression) if expression is not None else None
    return found or re.sub(r"^\w+\s*[+-]?=\s*", "", re.sub(r"\s*#.*", "", code))


def _statements(code: str) -> list[ast.stmt]:
    """Those of the line, inside of loops and the like; none where it is a part of one."""
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return []
    while len(body) == 1 and isinstance(body[0], ast.For | ast.If | ast.While | ast.With):
        body = body[0].body
    return body


def _made(code: str, named: ast.expr | None) -> ast.expr | None:
    """What the line assigns to that name; to any, or returns, where it is one statement."""
    statements = _statements(code)
    if len(statements) == 1 or not isinstance(named, ast.Name):
        return getattr(statements[0], "value", None) if len(statements) == 1 else None
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == named.id for t in targets):
            return getattr(statement, "value", None)
    return None


def _computed(code: str) -> ast.expr | None:
    """What the ops of a line compute at last: a sum without the call around it; of `a += b`,
    a + b."""
    *_, statement = (None, *_statements(code))
    if isinstance(statement, ast.AugAssign):
        before = ast.Name("", ast.Load())
        return ast.BinOp(before, statement.op, statement.value)
    value: ast.expr | None = getattr(statement, "value", None)
    return None if value is None else next(filter(_is_operation, ast.walk(value)), value)


def _is_operation(part: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(part, ast.Call):
        return _called(part) in _OPERATORS or _each_of_sum(part) is not None
    return isinstance(part, ast.BinOp | ast.UnaryOp)


def _operand(expression: ast.expr | None, op: fx.Node, place: int) -> ast.expr | None:
    """The part of the op's expression that is its argument; none where that is not clear."""
    name = str(getattr(op.target, "_opname", "")).removesuffix("_")
    if name not in _OPERATORS or expression is None:
        return expression
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, _OPERATORS[name]):
        return _side(expression, op, place)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, _OPERATORS[name]):
        return expression.operand
    if isinstance(expression, ast.Call) and _called(expression) in _OPERATORS:
        return expression.args[place] if len(expression.args) == 2 else None
    # Of the other calls only `sum` adds by ops of this line.
    return expression if _each_of_sum(expression) is not None else None


def _side(expression: ast.BinOp, op: fx.Node, place: int) -> ast.expr | None:
    if all(isinstance(argument, fx.Node) for argument in op.args[:2]):
        return (expression.left, expression.right)[place]
    # One is a number, which may be on the other side than in the op, and be a name.
    sides = [expression.left, expression.right]
    for plain in (ast.Constant, ast.Constant | ast.Name | ast.Attribute):
        rest = [side for side in sides if not isinstance(side, plain)]
        if len(rest) == 1:
            return rest[0]
    return None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _each_of_sum(expression: ast.expr) -> ast.expr | None:
    """What `sum(...)` adds: one expression where there is one; none where it is no such call."""
    if not isinstance(expression, ast.Call) or not expression.args:
        return None
    if not isinstance(expression.func, ast.Name) or expression.func.id != "sum":
        return None
    every = expression.args[0]
    return every.elt if isinstance(every, ast.GeneratorExp | ast.ListComp) else expression
