"""A made-up transformer as a cost provider: formulas instead of a captured model."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from autopar.block_cost import Alternative, BlockCost, ChainCost, PartialRecompute, Tied
from autopar.cluster import Cluster, Device, Link
from autopar.cost.collective import collective_time


def cluster(ranks: int, memory: int = 80 * 2**30, per_node: int = 8) -> Cluster:
    """Nodes of `per_node` fast-linked ranks, with a slower link between nodes."""
    device = Device("made-up", memory, 3e12, {"bfloat16": 1e15}, 0.7, 0.8, 3e-6, 0)
    inner = min(ranks, per_node)
    links = (Link("inner", inner, 4e11, 3e-6), Link("outer", ranks, 5e10, 8e-6))
    return Cluster("made-up", device, ranks // inner, inner, links)


@dataclass
class Provider:
    """`layers` equal layers between an embedding and a head; one alternative with whole boundaries
    and, for tp > 1, one with boundaries split over the sequence. `sets`: of ops of a layer that can
    run again."""

    on: Cluster
    layers: int = 6
    width: int = 1024
    vocabulary: int = 32000
    sequence: int = 2048
    heads: int = 8
    tied: bool = False
    bare_head: bool = False
    fixed_batch: int | None = None
    sets: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def block_names(self) -> tuple[str, ...]:
        return ("embed", *(f"layers.{i}" for i in range(self.layers)), "head")

    @property
    def holds_parameters(self) -> tuple[bool, ...]:
        return (*[True] * (self.layers + 1), not self.bare_head)

    def tp_degrees(self, limit: int) -> list[int]:
        return [d for d in range(1, limit + 1) if self.heads % d == 0]

    def microbatch_sizes(self, most: int) -> list[int]:
        if self.fixed_batch is not None:
            return [self.fixed_batch] if self.fixed_batch <= most else []
        return list(range(1, most + 1))

    def chains(self, tp: int, microbatch: int) -> list[ChainCost]:
        self.asked.append((tp, microbatch))
        whole = ChainCost("R", "whole", self.blocks(tp, microbatch, split=False))
        if tp == 1:
            return [whole]
        return [whole, ChainCost("S(1)", "split", self.blocks(tp, microbatch, split=True))]

    def alternatives(self, tp: int, microbatch: int) -> list[Alternative]:
        return [
            Alternative(c.boundary, ChainCost("", "", tuple(map(_sum, c.blocks))), lambda c=c: c)
            for c in self.chains(tp, microbatch)
        ]

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        one, two = (self.blocks(tp, microbatch, split=s) for s in (False, True))
        return ChainCost("", "bound", tuple(map(_smaller, one, two)))

    def blocks(self, tp: int, microbatch: int, *, split: bool) -> tuple[BlockCost, ...]:
        tokens, h = microbatch * self.sequence, self.width
        passing = tokens * h * 2 // (tp if split else 1)
        weights = 12 * h * h // tp
        seconds = 2 * weights * tokens / 7e14 + 3e-5 + passing * 8 / 3e12
        comm = 0.0
        if tp > 1:
            kinds = ("all_gather", "reduce_scatter") if split else ("all_reduce",)
            comm = 2 * sum(collective_time(k, tokens * h * 2, tp, 1, self.on) for k in kinds)
        layer = BlockCost(
            "layer",
            "layer",
            seconds,
            2 * seconds,
            comm,
            comm,
            6.0 * weights * tokens,
            weights,
            weights,
            24 * tokens * h // tp + 10 * passing,
            passing,
            4 * passing,
            passing,
            1e-5 if split else 0.0,
        )
        if self.sets:
            kept = layer.saved_bytes
            sets = [(0.05, 3 * kept // 4), (0.4, kept // 3)]
            layer = replace(
                layer,
                partial=tuple(
                    PartialRecompute(f"set {i}", (), share * seconds, share * comm, k, kept - k)
                    for i, (share, k) in enumerate(sets, 1)
                ),
            )
        table = self.vocabulary * h // tp
        shared = table if self.tied else 0
        embed = replace(
            layer,
            name="embed",
            kind="embed",
            forward_compute=1e-5,
            backward_compute=2e-5,
            parameters=table,
            trainable=table,
            saved_bytes=8 * tokens,
            input_bytes=8 * tokens,
            tied=(Tied("table", shared, shared),) if shared else (),
        )
        logits = 2 * table * tokens / 7e14
        head = replace(
            embed,
            name="head",
            kind="head",
            forward_compute=logits,
            backward_compute=2 * logits,
            saved_bytes=passing + 4 * tokens * self.vocabulary // tp,
            input_bytes=passing,
        )
        if self.bare_head:
            head = replace(head, parameters=0, trainable=0, tied=())
            embed = replace(embed, tied=())
        named = [replace(layer, name=f"layers.{i}") for i in range(self.layers)]
        return (embed, *named, head)


def _smaller(one: BlockCost, two: BlockCost) -> BlockCost:
    least = {
        f.name: min(getattr(one, f.name), getattr(two, f.name))
        for f in fields(BlockCost)
        if f.name not in ("name", "kind", "partial", "experts", "shapes", "recomputed")
    }
    least["partial"] = tuple(
        replace(a, compute=0.0, comm=0.0, kept=min(a.kept, b.kept), rebuilt=0)
        for a, b in zip(one.partial, two.partial, strict=True)
    )
    return replace(one, **least)


def _sum(block: BlockCost) -> BlockCost:
    """Only the sum of the block's seconds."""
    return replace(
        block,
        forward_compute=block.seconds,
        backward_compute=0.0,
        forward_comm=0.0,
        backward_comm=0.0,
        parameter_reduce_seconds=0.0,
    )
