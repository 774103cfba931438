"""The five memory terms of the fullest rank of a plan as formulas with their numbers.

Each term is told in parts that add up to it: what the stated model (`autopar.cost.memory`) gives in
closed form, in elements and degrees, and what only the fullest moment says: what is gathered, not
made yet, rebuilt, or worked with just then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from autopar.block_cost import FULL, BlockCost, Held
from autopar.cost import memory
from autopar.cost.chunked_moment import ChunkPhase
from autopar.cost.evaluate import Evaluation, evaluate, rank_memory
from autopar.cost.fullest_moment import StageMoments
from autopar.cost.memory import StageMemory
from autopar.cost.setting import Phase, Setting
from autopar.interleaving import waiting
from autopar.search.result import Choice
from autopar.units import format_bytes

# Kinds of blocks that are told apart in what activations are kept.
MOST_KINDS = 6


# Of a part that is none of the device's bytes.
ELSEWHERE = "in the host's memory"


@dataclass(frozen=True)
class MemoryPart:
    """A summand of a term: `text` says what it is, as a formula where there is one."""

    text: str
    bytes: int


@dataclass(frozen=True)
class MemoryFormulas:
    """Of pp rank `rank`, at its fullest moment. `live`: by part of the chain that the rank holds,
    micro-batches that are alive then; none at the end of a step. `terms`: the parts of each term,
    which add up to it. `values`: of the letters in them (n parameters, t trainable ones, e those of
    experts among both, in elements on the rank; d and f ranks that share them, and experts).
    """

    rank: int
    live: tuple[int, ...]
    terms: dict[str, tuple[MemoryPart, ...]]
    values: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        parts = {term: [asdict(part) for part in some] for term, some in self.terms.items()}
        return {
            **{"rank": self.rank, "live": list(self.live)},
            **{"terms": parts, "values": dict(self.values)},
        }


def memory_formulas(choice: Choice) -> MemoryFormulas:
    """Those of the rank with the most bytes, the first of several."""
    seen = evaluate(choice, choice.chain.blocks, choice.setting.cluster)
    rank = max(range(choice.mesh.pp), key=lambda i: seen.memory_per_stage[i].total)
    return _Rank(choice, seen, rank).formulas()


class _Rank:
    """What a rank holds: its parts of the chain and what of them is there at the fullest moment."""

    def __init__(self, choice: Choice, seen: Evaluation, rank: int) -> None:
        self.rank, self.setting = rank, choice.setting
        self.memory = seen.memory_per_stage[rank]
        blocks, setting = choice.chain.blocks, choice.setting
        labels = {n: way for stage in choice.stages for n, way in stage.recomputed.items()}
        self.labels = labels
        spans = list(pairwise([0, *accumulate(len(s.blocks) for s in choice.stages)]))
        mine = [(part, *spans[part]) for part in setting.parts_of(rank)]
        self.chunks = [blocks[start:stop] for _, start, stop in mine]
        again = any(b.name in labels for chunk in self.chunks for b in chunk)
        self.held = [
            StageMoments.of(
                *(blocks, start, stop, labels, setting, choice.stages[part].keep_gathered),
                again=again,
            )
            for part, start, stop in mine
        ]
        self.phase = self._fullest(choice, seen.at_backward[rank])
        self.live = self.phase.live if self.phase else (0,) * len(self.chunks)

    def formulas(self) -> MemoryFormulas:
        values = self._values()
        terms = {
            "parameters": self._parameters(),
            "gradients": self._gradients(),
            "optimizer": self._optimizer(),
            "activations": self._activations(),
            "buffers": self._buffers(),
        }
        live = self.live if self.phase else ()
        told = {
            term: tuple(p for p in parts if p.bytes or ELSEWHERE in p.text)
            for term, parts in terms.items()
        }
        text = " ".join(p.text for parts in told.values() for p in parts)
        shown = {k: v for k, v in values.items() if k in _letters(text)}
        return MemoryFormulas(self.rank, live, told, shown)

    def _fullest(self, choice: Choice, at_backward: Sequence[ChunkPhase]) -> ChunkPhase | None:
        """The moment that has the rank's memory; None for the end of the step."""
        if self.memory == StageMemory.together([held.end() for held in self.held]):
            return None
        for phase in dict.fromkeys(at_backward):
            if self.setting.in_turns:
                setting, blocks = self.setting, choice.chain.blocks
                found = rank_memory(self.rank, [phase], choice.stages, blocks, setting)
            else:
                found = self.held[0].at(Phase(phase.live[0], phase.first))
            if found == self.memory:
                return phase
        return None

    def _once(self, term: Callable[[Held, Setting], int]) -> int:
        """A term over the rank; parameters that several blocks of a part tie count once."""
        return sum(held.once(term) for held in self.held)

    def _parameter_count(self) -> int:
        return self._once(lambda held, _: held.parameters)

    def _trainable_count(self) -> int:
        return self._once(lambda held, _: held.trainable)

    def _values(self) -> dict[str, int]:
        blocks = [b for chunk in self.chunks for b in chunk]
        return {
            "n": self._parameter_count(),
            "t": self._trainable_count(),
            "e": sum(b.experts.parameters for b in blocks),
            "d": self.setting.shards,
            "f": self.setting.expert_shards,
        }

    def _elements(self, letter: str, *, whole: bool) -> str:
        """`n`, `n/d`, or with experts that ep splits `((n-e)/d + e/f)`."""
        if letter == "t" and self._trainable_count() == self._parameter_count():
            letter = "n"
        if whole or self.setting.shards == self.setting.expert_shards == 1:
            return letter
        if any(b.experts.parameters for chunk in self.chunks for b in chunk):
            return f"(({letter}-e)/d + e/f)"
        return f"{letter}/d"

    def _parameters(self) -> list[MemoryPart]:
        size = self.setting.bytes
        stored = self._once(memory.parameter_shard) * size.storage
        parts = [MemoryPart(f"{size.storage}·{self._elements('n', whole=False)}", stored)]
        copy = self._parameter_count() * size.compute
        if self.phase is not None and memory.keeps_copy(self.setting):
            parts.append(MemoryPart(f"{size.compute}·n in {size.dtype}", copy))
        return _with_rest(
            parts,
            self.memory.parameters,
            "gathered for the block at work, the one prefetched and what stays gathered",
            "given back after a last backward",
        )

    def _gradients(self) -> list[MemoryPart]:
        size = self.setting.bytes
        elements = self._once(_kept_gradients if self.phase else memory.trainable_shard)
        whole = elements == self._trainable_count()
        text = f"{size.gradient}·{self._elements('t', whole=whole)}"
        parts = [MemoryPart(text, elements * size.gradient)] if elements else []
        rest = "made in the block at work", "not made yet, or reduced already"
        return _with_rest(parts, self.memory.gradients, *rest)

    def _optimizer(self) -> list[MemoryPart]:
        update, size = self.setting.update, self.setting.bytes.storage
        copies = update.copies
        parts = []
        if copies:
            text = f"{copies}·{size}·{self._elements('t', whole=False)}"
            each = self._once(memory.trainable_shard)
            parts.append(MemoryPart(text, copies * size * each))
        if update.on_host:
            each = self._once(memory.trainable_shard)
            text = f"{update.host_copies}·{size}·{self._elements('t', whole=False)}"
            there = format_bytes(update.host_copies * size * each)
            parts.append(MemoryPart(f"{text} = {there} {ELSEWHERE}", 0))
        states = f"states of {self.setting.optimizer}, by the shape of each parameter"
        return _with_rest(parts, self.memory.optimizer, states, "padding")

    def _activations(self) -> list[MemoryPart]:
        """By kind of block and way of recomputation: how many micro-batches, summed over blocks,
        are kept."""
        counts: Counter[tuple[str, str, int]] = Counter()
        passing = 0
        for chunk, held, live in zip(self.chunks, self.held, self.live, strict=True):
            passing += live * (held.kept - held.shared - sum(map(self._keeps, chunk)))
            for block in chunk:
                counts[block.kind, self.labels.get(block.name, ""), self._keeps(block)] += live
        ranked = sorted(counts.items(), key=lambda c: -c[0][2] * c[1])
        parts = [
            MemoryPart(f"{count} × {format_bytes(each)} of {kind}{_way(label)}", count * each)
            for (kind, label, each), count in ranked[:MOST_KINDS]
        ]
        others = sum(count * each for (_, _, each), count in ranked[MOST_KINDS:])
        parts.append(MemoryPart("other blocks", others))
        parts.append(MemoryPart("values received and sent", passing))
        return _with_rest(
            parts,
            self.memory.activations,
            "rebuilt for the block at work",
            "given back by then",
        )

    def _keeps(self, block: BlockCost) -> int:
        label = self.labels.get(block.name)
        return block.option(label).kept if label else block.saved_bytes

    def _buffers(self) -> list[MemoryPart]:
        setting, parts = self.setting, []
        if self.phase is None:
            copies = setting.update.all_at_once
            each = self._once(memory.trainable_shard) * setting.bytes.storage
            text = f"{copies}·{setting.bytes.storage}·{self._elements('t', whole=False)}"
            if copies and copies * each == self.memory.buffers:
                parts.append(MemoryPart(f"{text} in the optimizer's step", copies * each))
            rest = "reduction of gradients, or the optimizer's step"
            return _with_rest(parts, self.memory.buffers, rest, "rest")
        shared = sum(k * h.shared for h, k in zip(self.held, self.live, strict=True))
        parts.append(MemoryPart("values that blocks share", min(shared, self.memory.buffers)))
        if setting.in_turns:
            early = waiting(setting.schedule, setting.mesh.pp, setting.microbatches)
            received = max(h.received for h in self.held)
            parts.append(MemoryPart("values received early", early * received))
        work = "what the block at work needs, gradients on their way, and values at the borders"
        return _with_rest(parts, self.memory.buffers, work, "given back by then")


def _kept_gradients(held: Held, setting: Setting) -> int:
    """Elements of the accumulated gradients."""
    return memory.gradient_bytes(held, setting) // setting.bytes.gradient


def _with_rest(parts: list[MemoryPart], total: int, more: str, less: str) -> list[MemoryPart]:
    """The parts and what is left of the term."""
    rest = total - sum(part.bytes for part in parts)
    return [*parts, MemoryPart(more if rest > 0 else less, rest)]


def _way(label: str) -> str:
    return f" ({'recomputed' if label == FULL else f'{label} recomputed'})" if label else ""


def _letters(text: str) -> set[str]:
    """Letters that stand alone in the text."""
    marks = str.maketrans({mark: " " for mark in "()·/+-,"})
    return {word for word in text.translate(marks).split() if len(word) == 1}
