"""What a repeated block keeps for its backward, as a formula in batch, sequence, tp and cp degree.

The saved bytes of the block, rewritten as the plan places it, are a polynomial: every saved tensor
has a size in b and s, and is whole or a t-th part on a rank, of whole sequences or a c-th part of
them. The polynomial is found by evaluating the rewritten graph at as many (b, s, t, c) as it has
terms, in exact arithmetic, and holds only if the plan's own sizes, which are none of these, agree.
For a GPT block that gives the formulas of Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (2022), section 4, plus the statistics of its norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import sympy

from autopar.errors import AutoparError
from autopar.op_call import Bindings
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.blocks import Block, Blocks
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.passes.rewrite.split_experts import split_experts
from autopar.passes.rewrite.split_sequence import split_sequence
from autopar.placement import Placement
from autopar.program import Program, tensors_of
from autopar.workflow.rank_block import to_rank_block

B, S, T, C = sympy.symbols("b s t c", positive=True)


@dataclass(frozen=True)
class ActivationFormula:
    """`text` in bytes per micro-batch and rank, with b samples of s tokens over t ranks of tp and c
    of cp, and h the width of what passes between blocks; `values` are those of the plan, `bytes`
    what they give.
    """

    block: str
    count: int
    text: str
    bytes: int
    values: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "count": self.count,
            "activations": self.text,
            "bytes": self.bytes,
            "values": dict(self.values),
        }


def activation_formula(
    program: Program,
    blocks: Blocks,
    placements: Mapping[str, Mapping[str, str]],
    boundary: str,
    tp: int,
    sizes: Mapping[str, int],
    *,
    cp: int = 1,
    cp_placements: Mapping[str, Mapping[str, str]] | None = None,
    ep: int = 1,
) -> ActivationFormula | None:
    """The formula of the block that is repeated most; None when none is, or none holds exactly.

    `sizes`: batch (of a micro-batch) and sequence of the plan; `placements[kind]` as in a plan.
    """
    kind = max(blocks.kinds, key=lambda k: len(blocks.kinds[k]))
    if len(blocks.kinds[kind]) < 2:
        return None
    block = blocks.block(kind)
    placed = _Placed(
        placements.get(kind, {}),
        Placement.parse(boundary),
        (cp_placements or {}).get(kind, {}),
        ep,
    )

    def saved(b: int, s: int, t: int, c: int) -> int:
        return _saved_bytes(program, block, placed, t, c, {**sizes, "batch": b, "sequence": s})

    b, s = sizes["batch"], sizes.get("sequence", 1)
    expression = None
    for batches in ([2 * b, 4 * b] if "batch" in program.symbols else [b], [b]):
        try:
            expression = _fitted(saved, batches, s, (tp, cp), "sequence" in program.symbols)
            break
        except AutoparError:
            # Strategies are named by the factors of an op, and a batch of 1 is no factor: then
            # the formula is for that batch alone.
            continue
    own = {B: b, S: s, T: tp, C: cp}
    if expression is None or expression.subs(own) != saved(b, s, tp, cp):
        return None
    width = _width(block)
    values = {"b": b, "s": s, "t": tp, "c": cp, "h": width}
    text = _text(expression, width)
    shown = {k: v for k, v in values.items() if k in text}
    count = int(expression.subs(own))
    return ActivationFormula(kind, len(blocks.kinds[kind]), text, count, shown)


@dataclass(frozen=True)
class _Placed:
    """How a block lies on tp, what passes to it, how it lies on cp, and how many ranks split its
    experts."""

    on_tp: Mapping[str, str]
    boundary: Placement
    on_cp: Mapping[str, str]
    ep: int


def _saved_bytes(
    program: Program, block: Block, placed: _Placed, tp: int, cp: int, sizes: Mapping[str, int]
) -> int:
    graph, slots = cut_block(program, block, Bindings(program.symbols, dict(sizes)))
    if cp > 1:
        split_sequence(block.name, graph, slots, placed.on_cp, cp)
    if placed.ep > 1:
        split_experts(graph, placed.ep)
    chosen = placed.on_tp if tp > 1 else {}
    to_rank_block(block.name, graph, slots, chosen, placed.boundary, tp)
    return block_memory(graph, slots).saved


def _fitted(
    saved: Callable[[int, int, int, int], int],
    batches: list[int],
    length: int,
    ranks: tuple[int, int],
    symbolic: bool,
) -> sympy.Expr:
    # Twice as many ranks must divide what is split: even multiples of the plan's own sizes.
    most = 4 if min(ranks) > 1 else 2
    lengths = [most * length * i for i in (1, 2, 3)] if symbolic else [length]
    degrees = [[n, 2 * n] if n > 1 else [1] for n in ranks]
    return _polynomial(saved, batches, lengths, *degrees)


def _polynomial(
    saved: Callable[[int, int, int, int], int],
    batches: list[int],
    lengths: list[int],
    on_tp: list[int],
    on_cp: list[int],
) -> sympy.Expr:
    """The polynomial in b, s, 1/t and 1/c through all the points."""
    sampled = (batches, lengths, on_tp, on_cp)
    terms = [
        B**i * S**j / (T**k * C**n) for i, j, k, n in product(*(range(len(v)) for v in sampled))
    ]
    points = list(product(*sampled))
    rows = [[term.subs({B: b, S: s, T: t, C: c}) for term in terms] for b, s, t, c in points]
    measured = sympy.Matrix([saved(*point) for point in points])
    found = sympy.Matrix(rows).LUsolve(measured)
    return sum((c * term for c, term in zip(found, terms, strict=True)), sympy.Integer(0))


def _width(block: Block) -> int:
    """Size of the last dim of what the block hands on with a gradient; 0 when that is no number."""
    for node in block.writes:
        for value in tensors_of(node.meta.get("val")):
            if node.meta.get("requires_grad") and value.dim() and isinstance(value.shape[-1], int):
                return int(value.shape[-1])
    return 0


def _text(expression: sympy.Expr, width: int) -> str:
    """`b·s·(12·h + 16 + 48·h/t)`, `b·s/c·(…)`; h stands for the width, where an amount is at least
    that."""
    polynomial = sympy.Poly(sympy.expand(expression * T * C), B, S, T, C)
    by_size: dict[tuple[int, int, int], dict[int, Any]] = {}
    for (i, j, k, n), coefficient in polynomial.terms():
        by_size.setdefault((i, j, n), {})[k] = coefficient
    parts = []
    for (i, j, n), found in sorted(by_size.items(), reverse=True):
        size = "·".join(["b"] * bool(i) + ["s" if j == 1 else "s²"] * bool(j))
        size = f"{size or 1}/c" if n == 0 else size
        whole, split = _amounts(found.get(1, 0), width), _amounts(found.get(0, 0), width)
        amounts = list(whole)
        if split:
            amounts.append(f"{split[0]}/t" if len(split) == 1 else f"({' + '.join(split)})/t")
        if not amounts:  # nothing is kept, as of a frozen block
            continue
        if len(amounts) > 1:
            parts.append(f"{size}·({' + '.join(amounts)})" if size else " + ".join(amounts))
        else:
            number, over, _ = amounts[0].partition("/t")
            parts.append("·".join([number, size] if size else [number]) + over)
    return " + ".join(parts) or "0"


def _amounts(coefficient: Any, width: int) -> list[str]:
    """Bytes as a multiple of the width and a rest."""
    times, rest = 0, coefficient
    if width and coefficient >= width and sympy.Integer(coefficient) == coefficient:
        times, rest = divmod(int(coefficient), width)
    return [f"{times}·h"] * bool(times) + [str(rest)] * bool(rest)
