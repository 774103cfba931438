"""The placement problem of a block on one mesh axis: ops, their strategies, and what edges cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.placement import Placement


@dataclass(slots=True)
class Choice:
    """One strategy of one op: placement of each operand and of the result, seconds, saved
    operands."""

    name: str
    operands: tuple[Placement, ...]
    result: Placement
    seconds: float
    saves_bytes: float = 0.0


@dataclass(slots=True)
class OpNode:
    """An op: `reads[i]` is the value of operand i; `saved` the operands kept for the backward."""

    name: str
    reads: tuple[str, ...]
    choices: list[Choice]
    saved: frozenset[int] = frozenset()
    saves_result: bool = False


@dataclass(slots=True)
class Problem:
    """`moves[value][(p, q)]`: seconds of that reshard (absent: illegal). `sizes[value][p]`: local
    bytes.

    Sources (parameters, inputs) are ops without reads. `stored`: for parameters, bytes of
    parameter,
    gradient and optimizer state per local byte. `sinks`: value -> placement it is handed out in.
    `roots`: view -> the value whose memory it shares. `replicas`: ranks of the axis hold whole
    parameters.
    """

    ops: list[OpNode] = field(default_factory=list)
    moves: dict[str, dict[tuple[Placement, Placement], float]] = field(default_factory=dict)
    sizes: dict[str, dict[Placement, float]] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    sinks: dict[str, Placement] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)

    given: dict[str, tuple[Placement, ...]] = field(default_factory=dict)
    replicas: bool = False

    def add(self, op: OpNode) -> None:
        assert op.name not in self.given, f"two ops are named {op.name}"
        self.ops.append(op)
        self.given[op.name] = tuple(dict.fromkeys(c.result for c in op.choices))
        self.sizes.setdefault(op.name, {})
        self.moves.setdefault(op.name, {})

    def results(self, value: str) -> tuple[Placement, ...]:
        """Placements that the op of this value can produce."""
        return self.given[value]
