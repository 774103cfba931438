"""The logical view of the cluster: named axes with degrees, laid over the ranks in one order."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes; `tp` is innermost (neighbouring ranks), `pp` outermost.

    rank = (pp_index * dp + dp_index) * tp + tp_index
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    def degree(self, axis: str) -> int:
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours of a group of this axis."""
        return {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        return {
            "pp": rank // (self.dp * self.tp),
            "dp": rank // self.tp % self.dp,
            "tp": rank % self.tp,
        }

    def __str__(self) -> str:
        return f"pp{self.pp} dp{self.dp} tp{self.tp}"

    def to_dict(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp, "cp": 1, "ep": 1}
