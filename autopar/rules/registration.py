"""Rules from outside: `register_rule` makes a user's own op known to the planner."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.op_call import OpCall
from autopar.rules.language import Dim, Rule, parse, tokens_of

RuleFunction = Callable[[OpCall], Rule | None]

_REGISTERED: dict[str, RuleFunction] = {}
_OP = re.compile(r"^\w+::\w+(\.\w+)?$")
_TENSOR = re.compile(r"^(\s*(\([A-Za-z]\w*(\s+[A-Za-z]\w*)+\)|[A-Za-z]\w*\*?|_)(?=\s|$))*\s*$")


def register_rule(
    op: Any,
    rule: str | RuleFunction,
    *,
    whole: Iterable[str] = (),
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    contraction: bool = False,
    random: bool = False,
) -> None:
    """Tell how an op can be sharded: `register_rule("mylib::rows", "b* k, n k -> b* n")`.

    `op`: "namespace::name", or with ".overload"; an op of `torch.ops` or of
    `torch.library.custom_op` will do too. `rule`: the dims of its tensor operands and results in
    the order of its arguments, named by factors: `x*` are all dims that are left over, `(g c)` is a
    merged dim with its major factor first, `_` a dim that stays whole. A factor that no result has
    is summed over, unless it is in `whole`. Or a function from an `OpCall` to a `Rule`, or to None
    for calls that must be replicated.
    `whole`: factors that must not be sharded. `linear`: sets of operands (by position) in which
    the op is linear. `additive`: operands that are added to the result, as a bias. `contraction`:
    twice the product of all factors are its FLOPs. `random`: it draws random numbers.
    A later registration replaces an earlier one; every process that plans or runs needs it.
    Raises `UsageError` for a text that is no rule.
    """
    name = _name_of(op)
    if callable(rule):
        _REGISTERED[name] = rule
        return
    whole, additive = frozenset(whole), tuple(additive)
    linear = tuple(tuple(group) for group in linear)
    _check(name, rule, whole, {i for group in (*linear, additive) for i in group})

    def from_text(call: OpCall) -> Rule:
        return parse(
            rule,
            call,
            whole=whole,
            linear=linear,
            additive=additive,
            contraction=contraction,
            random=random,
        )

    _REGISTERED[name] = from_text


def registered(op: OpCall) -> RuleFunction | None:
    """The rule that was registered for this overload, else for its op."""
    if not _REGISTERED:
        return None
    name = op.registered_name
    return _REGISTERED.get(f"{name}.{op.overload}") or _REGISTERED.get(name)


def forget_rule(op: Any) -> None:
    """Undo `register_rule`; nothing happens when there was none."""
    _REGISTERED.pop(_name_of(op), None)


def _name_of(op: Any) -> str:
    text = op
    if not isinstance(op, str):
        # A packet, or what torch.library.custom_op returns.
        text = getattr(op, "_qualified_op_name", None) or getattr(op, "_qualname", None)
    if isinstance(op, torch._ops.OpOverload):
        text = f"{op._schema.name}.{op._overloadname}"
    if not isinstance(text, str) or not _OP.match(text):
        raise UsageError(
            f"{op!r} names no op", next_step='give "namespace::name", as in register_rule("my::op")'
        )
    return text


def _check(name: str, text: str, whole: frozenset[str], operands: set[int]) -> None:
    """A text that can't be a rule of any call is refused when it is registered."""
    if text.count("->") != 1:
        raise _refused(name, text, "it needs one '->' between operands and results")
    for part in re.split(r",|->", text):
        if not _TENSOR.match(part):
            raise _refused(name, text, f"{part.strip()!r} is no list of dims")
    left, right = tokens_of(text)
    for dims in (*left, *right):
        _check_tensor(name, text, dims)
    known = {f for dims in left for dim in dims for f in dim}
    new = sorted({f for dims in right for dim in dims for f in dim} - known - {"_"})
    if new:
        raise _refused(name, text, f"factor {new[0]!r} is in no operand: write '_' for a new dim")
    starred = {f for f in known if f.endswith("*")}
    clash = sorted(f for f in known - starred if f.rstrip("0123456789") + "*" in starred)
    if clash:
        raise _refused(name, text, f"factor {clash[0]!r} has the name of a list of dims")
    unknown = sorted(whole - known)
    if unknown:
        raise _refused(name, text, f"whole={unknown[0]!r} is no factor of it")
    outside = sorted(i for i in operands if not 0 <= i < len(left))
    if outside:
        raise _refused(name, text, f"it has no operand number {outside[0]}")


def _check_tensor(name: str, text: str, dims: list[Dim]) -> None:
    factors = [f for dim in dims for f in dim if f != "_"]
    twice = sorted({f for f in factors if factors.count(f) > 1})
    if twice:
        raise _refused(name, text, f"factor {twice[0]!r} occurs twice in one tensor")
    starred = [f for f in factors if f.endswith("*")]
    if len(starred) > 1:
        raise _refused(name, text, "one tensor has two lists of left-over dims")


def _refused(name: str, text: str, why: str) -> UsageError:
    return UsageError(
        f"rule {text!r} of {name}: {why}",
        next_step='write the dims of each operand, then of each result: "b* k, n k -> b* n"',
    )
