"""Chains of made-up blocks as cost providers, of any length: what the search alone is timed on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.block_cost import Alternative, BlockCost, ChainCost
from autopar.cluster import Cluster
from autopar.cost.collective import collective_time

FLOPS = 5e14  # achieved per second, by every block
ELEMENT = 2
SEQUENCE = 4096


@dataclass(frozen=True)
class MadeUpChain:
    """`layers` blocks between an embedding and a head; widths are drawn from `widths`, so that
    with several of them no two neighbours need be alike."""

    cluster: Cluster
    layers: int
    widths: tuple[int, ...] = (4096,)
    vocabulary: int = 128_000
    seed: int = 0

    @property
    def block_names(self) -> tuple[str, ...]:
        return ("embed", *(f"layers.{i}" for i in range(self.layers)), "head")

    @property
    def holds_parameters(self) -> tuple[bool, ...]:
        return (True,) * len(self.block_names)

    def tp_degrees(self, limit: int) -> list[int]:
        return [d for d in (1, 2, 4, 8, 16) if d <= limit]

    def microbatch_sizes(self, most: int) -> list[int]:
        return [size for size in (1, 2, 4, 8) if size <= most]

    def alternatives(self, tp: int, microbatch: int) -> Sequence[Alternative]:
        chain = self._chain(tp, microbatch)
        least = ChainCost("R", "sum", tuple(_sum(b) for b in chain.blocks))
        return [Alternative("R", least, lambda: chain)]

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        free = [
            replace(b, forward_comm=0.0, backward_comm=0.0)
            for b in self._chain(tp, microbatch).blocks
        ]
        return ChainCost("", "bound", tuple(free))

    def _chain(self, tp: int, microbatch: int) -> ChainCost:
        draw = random.Random(self.seed)
        layers = [
            self._layer(f"layers.{i}", draw.choice(self.widths), tp, microbatch)
            for i in range(self.layers)
        ]
        first = layers[0]
        table = self.vocabulary * max(self.widths) // tp
        tokens = microbatch * SEQUENCE
        ends = replace(first, parameters=table, trainable=table, largest_parameter=table)
        embed = replace(
            ends, name="embed", kind="embed", forward_compute=1e-5, backward_compute=2e-5,
            saved_bytes=8 * tokens, input_bytes=8 * tokens,
        )  # fmt: skip
        logits = 2 * table * tokens / FLOPS
        head = replace(
            ends, name="head", kind="head", forward_compute=logits, backward_compute=2 * logits,
            saved_bytes=6 * tokens * self.vocabulary // tp,
        )  # fmt: skip
        return ChainCost("R", "whole", (embed, *layers, head))

    def _layer(self, name: str, width: int, tp: int, microbatch: int) -> BlockCost:
        tokens = microbatch * SEQUENCE
        weights, passing = 12 * width * width // tp, tokens * width * ELEMENT
        seconds = 2 * weights * tokens / FLOPS + 3e-5
        comm = 0.0
        if tp > 1:
            comm = 2 * collective_time("all_reduce", passing, tp, 1, self.cluster)
        return BlockCost(
            name=name,
            kind=f"layer of {width}",
            forward_compute=seconds,
            backward_compute=2 * seconds,
            forward_comm=comm,
            backward_comm=comm,
            flops=6.0 * weights * tokens,
            parameters=weights,
            trainable=weights,
            saved_bytes=12 * passing // tp + 5 * passing,
            input_bytes=passing,
            transient_bytes=4 * passing,
            boundary_bytes=passing,
            largest_parameter=weights // 3,
        )


def _sum(block: BlockCost) -> BlockCost:
    """What is known before a price is asked for: only the sum of the seconds."""
    return replace(
        block,
        forward_compute=block.seconds,
        backward_compute=0.0,
        forward_comm=0.0,
        backward_comm=0.0,
    )
