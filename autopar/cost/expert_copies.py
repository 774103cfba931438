"""Seconds in which copies of hot experts add up their gradients, once a step.

Each copy's gradient travels to the first copy of its expert, and the sum travels back
(`autopar.runtime.expert_copies`). Which experts will have copies is not known when a plan is made:
every spare slot is taken to hold one, and every rank to send as many as it has spare slots. That is
the most when copies are spread evenly. Where ZeRO splits gradients, the ranks of a shard put each
of these rows together first, there and back.
"""

from __future__ import annotations

from autopar.block_cost import BlockCost
from autopar.cost.collective import collective_time
from autopar.cost.setting import Setting
from autopar.mesh import EP, EXPERT_REPLICA, SHARD

# The axes that split experts, and so hold copies of them.
COPIED_OVER = ("tp", EP)


def expert_copies_seconds(block: BlockCost, setting: Setting, axis: str) -> float:
    """Of copies on the ranks of `axis`, ep or tp; zero without spare slots there."""
    mesh, cluster = setting.mesh, setting.cluster
    elements = block.experts.spare if axis == EP else block.spare_over_tp
    ranks = mesh.degree(axis)
    if not elements or ranks == 1:
        return 0.0
    nbytes = elements * setting.bytes.storage
    one_way = collective_time("all_to_all", ranks * nbytes, ranks, mesh.stride(axis), cluster)
    same = EXPERT_REPLICA if axis == EP else SHARD
    if setting.zero >= 1 and mesh.degree(same) > 1:
        pieces = mesh.degree(same), mesh.stride(same)
        one_way += collective_time("all_reduce", nbytes, *pieces, cluster)
    return 2 * one_way
