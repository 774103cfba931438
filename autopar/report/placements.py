"""How each kind of block is laid over the tp or the cp axis, in the field's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.plan_document import Plan
from autopar.report.block_picture import BlockPicture
from autopar.report.fold import counted
from autopar.report.sequence_words import on_cp_words
from autopar.report.words import MAIN_OPS, RENAMES, op_of, rank_of, strategy_words


@dataclass(frozen=True, slots=True)
class BlockWords:
    """`main`: (words, ops), as (`column-parallel`, `q_proj, k_proj`); `rest`: words of others."""

    name: str
    count: int
    main: tuple[tuple[str, str], ...]
    rest: str


@dataclass(frozen=True, slots=True)
class _Op:
    name: str
    op: str
    module: str
    words: str


def block_words(
    plan: Plan, pictures: Sequence[BlockPicture] = (), axis: str = "tp"
) -> list[BlockWords]:
    """One entry per kind of block. Pictures add module names; the plan alone gives graph names."""
    by_name = {picture.name: picture for picture in pictures}
    if axis == "cp":
        return [_on_cp(plan, block, by_name.get(block)) for block in plan.cp_placements]
    found = []
    for block, strategies in plan.placements.items():
        picture = by_name.get(block)
        ops = []
        for name, strategy in strategies.items():
            op = picture.op(name) if picture else None
            kind = op.op if op else op_of(name)
            if op.trivial if op else kind in RENAMES:
                continue
            placement, dims = (op.placement, len(op.shape)) if op else ("", 0)
            words = strategy_words(kind, strategy, placement, dims)
            ops.append(_Op(name, kind, op.module if op else "", words))
        count = len(plan.kinds.get(block, ())) or (picture.count if picture else 1)
        found.append(_told(block, count, ops))
    return found


def _on_cp(plan: Plan, block: str, picture: BlockPicture | None) -> BlockWords:
    """Pictures are of what one cp rank runs: they know modules, not this axis."""
    ops = []
    for name, strategy in plan.cp_placements[block].items():
        op = picture.op(name) if picture else None
        kind = op_of(name)
        if kind not in RENAMES:
            dims = len(op.shape) if op else 0
            words = on_cp_words(kind, strategy, dims=dims)
            ops.append(_Op(name, kind, op.module if op else "", words))
    count = len(plan.kinds.get(block, ())) or (picture.count if picture else 1)
    return _told(block, count, ops)


def _told(block: str, count: int, ops: list[_Op]) -> BlockWords:
    main = sorted((op for op in ops if op.op in MAIN_OPS), key=lambda op: rank_of(op.op))
    rest = [op for op in ops if op.op not in MAIN_OPS]
    groups: dict[str, list[_Op]] = {}
    for op in main:
        groups.setdefault(op.words, []).append(op)
    told = tuple((words, _labels(members)) for words, members in groups.items())
    return BlockWords(block, count, told, counted(op.words for op in rest))


def _labels(ops: Iterable[_Op]) -> str:
    """The module's own name; for ops that share one (attention) the op's name."""
    ops = list(ops)
    modules = [op.module for op in ops]
    labels = []
    for op in ops:
        leaf = op.module.rsplit(".", 1)[-1]
        inside = leaf if leaf and modules.count(op.module) == 1 and op.op in _NAMED else ""
        labels.append(inside or (op.op if op.module else op.name))
    return ", ".join(labels)


_NAMED = {"linear", "addmm", "embedding", "vocab_embedding", "conv1d", "experts"}


def short_module(module: str, picture: BlockPicture) -> str:
    """The module path without what all ops of the block have in common."""
    paths = [op.module.split(".") for op in picture.ops if op.module]
    common = 0
    while paths and all(len(p) > common and p[common] == paths[0][common] for p in paths):
        common += 1
    if len(picture.ops) == 1 or len({tuple(p) for p in paths}) == 1:
        common = max(0, common - 1)
    return ".".join(module.split(".")[common:])
