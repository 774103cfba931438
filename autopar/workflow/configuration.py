"""A training configuration with every decision made: what `autopar evaluate` puts a price on."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cost.setting import Practice, Setting
from autopar.mesh import Mesh
from autopar.plan_document import StagePlan

RECOMPUTE = ("none", "full", "core", "products")


@dataclass(frozen=True)
class Configuration:
    """All decisions but the placements on the tp axis, which the placement search makes.

    `chunks`: parts of the model per stage, above 1 for the interleaved schedule. `recompute`:
    `none`, `full` (every layer), `core` (attention's scores), `products` (all but the results of
    every second matrix product and of attention). `sequence_parallel`: values between blocks are
    split over tp along the sequence; None takes what is faster. `regathers`: what is gathered for
    it before a product is not kept, but gathered again in the backward, hidden behind the products.
    `exchanges_parts`: see `autopar.workflow.exchanged_parts`.
    `by_parameters`: stages are cut by parameters instead of layers (`cut_by_parameters`).
    `reshards`: ZeRO-3 gathers parameters again for each backward, and does not keep them.
    `host_layer_seconds`: what the host needs to issue one pass of a layer; the device waits for it.
    """

    cluster: Cluster
    mesh: Mesh
    sequence: int
    microbatch: int
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    recompute: str = "none"
    sequence_parallel: bool | None = None
    regathers: bool = False
    exchanges_parts: bool = False
    by_parameters: bool = False
    reshards: bool = True
    host_layer_seconds: float = 0.0
    practice: Practice = field(default_factory=Practice)

    @property
    def setting(self) -> Setting:
        return Setting(
            self.cluster,
            self.mesh,
            self.microbatch,
            self.microbatches,
            self.schedule,
            self.zero,
            self.precision,
            self.optimizer,
            self.chunks,
            self.practice,
        )

    @property
    def boundaries(self) -> tuple[str, ...]:
        """Placements of the values between blocks to choose from."""
        if self.mesh.tp == 1 or self.sequence_parallel is False:
            return ("R",)
        return ("S(1)",) if self.sequence_parallel else ("R", "S(1)")


def part_sizes(layers: int, parts: int) -> list[int]:
    """How many layers each part of a pipeline holds, first to last.

    Equal shares; where they don't divide, embedding and head count as a layer each if that makes
    equal shares (Megatron and DeepSpeed cut 70 and 126 layers so); otherwise the middle parts take
    one more.
    """
    if layers % parts and (layers + 2) % parts == 0 and parts > 1:
        share = (layers + 2) // parts
        return [share - 1, *[share] * (parts - 2), share - 1] if parts > 1 else [layers]
    share, more = divmod(layers, parts)
    first = (parts - more + 1) // 2
    return [share + (1 if first <= i < first + more else 0) for i in range(parts)]


def cut_evenly(
    names: list[str], ends: tuple[int, int], parts: int, recompute: bool
) -> tuple[StagePlan, ...]:
    """`parts` parts of a chain of blocks: `ends` blocks at its front and back that are no layers go
    with the first and last layer.

    `recompute`: every layer is recomputed (the ends are not).
    """
    return _cut(names, ends, part_sizes(len(names) - sum(ends), parts), recompute)


def cut_by_parameters(
    names: list[str], weights: list[int], ends: tuple[int, int], parts: int, recompute: bool
) -> tuple[StagePlan, ...]:
    """`cut_evenly` by `weights` of the blocks, what is before the first layer not counted: a part
    ends with the layer that takes it beyond its share (nanotron's build_model, recalled)."""
    front, back = ends
    total, share, done = sum(weights[front:]), 0, 0
    sizes = [0] * parts
    for weight in weights[front : len(names) - back]:
        done += weight
        sizes[share] += 1
        if done * parts > total * (share + 1):
            share = min(share + 1, parts - 1)
    if 0 in sizes:
        return cut_evenly(names, ends, parts, recompute)
    return _cut(names, ends, sizes, recompute)


def _cut(
    names: list[str], ends: tuple[int, int], sizes: list[int], recompute: bool
) -> tuple[StagePlan, ...]:
    """Parts of so many layers each, and the ends."""
    front, back = ends
    layers = names[front : len(names) - back]
    held: list[list[str]] = []
    start = 0
    for size in sizes:
        held.append(layers[start : start + size])
        start += size
    inner = set(layers) if recompute else set()
    held[0] = names[:front] + held[0]
    held[-1] = held[-1] + names[len(names) - back :]
    return tuple(StagePlan(tuple(h), tuple(n for n in h if n in inner)) for h in held)
