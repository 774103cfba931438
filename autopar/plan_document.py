"""The plan: every decision, as one versioned JSON document that a person can read, diff and edit.

Everything after the search is a function of (Program, Plan). Predictions and the proof travel
with it but are never read by the rewrites or the runtime.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.interleaving import SCHEDULES, parts_of, rank_of
from autopar.mesh import AXES, EP, ORDERS, REPLICATE, Mesh
from autopar.plan_fields import (
    PLAN,
    Check,
    count,
    entries,
    items,
    members,
    one_of,
    shown,
    text,
    whole,
    wrong,
)
from autopar.plan_predictions import predictions

VERSION = 1
PRECISIONS = ("fp32", "bf16-mixed", "bf16", "fp16")
OPTIMIZERS = ("adamw", "adamw-host", "adamw-8bit", "adafactor", "sgd", "sgd-momentum")
# Those whose states are one number for each element of a parameter: they go where it goes.
OF_ELEMENTS = ("adamw", "sgd", "sgd-momentum")
# Between blocks values are whole, or shards; never terms of a sum.
BOUNDARY = re.compile(r"^(R|S\(\d{1,3}\))$")
STORED = re.compile(r"^(R\*?|S\(\d{1,3}\))$")


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: the blocks it holds, in order, and which of them are recomputed.

    `selective[block]`: the label of a set in `Plan.reruns`, for blocks recomputed in part.
    `keep_gathered`: with ZeRO-3, the blocks whose parameters are gathered once a step and kept to
    their last backward (FSDP2's `reshard_after_forward=False`); the others are resharded after
    every forward.
    """

    blocks: tuple[str, ...]
    recompute: tuple[str, ...] = ()
    selective: Mapping[str, str] = field(default_factory=dict)
    keep_gathered: tuple[str, ...] = ()

    @property
    def recomputed(self) -> dict[str, str]:
        """How each recomputed block is: `full`, or the label of its set."""
        return {**dict.fromkeys(self.recompute, "full"), **self.selective}


