"""The mesh axis on which a block is placed, and what costs on it depend on."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster


@dataclass(frozen=True)
class Axis:
    """`ranks` neighbours with `stride`, on a cluster. `cp`: over how many ranks, next outside of
    these, the sequence was split before; the graph has the shapes of one of them."""

    ranks: int
    stride: int
    cluster: Cluster
    cp: int = 1
