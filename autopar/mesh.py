"""The logical view of the cluster: named axes with degrees, laid over the ranks in some order."""

from __future__ import annotations

from dataclasses import dataclass, replace

# From the outermost to the innermost, unless a mesh has another order.
AXES = ("pp", "dp", "cp", "tp")
# Which axes neighbour ranks, named from the innermost as Megatron does (`--use-tp-pp-dp-mapping` is
# the second): replicas are nearer to each other than pipeline stages, or the other way round.
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp")
# Not an axis of its own: the ranks of dp and cp together, which hold the same tp slice of every
# parameter, sum its gradient, and share it out under ZeRO.
REPLICA = "replica"
# Neighbours among the replicas, which share the experts of every layer among them; and the ranks
# that hold the same experts, one of each such group.
EP = "ep"
EXPERT_REPLICA = "expert_replica"
# Of all replicas: neighbours over which ZeRO shards, and the ranks that hold the same shard, one of
# each such group (hybrid sharding). One group, and no copies of shards, unless a mesh says so.
SHARD, REPLICATE = "dp_shard", "dp_replicate"


def order_refused(order: str | None, cp: int) -> str:
    """Why ranks can't lie in an order; empty when they can."""
    if order != ORDERS[1] or cp == 1:
        return ""
    return "dp and cp ranks together hold a stage, and would not be at even distances"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes; `tp` is innermost (neighbouring ranks), `pp` outermost.

    rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index

    With the `order` tp-cp-pp-dp, dp is outermost, and pp inside it (cp is 1 then: replicas have to
    be at even distances):

    rank = (dp_index * pp + pp_index) * tp + tp_index

    `ep` is no axis beside the others: it divides the replicas (dp x cp) into groups of neighbours
    that split the experts of every layer, while all else is replicated over them as before.

    Nor is `dp_replicate`, the number of groups of neighbours over which ZeRO shards (hybrid
    sharding): over the ranks of a group there are shards, over the groups there are copies.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    order: str = ORDERS[0]

    @property
    def stages_inside(self) -> bool:
        """Whether pipeline stages are nearer to each other than replicas."""
        return self.order == ORDERS[1]

    @property
    def axes(self) -> tuple[str, ...]:
        """`AXES`, from the outermost to the innermost of this mesh."""
        return ("dp", "pp", "cp", "tp") if self.stages_inside else AXES

    @property
    def size(self) -> int:
        return self.pp * self.replicas * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same tp slice of the parameters of a stage."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same tp slice of the same experts of a stage."""
        return self.replicas // self.ep

    @property
    def dp_shard(self) -> int:
        """Replicas over which ZeRO shards: all of them, or a group of neighbours."""
        return self.replicas // self.dp_replicate

    @property
    def shape(self) -> Mesh:
        """The same without hybrid sharding, which lays no rank elsewhere."""
        return replace(self, dp_replicate=1)

    def degree(self, axis: str) -> int:
        """Ranks of a group of `axis`: one of `AXES`, or of the groups of replicas."""
        if axis == REPLICA:
            return self.replicas
        if axis == EXPERT_REPLICA:
            return self.expert_replicas
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours of a group of this axis."""
        if axis == "tp":
            return 1
        if axis == "cp":
            return self.tp
        inner = self.cp * self.tp
        if axis == "pp":
            return inner if self.stages_inside else inner * self.dp
        dp = inner * self.pp if self.stages_inside else inner
        if axis == "dp":
            return dp
        # Neighbours among the replicas, and groups of them.
        replica = dp if self.stages_inside else self.tp
        inside = {REPLICA: 1, EP: 1, SHARD: 1, EXPERT_REPLICA: self.ep, REPLICATE: self.dp_shard}
        return replica * inside[axis]

    def replica(self, rank: int) -> int:
        """The place of a rank among its replicas."""
        here = self.coordinates(rank)
        return here["dp"] * self.cp + here["cp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        return {a: rank // self.stride(a) % self.degree(a) for a in AXES}

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these places; inverse of `coordinates`."""
        places = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        return sum(place * self.stride(axis) for axis, place in places.items())

    def __str__(self) -> str:
        """The degrees, from the outermost axis to the innermost."""
        outer = f"dp{self.dp} pp{self.pp}" if self.stages_inside else f"pp{self.pp} dp{self.dp}"
        cp = f" cp{self.cp}" if self.cp > 1 else ""
        ep = f" ep{self.ep}" if self.ep > 1 else ""
        shard = f" shard{self.dp_shard}" if self.dp_replicate > 1 else ""
        return f"{outer}{cp} tp{self.tp}{ep}{shard}"

    def to_dict(self) -> dict[str, int | str]:
        """All degrees; of hybrid sharding, and the order, only where they are not the usual."""
        hybrid = {REPLICATE: self.dp_replicate} if self.dp_replicate > 1 else {}
        order = {"order": self.order} if self.stages_inside else {}
        degrees = {"pp": self.pp, "dp": self.dp, "tp": self.tp, "cp": self.cp, "ep": self.ep}
        return degrees | hybrid | order