@dataclass(frozen=True)
class Plan:
    """All decisions.

    `placements[block][op]` names the strategy of an op on the tp axis (for example `"shard n"`,
    `"replicate"`); `block` is the first block of each distinct kind, and holds for all blocks of
    that kind (`kinds` lists them). `cp_placements` names them on the cp axis, which splits the
    sequence; the ops of `placements` are then those of one cp rank. `boundary` is the placement on
    tp of the values that pass from block to block. `sizes` are the dims the program was planned for
    (batch is the micro-batch). `chunks`: how many stages every pp rank holds, and
    `autopar.interleaving` says which. `reruns[kind][label]`: ops of a block of that kind that run
    again in its backward, by the names that `placements` uses; a collective by its op and what it
    moves, as `all_gather of add`. `spare_experts`: slots that every rank has beyond its part of a
    layer's experts, where ranks split them.
    """

    model: str
    fingerprint: str
    cluster: str
    mesh: Mesh
    global_batch: int
    microbatch: int
    microbatches: int
    schedule: str
    zero: int
    precision: str
    optimizer: str
    boundary: str
    stages: tuple[StagePlan, ...]
    placements: dict[str, dict[str, str]]
    kinds: dict[str, tuple[str, ...]]
    sizes: dict[str, int]
    chunks: int = 1
    spare_experts: int = 0
    reruns: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    cp_placements: dict[str, dict[str, str]] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def recompute_label(self) -> str:
        return recompute_label(self.stages)

    @property
    def keep_label(self) -> str:
        return keep_label(self.stages)

    def stage_indexes(self, pp: int) -> tuple[int, ...]:
        """The stages that pp rank `pp` holds, in order."""
        return parts_of(self.schedule, pp, self.mesh.pp, self.chunks)

    def pp_rank(self, stage: int) -> int:
        """The pp rank that holds a stage."""
        return rank_of(self.schedule, stage, self.mesh.pp)

    def decisions(self) -> dict[str, Any]:
        """The document without predictions and notes: what two ranks must agree on."""
        document = self.to_dict()
        document.pop("predicted")
        document.pop("notes")
        return document

    def predicted_by_decisions(self) -> Plan:
        """The same plan, whose predictions name the decisions that they are of."""
        return replace(self, predicted={**self.predicted, "decisions": self._digest()})

    @property
    def is_edited(self) -> bool:
        """Whether its predictions are of other decisions: they were changed since."""
        return self.predicted.get("decisions") not in (None, self._digest())

    def _digest(self) -> str:
        text = json.dumps(self.decisions(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        order = ["version", *document]
        # What has a default comes late in the class; a reader looks for it here.
        order.insert(order.index("schedule") + 1, "chunks")
        order.insert(order.index("optimizer") + 1, "spare_experts")
        order.insert(order.index("placements") + 1, "reruns")
        order.insert(order.index("placements") + 1, "cp_placements")
        # An axis that splits nothing is not told.
        for name in ("cp_placements", "spare_experts"):
            if not document[name]:
                document.pop(name)
        for axis in ("cp", EP, REPLICATE):
            if self.mesh.degree(axis) == 1:
                document["mesh"].pop(axis)
        if not self.mesh.stages_inside:
            document["mesh"].pop("order")
        for stage in document["stages"]:
            if not stage["keep_gathered"]:
                stage.pop("keep_gathered")
        return {name: document[name] for name in dict.fromkeys(order) if name in document}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; raises `PlanError` naming the file and the field that is wrong.

        What needs no model is checked: types, closed sets, and that the fields fit each other.
        """
        from autopar.plan_consistency import check_consistent

        try:
            document = json.loads(Path(path).read_text())
        except FileNotFoundError as error:
            raise PlanError(f"no plan file {path}", next_step="check the path") from error
        except OSError as error:
            raise PlanError(
                f"can't read the plan {path}: {error.strerror}", next_step="check the path"
            ) from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is not JSON: {error}", next_step="repair the file") from error
        try:
            plan = Plan.from_dict(document)
            check_consistent(plan)
        except PlanError as error:
            raise PlanError(f"{path}: {error.message}", next_step=error.next_step) from error
        return plan

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`; checks types and the closed sets, not the fit to a model.

        Raises `PlanError` naming the field, what it is, and what it may be.
        """
        if not isinstance(document, Mapping):
            raise PlanError("a plan is a JSON object", next_step="start from `autopar plan --out`")
        version = document.get("version")
        if version != VERSION or type(version) is not int:
            raise PlanError(
                f"plan version {shown(version)}, this autopar reads {VERSION}",
                next_step="make the plan again with this version",
            )
        return Plan(**members(PLAN, document, _REQUIRED, _OPTIONAL))


def recompute_label(stages: Iterable[StagePlan]) -> str:
    """`none`, `full`, `k/n blocks`, `selective` or `k/n blocks, j in part`."""
    stages = tuple(stages)
    done = sum(len(s.recompute) for s in stages)
    part = sum(len(s.selective) for s in stages)
    total = sum(len(s.blocks) for s in stages)
    if total and total in (done, part):
        return "full" if done else "selective"
    whole_blocks = f"{done}/{total} blocks" if done else ""
    in_part = f"{part}{'' if done else f'/{total} blocks'} in part" if part else ""
    return ", ".join(t for t in (whole_blocks, in_part) if t) or "none"


def keep_label(stages: Iterable[StagePlan]) -> str:
    """`all blocks` or `k/n blocks`, whose parameters stay gathered; empty for none."""
    stages = tuple(stages)
    kept, total = sum(len(s.keep_gathered) for s in stages), sum(len(s.blocks) for s in stages)
    if not kept:
        return ""
    return "all blocks" if kept == total else f"{kept}/{total} blocks"


def _mesh(name: str, value: Any) -> Mesh:
    degrees: dict[str, Check] = dict.fromkeys((*AXES, EP, REPLICATE), whole)
    return Mesh(**members(name, value, {}, {**degrees, "order": _order}))


def _order(name: str, value: Any) -> str:
    return str(one_of(name, value, ORDERS))


def _names(name: str, value: Any) -> tuple[str, ...]:
    return items(name, value, text)


def _stage(name: str, value: Any) -> StagePlan:
    return StagePlan(**members(name, value, {"blocks": _names, "recompute": _names}, _SOME_BLOCKS))


def _boundary(name: str, value: Any) -> str:
    if not isinstance(value, str) or not BOUNDARY.match(value):
        raise wrong(name, value, "R, or S(dim) with a dim, as S(1)")
    return value


def _placements(name: str, value: Any) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = entries(name, value, lambda n, v: entries(n, v, text))
    for block, chosen in found.items():
        for key, placement in chosen.items():
            # What is no op's strategy but where a parameter lives; see `passes/rewrite/place.py`.
            if key.startswith("parameter ") and not STORED.match(placement):
                raise wrong(f"{name}.{block}.{key}", placement, "R, R*, or S(dim), as S(0)")
    return found


_REQUIRED: dict[str, Check] = {
    "version": whole,
    "model": text,
    "fingerprint": text,
    "cluster": text,
    "mesh": _mesh,
    "global_batch": whole,
    "microbatch": whole,
    "microbatches": whole,
    "schedule": lambda n, v: one_of(n, v, SCHEDULES),
    "zero": lambda n, v: one_of(n, v, (0, 1, 2, 3)),
    "precision": lambda n, v: one_of(n, v, PRECISIONS),
    "optimizer": lambda n, v: one_of(n, v, OPTIMIZERS),
    "boundary": _boundary,
    "stages": lambda n, v: items(n, v, _stage),
    "placements": _placements,
    "kinds": lambda n, v: entries(n, v, _names),
    "sizes": lambda n, v: entries(n, v, whole),
}
_OPTIONAL: dict[str, Check] = {
    "chunks": whole,
    "spare_experts": count,
    "cp_placements": _placements,
    "reruns": lambda n, v: entries(n, v, lambda k, sets: entries(k, sets, _names)),
    "predicted": predictions,
    "notes": _names,
}
_SOME_BLOCKS: dict[str, Check] = {
    "selective": lambda n, v: entries(n, v, text),
    "keep_gathered": _names,
}
