"""A distinct block as one rank runs it: placed, with its collectives, in local shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.cluster import Cluster
from autopar.parts import Slot
from autopar.passes.analysis.candidates import Candidates
from autopar.passes.analysis.expert_moves import annotate_least, annotate_surely
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.order_exchanges import order_exchanges
from autopar.passes.rewrite.place import place
from autopar.placement import Placement


def to_rank_block(
    kind: str,
    graph: fx.GraphModule,
    slots: tuple[Slot, ...],
    chosen: Mapping[str, str],
    boundary: Placement,
    tp: int,
    found: Candidates | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Rewrite the static graph of a block in place; see `place` for the arguments. `cluster`: to be
    priced on that."""
    if found is not None and cluster is not None:
        annotate_surely(graph, found, cluster.device)
    place(kind, graph, slots, chosen, boundary, tp, found)
    if tp > 1:
        import autopar.runtime.collectives  # noqa: F401 - registers the ops that are inserted

        insert_collectives(graph, boundary, tp)
    localize_shapes(graph, tp)
    order_exchanges(graph)
    if found is not None and cluster is not None:
        annotate_least(graph, found, cluster.device)
