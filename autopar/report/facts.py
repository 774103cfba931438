"""The predictions inside a plan, with defaults: a hand-written plan may lack any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.mesh import ORDERS, REPLICATE
from autopar.plan_document import Plan

MEMORY_TERMS = ("parameters", "gradients", "optimizer", "activations", "buffers")
TIME_TERMS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp_comm": "TP communication",
    "cp_comm": "CP communication",
    "ep_comm": "EP communication",
    "dp_comm": "DP communication",
    "pp_comm": "PP communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the search predicted; seconds, bytes, fractions. `None` where it said nothing.
    `samples`: what is counted by the second, tokens where a sample is a sequence of them."""

    status: str
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory_limit_bytes: float | None
    memory_per_stage: tuple[Mapping[str, float], ...]
    time_breakdown: Mapping[str, float]
    stage_seconds: tuple[Mapping[str, float], ...]
    search: Mapping[str, Any]
    alternatives: tuple[Mapping[str, Any], ...]
    recipes: tuple[Mapping[str, Any], ...]
    neighbours: tuple[Mapping[str, Any], ...]
    activation_formula: Mapping[str, Any]
    memory_formulas: Mapping[str, Any]
    heaviest_ops: tuple[Mapping[str, Any], ...]
    class_seconds: Mapping[str, float]
    tp_links: tuple[Mapping[str, Any], ...]
    experts: int
    experts_hidden: float
    copies_seconds: float
    samples: str

    @staticmethod
    def of(plan: Plan) -> Facts:
        p = plan.predicted
        times = p.get("time_breakdown") or {}
        return Facts(
            str(p.get("status") or "not evaluated"),
            p.get("step_seconds"),
            p.get("tokens_per_second_per_gpu"),
            p.get("mfu"),
            p.get("memory_limit_bytes"),
            tuple(_with_total(stage) for stage in p.get("memory_per_stage") or ()),
            {k: float(times.get(k) or 0.0) for k in TIME_TERMS} if times else {},
            tuple(p.get("stage_seconds") or ()),
            p.get("search") or {},
            tuple(p.get("alternatives") or ()),
            tuple(p.get("recipes") or ()),
            tuple(p.get("neighbours") or ()),
            p.get("activation_formula") or {},
            p.get("memory_formulas") or {},
            tuple(p.get("heaviest_ops") or ()),
            p.get("class_seconds") or {},
            tuple(p.get("tp_links") or ()),
            int(p.get("experts") or 0),
            float(p.get("experts_hidden") or 0.0),
            float(p.get("copies_seconds") or 0.0),
            "tokens" if "sequence" in plan.sizes else "samples",
        )

    @property
    def fullest_stage(self) -> int | None:
        """Index of the stage with the largest total; None without memory figures."""
        stages = self.memory_per_stage
        return max(range(len(stages)), key=lambda i: stages[i]["total"]) if stages else None

    @property
    def peak_bytes(self) -> float | None:
        at = self.fullest_stage
        return None if at is None else self.memory_per_stage[at]["total"]

    def share(self, term: str) -> float:
        """Fraction of the step that a time term takes; 0 without figures."""
        total = sum(self.time_breakdown.values())
        return self.time_breakdown.get(term, 0.0) / total if total else 0.0

    def ratio(self, seconds: float | None) -> float | None:
        """Another plan's step over this one's."""
        return seconds / self.step_seconds if seconds and self.step_seconds else None


def _with_total(stage: Mapping[str, float]) -> dict[str, float]:
    terms = {k: float(stage.get(k) or 0) for k in MEMORY_TERMS}
    return {**terms, "total": float(stage.get("total") or sum(terms.values()))}


def mesh_text(mesh: Any) -> str:
    """`{"pp": 2, "dp": 4, "tp": 1, "cp": 1}` -> `pp2 dp4 tp1`, from the outermost axis; text stays
    text."""
    if not isinstance(mesh, Mapping):
        return str(mesh)
    axes = {k: v for k, v in mesh.items() if k not in (REPLICATE, "order")}
    if mesh.get("order") == ORDERS[1]:
        axes = {"dp": axes["dp"], **axes}
    told = [f"{k}{v}" for k, v in axes.items() if k in ("pp", "dp", "tp") or v != 1]
    if REPLICATE in mesh:
        told.append(f"shard{mesh.get('dp', 1) * mesh.get('cp', 1) // mesh[REPLICATE]}")
    return " ".join(told)
