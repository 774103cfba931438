"""The logical view of the cluster: named axes with degrees, laid over the ranks in one order."""

from __future__ import annotations

from dataclasses import dataclass

# From the outermost to the innermost.
AXES = ("pp", "dp", "cp", "tp")
# Not an axis of its own: the ranks of dp and cp together, which hold the same tp slice of every
# parameter, sum its gradient, and share it out under ZeRO.
REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes; `tp` is innermost (neighbouring ranks), `pp` outermost.

    rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.replicas * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same tp slice of the parameters of a stage."""
        return self.dp * self.cp

    def degree(self, axis: str) -> int:
        return int(self.replicas if axis == REPLICA else getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours of a group of this axis."""
        inner = self.cp * self.tp
        return {"tp": 1, "cp": self.tp, REPLICA: self.tp, "dp": inner, "pp": inner * self.dp}[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these places; inverse of `coordinates`."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def __str__(self) -> str:
        cp = f" cp{self.cp}" if self.cp > 1 else ""
        return f"pp{self.pp} dp{self.dp}{cp} tp{self.tp}"

    def to_dict(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp, "cp": self.cp, "ep": 1}
