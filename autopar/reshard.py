"""Which collective turns one placement into another, and its conjugate for the gradient.

A closed table: what is not in it is not a legal edge. Names are ops of the `autopar` namespace.
Byte counts are those of the whole tensor, as in `autopar.cost.collective`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.placement import Placement


@dataclass(frozen=True, slots=True)
class Reshard:
    """`op`: the inserted op ('' when nothing is to do); `forward`/`backward`: collective or ''."""

    op: str
    forward: str = ""
    backward: str = ""

    @property
    def is_free(self) -> bool:
        return not (self.forward or self.backward)


_NOTHING = Reshard("")
_TABLE = {
    ("R", "R*"): Reshard("copy", "", "all_reduce"),
    ("R", "S"): Reshard("slice", "", "all_gather"),
    ("R", "P"): Reshard("first_rank_only"),
    ("R*", "R"): Reshard("first_rank_gradient"),
    ("R*", "S"): Reshard("slice_pad"),
    ("S", "R"): Reshard("all_gather_slice", "all_gather", ""),
    ("S", "R*"): Reshard("all_gather", "all_gather", "reduce_scatter"),
    ("S", "P"): Reshard("pad"),
    ("S", "S"): Reshard("all_to_all", "all_to_all", "all_to_all"),
    ("P", "R"): Reshard("all_reduce", "all_reduce", ""),
    ("P", "R*"): Reshard("all_reduce_both", "all_reduce", "all_reduce"),
    ("P", "S"): Reshard("reduce_scatter", "reduce_scatter", "all_gather"),
}

# By the name of the op.
RESHARDS = {edge.op: edge for edge in _TABLE.values()}


def reshard(source: Placement, target: Placement, *, requires_grad: bool = True) -> Reshard | None:
    """The edge from `source` to `target`, or None when there is none.

    For a value without gradient `R` and `R*` are the same and backward collectives vanish.
    """
    if source == target or (not requires_grad and source.is_whole and target.is_whole):
        return _NOTHING
    found = _TABLE.get((source.kind, target.kind))
    if found is None or requires_grad:
        return found
    return Reshard(found.op, found.forward, "")
