"""Why no configuration has a legal cut: which stage can't be one.

Stages of given cuts that hold no parameter are refused before: see `space`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.block_cost import BlockCost, tie_groups
from autopar.cost.setting import Setting
from autopar.search.chain import Chain
from autopar.search.interleaved.candidates import candidates
from autopar.search.options import SearchOptions, stage_starts

GRADIENTS = "values without gradient pass on from it beside others: the pipeline can't send both"


def why_no_cut(
    blocks: Sequence[BlockCost], settings: Sequence[Setting], options: SearchOptions
) -> tuple[str, str]:
    """The reason, and the next step; '' and '' when there is a legal cut for some setting.

    `blocks`: the chain, at any prices; `settings`: all that are legal but for their cuts.
    """
    starts = stage_starts(options.pins, [b.name for b in blocks])
    if starts is not None:
        reasons = _wrong_stages(blocks, starts)
        step = "move these cuts (--pin cuts=...), or free cuts and pin pp alone"
        return ("; ".join(reasons), step) if reasons else ("", "")
    wanted = min(s.mesh.pp * s.chunks for s in settings)
    most = most_stages(blocks)
    if wanted <= most:
        return _tied(blocks, settings)
    reason = (
        f"the model can be cut into at most {most} stages, and the least that is asked for is"
        f" {wanted}: a stage needs a parameter, {_uncut(blocks)}"
    )
    return reason, f"choose pp (times chunks) of at most {most}, or free them"


def _tied(blocks: Sequence[BlockCost], settings: Sequence[Setting]) -> tuple[str, str]:
    """Where parts take turns and every cut leaves a rank with two copies of a parameter."""
    chain = Chain(blocks)
    if not all(s.in_turns and not len(candidates(chain, s, None)) for s in settings):
        return "", ""
    names = ", ".join(f"{g!r} ({_holders(blocks, g)})" for g in tie_groups(blocks))
    schedules = " and ".join(dict.fromkeys(s.schedule for s in settings))
    if not names:
        return "", ""
    reason = (
        f"with schedule {schedules} every cut gives one rank two parts that share a parameter, and "
        f"it would need two copies: {names}"
    )
    other = " or another number of chunks" if any(not s.turns for s in settings) else ""
    return reason, f"pin schedule=1f1b{other}, or give each its own parameter"


def _holders(blocks: Sequence[BlockCost], group: str) -> str:
    return " and ".join(b.name for b in blocks if any(t.group == group for t in b.tied))


def most_stages(blocks: Sequence[BlockCost]) -> int:
    """Into how many legal stages a chain can be cut at most."""
    found, parameters = 0, 0
    rest = sum(b.parameters for b in blocks)
    for block in blocks:
        parameters += block.parameters
        rest -= block.parameters
        if parameters and rest and block.can_end_stage:
            found, parameters = found + 1, 0
    return found + 1


def _wrong_stages(blocks: Sequence[BlockCost], starts: Sequence[int]) -> list[str]:
    found = []
    for start in starts:
        if start and not blocks[start - 1].can_end_stage:
            found.append(f"a stage can't end with block {blocks[start - 1].name!r}: {GRADIENTS}")
    return found


def _uncut(blocks: Sequence[BlockCost]) -> str:
    closed = [b.name for b in blocks[:-1] if not b.can_end_stage]
    if not closed:
        return f"and {sum(b.parameters > 0 for b in blocks)} of {len(blocks)} blocks hold some"
    more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
    return f"and none can end with block {closed[0]!r}{more}: {GRADIENTS}"
