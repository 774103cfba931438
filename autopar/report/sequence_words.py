"""How a plan splits the sequence over cp, and what attention does about it, in words."""

from __future__ import annotations

from autopar.plan_document import Plan
from autopar.report.words import ATTENTIONS, op_of

_WAYS = {
    "shard q": "keys and values are gathered, queries stay (all-gather)",
    "shard g": "an all-to-all from positions to heads and one back (Ulysses)",
}


def sequence_sentence(plan: Plan) -> str:
    """One sentence; '' where cp is 1."""
    ranks = plan.mesh.cp
    if ranks == 1:
        return ""
    length = plan.sizes.get("sequence")
    part = f"{length // ranks:,} of {length:,} positions" if length else "a part"
    text = f"Each of {ranks} cp ranks holds {part} of every sample"
    ways: dict[str, list[str]] = {}
    for kind, chosen in plan.cp_placements.items():
        for op, strategy in chosen.items():
            if op_of(op) in ATTENTIONS:
                ways.setdefault(_WAYS.get(strategy, f"as {strategy}"), []).append(kind)
    told = [f"{way} in {', '.join(dict.fromkeys(kinds))}" for way, kinds in ways.items()]
    return f"{text}; for attention {'; '.join(told)}." if told else f"{text}."
