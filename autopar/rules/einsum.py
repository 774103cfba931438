"""einsum: its equation is already a rule."""

from __future__ import annotations

import re
from math import prod

from autopar.op_call import OpCall, Operand
from autopar.rules.language import Dims, Rule

_OPERAND = re.compile(r"^[A-Za-z]*(\.\.\.)?[A-Za-z]*$")


def einsum(op: OpCall) -> Rule | None:
    """`bid,bjd->bij`; an ellipsis stands for dims that broadcast. A repeated letter has no rule."""
    equation, tensors = op.named("equation"), op.named("tensors")
    if not isinstance(equation, str) or len(op.types) != len(tensors):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(tensors) or any(not _OPERAND.match(t) for t in (*texts, right)):
        return None
    shapes = [op.types[t.index].shape for t in tensors if isinstance(t, Operand)]
    spread = max(
        (len(s) - len(t) + 3 for t, s in zip(texts, shapes, strict=True) if "..." in t), default=0
    )
    names = [_letters(t, len(s), spread) for t, s in zip(texts, shapes, strict=True)]
    if any(len(set(n)) != len(n) for n in names):
        return None
    out = _letters(right, len(op.result.shape), spread) if arrow else _implicit(names, spread)
    sizes: dict[str, int] = {}
    for letters, shape in zip(names, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    by_index: dict[int, Dims] = {}
    for tensor, letters, shape in zip(tensors, names, shapes, strict=True):
        # A size of 1 broadcasts to the others'.
        pairs = zip(letters, shape, strict=True)
        by_index[tensor.index] = tuple((x,) if s == sizes[x] else () for x, s in pairs)
    return Rule(
        tuple(by_index[i] for i in range(len(op.types))),
        (tuple((x,) for x in out),),
        sizes,
        linear=tuple(frozenset({i}) for i in range(len(op.types))),
        flops=_flops(names, out, sizes),
    )


def _letters(text: str, rank: int, spread: int) -> list[str]:
    """One name for each dim; the dims of an ellipsis are counted from the right."""
    before, dots, after = text.partition("...")
    count = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"e{spread - count + i}" for i in range(count)), *after]


def _implicit(names: list[list[str]], spread: int) -> list[str]:
    """Without an arrow: the ellipsis, then the letters that occur once, in order."""
    flat = [x for letters in names for x in letters if len(x) == 1]
    once = sorted(x for x in set(flat) if flat.count(x) == 1)
    used = {x for letters in names for x in letters}
    return [*(f"e{i}" for i in range(spread) if f"e{i}" in used), *once]


def _flops(names: list[list[str]], out: list[str], sizes: dict[str, int]) -> float:
    """Products of pairs from the left, as torch does them without a better order; a product
    that sums over nothing, or a letter that only one operand has, counts nothing."""
    total = 0.0
    left = list(names[0])
    for position, right in enumerate(names[1:], 1):
        later = set(out).union(*map(set, names[position + 1 :]))
        shared = set(left) & set(right)
        union = [x for x in dict.fromkeys([*left, *right]) if x in later or x in shared]
        if shared - later:
            total += 2.0 * prod(sizes[x] for x in union)
        left = [x for x in union if x in later]
    return total
