"""What a picture of one distinct block shows: its ops, and the edges with their collectives."""

from __future__ import annotations

from dataclasses import dataclass

BOUNDS = ("compute", "memory", "launch")


@dataclass(frozen=True, slots=True)
class OpPicture:
    """One op of the block, for one micro-batch on one rank.

    `op` is the operator's name (`linear`), `module` the path of the module that called it,
    `shape` the global shape of its result, `placement` where the result lives on the tp axis as
    text (`S(1)`, `R`, `R*`, `P`), `strategy` the plan's text for it (`shard n`). `flops` and
    `seconds` are forward and backward together, `saved_bytes` what it keeps for the backward.
    `trivial` ops only rename data (view, transpose, cast, getitem). `members` are the names of
    the ops that `fold` made one.
    """

    name: str
    op: str
    module: str = ""
    shape: tuple[int, ...] = ()
    placement: str = "R"
    strategy: str = ""
    flops: float = 0.0
    seconds: float = 0.0
    bound: str = ""
    saved_bytes: int = 0
    trivial: bool = False
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EdgePicture:
    """A value on its way from op `source` to op `target`, or from outside when no op has that name.

    `collective` is what happens to it forward, `backward_collective` to its gradient; `""` means
    nothing. `bytes` is the size that one rank puts in. Edges of one source with the same
    collectives are one transfer that several ops read.
    """

    source: str
    target: str
    collective: str = ""
    backward_collective: str = ""
    bytes: int = 0

    @property
    def is_local(self) -> bool:
        return not self.collective and not self.backward_collective


@dataclass(frozen=True, slots=True)
class BlockPicture:
    """One distinct kind of block; `count` blocks of the model are of this kind."""

    name: str
    count: int
    ops: tuple[OpPicture, ...]
    edges: tuple[EdgePicture, ...]

    def __post_init__(self) -> None:
        names = [op.name for op in self.ops]
        assert len(set(names)) == len(names), f"two ops of block {self.name} have one name"

    def op(self, name: str) -> OpPicture | None:
        return next((op for op in self.ops if op.name == name), None)
