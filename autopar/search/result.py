"""What a search hands back: the decisions, their price, and the proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.block_cost import ChainCost
from autopar.cost.evaluate import Evaluation
from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.plan_document import StagePlan, keep_label, recompute_label
from autopar.search.stages import StageSolution


@dataclass(frozen=True)
class Choice:
    """All decisions of one candidate; names the same things as `Plan`.

    `why`: what makes it slower than the plan, filled in when they are compared.
    """

    setting: Setting
    chain: ChainCost
    stages: tuple[StagePlan, ...]
    step_seconds: float
    peaks: tuple[int, ...]
    why: str = ""

    @staticmethod
    def of(setting: Setting, chain: ChainCost, found: StageSolution) -> Choice:
        names = [b.name for b in chain.blocks]
        partials = found.partial or ({},) * len(found.recompute)
        kept = found.kept or ((),) * len(found.recompute)
        stages = tuple(
            StagePlan(
                tuple(names[a:b]),
                tuple(names[i] for i in again),
                {names[i]: label for i, label in partial.items()},
                tuple(names[i] for i in keep),
            )
            for a, b, again, partial, keep in zip(
                found.cuts, found.cuts[1:], found.recompute, partials, kept, strict=False
            )
        )
        return Choice(setting, chain, stages, found.objective, found.peaks)

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh

    @property
    def microbatch(self) -> int:
        return self.setting.microbatch

    @property
    def microbatches(self) -> int:
        return self.setting.microbatches

    @property
    def schedule(self) -> str:
        return self.setting.schedule

    @property
    def chunks(self) -> int:
        return self.setting.chunks

    @property
    def zero(self) -> int:
        return self.setting.zero

    @property
    def precision(self) -> str:
        return self.setting.precision

    @property
    def optimizer(self) -> str:
        return self.setting.optimizer

    @property
    def boundary(self) -> str:
        return self.chain.boundary

    @property
    def recompute_label(self) -> str:
        return recompute_label(self.stages)

    @property
    def keep_label(self) -> str:
        return keep_label(self.stages)

    @property
    def reruns(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """The sets of ops that blocks recomputed in part use, by kind and label."""
        priced = {b.name: b for b in self.chain.blocks}
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for stage in self.stages:
            for name, label in stage.selective.items():
                block = priced[name]
                found.setdefault(block.kind, {})[label] = block.option(label).ops
        return {kind: dict(sorted(sets.items())) for kind, sets in found.items()}

    def describe(self) -> str:
        """One line: mesh, micro-batches, schedule, ZeRO level, recomputation, boundary."""
        chunks = f" with {self.chunks} chunks" if self.chunks > 1 else ""
        kept = f" ({self.keep_label} kept gathered)" if self.keep_label else ""
        return (
            f"{self.mesh}, {self.microbatches} micro-batch{'es' * (self.microbatches > 1)} of"
            f" {self.microbatch},"
            f" {self.schedule}{chunks}, ZeRO-{self.zero}{kept}, recompute {self.recompute_label},"
            f" boundary {self.boundary}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "mesh": self.mesh.to_dict(),
            "microbatch": {"size": self.microbatch, "count": self.microbatches},
            "schedule": self.schedule,
            "chunks": self.chunks,
            "zero": self.zero,
            **({"keep_gathered": self.keep_label} if self.keep_label else {}),
            "recompute": self.recompute_label,
            "boundary": self.boundary,
            "step_seconds": self.step_seconds,
            "peak_bytes": max(self.peaks),
            "why": self.why,
        }


@dataclass(frozen=True)
class RecipeScore:
    """A plain configuration that practitioners start from, priced by the same evaluator.

    `fits` is None when the recipe has no legal form here. `reason` says why, or why it does not
    fit; then there is no `choice`.
    """

    name: str
    fits: bool | None
    choice: Choice | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = self.choice.to_dict() if self.choice else {"why": self.reason}
        legal = {} if self.fits is None else {"fits": self.fits}
        return {"name": self.name, **legal, **found}


@dataclass(frozen=True)
class Neighbour:
    """The best plan with one decision changed; `choice` is None when none fits, `reason` says what
    it would need, or why there is none whatever the memory (`fits` is None)."""

    change: str
    fits: bool | None
    choice: Choice | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = self.choice.to_dict() if self.choice else {"why": self.reason}
        return {"change": self.change, "fits": self.fits, **found}


@dataclass(frozen=True)
class Relaxation:
    """Something that makes an impossible request possible, verified by solving again.

    `untried`: why that could not be done here.
    """

    change: str
    fits: bool
    step_seconds: float | None = None
    peak_bytes: int | None = None
    plan: str = ""
    untried: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "plan": self.plan,
            **({"untried": self.untried} if self.untried else {}),
        }


@dataclass(frozen=True)
class Infeasible:
    """Why nothing fits: the smallest limit that would, and what to relax, in the order to try."""

    limit: int
    smallest_bytes: int
    smallest: Choice
    relaxations: tuple[Relaxation, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "limit_bytes": self.limit,
            "smallest_bytes": self.smallest_bytes,
            "smallest_plan": self.smallest.to_dict(),
            "relaxations": [r.to_dict() for r in self.relaxations],
        }


@dataclass(frozen=True)
class SearchResult:
    """`status`: `optimal` (proven in the stated model), `feasible` (time ran out), `infeasible`.

    `bound_step_seconds`: no configuration of the searched space is faster; `gap` is relative to it.
    `shapes`: mesh shapes considered; `pruned`: those of them that no full solve was needed for.
    `configurations` counts (mesh, micro-batch, schedule, ZeRO, placements): considered, solved, and
    why the others were not. `no_cut`: where no memory would do, why, and the next step. `seconds`:
    until the plan was proven; `comparison_seconds`: for other plans beside it; `pins`:
    those that were given; all that is said of other plans is of such that keep them.
    """

    status: str
    choice: Choice | None
    evaluation: Evaluation | None
    bound_step_seconds: float | None
    gap: float | None
    memory_limit: int
    shapes: int
    pruned: int
    configurations: Mapping[str, int]
    seconds: float = 0.0
    comparison_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    alternatives: tuple[Choice, ...] = ()
    recipes: tuple[RecipeScore, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    infeasible: Infeasible | None = None
    no_cut: tuple[str, str] = ("", "")
    provider_seconds: float = field(default=0.0)
    pins: str = ""

    @property
    def step_seconds(self) -> float | None:
        return self.choice.step_seconds if self.choice else None

    @property
    def memory_per_stage(self) -> list[dict[str, int]]:
        return [m.to_dict() for m in self.evaluation.memory_per_stage] if self.evaluation else []

    @property
    def time_breakdown(self) -> dict[str, float]:
        return dict(self.evaluation.time_breakdown) if self.evaluation else {}

    def search_dict(self) -> dict[str, Any]:
        """The `search` part of the JSON report; the caller adds its own seconds."""
        return {
            "seconds": {"search": self.seconds, "compare": self.comparison_seconds},
            "shapes": self.shapes,
            "pruned": self.pruned,
            "configurations": dict(self.configurations),
            "bound_step_seconds": self.bound_step_seconds,
            "gap": self.gap,
            "alternatives": [c.to_dict() for c in self.alternatives],
            "recipes": [r.to_dict() for r in self.recipes],
            "neighbours": [n.to_dict() for n in self.neighbours],
            **({"pins": self.pins} if self.pins else {}),
        }
