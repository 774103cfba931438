"""The same cluster with more ranks: in its node first, where that can be had with more, then in
more nodes."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cluster_toml import short_form
from autopar.devices import load_device


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """The same cluster with so many nodes; its outermost link reaches all of them."""
    last, ranks = cluster.links[-1], nodes * cluster.ranks_per_node
    links = (*cluster.links[:-1], replace(last, ranks=ranks))
    name = f"{cluster.name} with {nodes} nodes"
    return replace(cluster, name=name, nodes=nodes, links=links)


def with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """The same cluster with at least so many: a node of a known device is filled, then nodes are
    added; of another one whole nodes."""
    most = _most_per_node(cluster)
    if not most:
        return with_nodes(cluster, -(-ranks // cluster.ranks_per_node))
    nodes = -(-ranks // most)
    return _of_known_device(cluster, nodes, ranks if nodes == 1 else most)


def sizes_above(cluster: Cluster, most: int) -> list[int]:
    """Numbers of ranks that the cluster can be enlarged to, up to `most`."""
    filled = _most_per_node(cluster)
    node = filled or cluster.ranks_per_node
    in_node = range(cluster.size + 1, min(filled, most) + 1)
    return [*in_node, *(s for s in range(node, most + 1, node) if s > max(cluster.size, filled))]


def _most_per_node(cluster: Cluster) -> int:
    """How many ranks a cluster of one node may have without another (0: that is not known, or there
    are several)."""
    if cluster.nodes > 1 or short_form(cluster.name) is None:
        return 0
    return load_device(cluster.device.name).most_ranks_per_node


def _of_known_device(cluster: Cluster, nodes: int, ranks: int) -> Cluster:
    name, fabric = short_form(cluster.name) or ("", "")
    both = f"{nodes}x{ranks}" if load_device(name).between is not None else str(ranks)
    found = Cluster.parse(f"{name}:{both}{fabric}")
    return replace(found, device=cluster.device)
