"""How a plan splits the sequence over cp, and what attention does about it, in words."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.plan_document import Plan
from autopar.report.words import ATTENTIONS, op_of, strategy_words

WAYS = {
    "shard q": "keys and values are gathered, queries stay (all-gather)",
    "shard g": "an all-to-all from positions to heads and one back (Ulysses)",
    "shard h": "an all-to-all from positions to heads and one back (Ulysses)",
    "shard b": "an all-to-all from positions to samples and one back",
    "replicate": "all is gathered, and every rank computes all of it",
}
SHORT = {
    "shard q": "context-parallel: all-gather of keys and values",
    "shard g": "head-parallel: all-to-all (Ulysses)",
    "shard h": "head-parallel: all-to-all (Ulysses)",
    "shard b": "batch-parallel: all-to-all",
    "replicate": "replicated: all-gather",
}
# What the rewrite for cp inserts has names of its own, as torch has a `slice` too.
_INSERTED = "cp_"


def on_cp_words(op: str, strategy: str, placement: str = "", dims: int = 0) -> str:
    """`strategy_words` for the cp axis, where attention is told with its collective."""
    if op_of(op) in ATTENTIONS:
        return SHORT.get(strategy, f"as {strategy}")
    return strategy_words(op, strategy, placement, dims)


def inserted_words(op: str) -> str:
    """`cp_slice` -> `taking own positions`, `cp_all_gather` -> `all-gather over cp`; other names
    stay."""
    if not op.startswith(_INSERTED):
        return op
    name = op.removeprefix(_INSERTED)
    if name in ("slice", "slice_pad"):
        return "taking own positions"
    return f"{name.replace('_', '-')} over cp"


def attention_ways(plan: Plan, words: Mapping[str, str] = WAYS) -> dict[str, list[str]]:
    """How attention gets its keys and values on cp: the words -> the kinds of blocks that do so."""
    ways: dict[str, list[str]] = {}
    for kind, chosen in plan.cp_placements.items():
        for op, strategy in chosen.items():
            if op_of(op) in ATTENTIONS:
                kinds = ways.setdefault(words.get(strategy, f"as {strategy}"), [])
                kinds += [kind] if kind not in kinds else []
    return ways


def part_text(plan: Plan) -> str:
    """`8 of 16 positions`, as each cp rank holds of every sample."""
    length = plan.sizes.get("sequence")
    return f"{length // plan.mesh.cp:,} of {length:,} positions" if length else "a part"


def sequence_sentence(plan: Plan) -> str:
    """One sentence; '' where cp is 1."""
    if plan.mesh.cp == 1:
        return ""
    text = f"Each of {plan.mesh.cp} cp ranks holds {part_text(plan)} of every sample"
    told = [f"{way} in {', '.join(kinds)}" for way, kinds in attention_ways(plan).items()]
    return f"{text}; for attention {'; '.join(told)}." if told else f"{text}."
