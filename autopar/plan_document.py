"""The plan: every decision, as one versioned JSON document that a person can read, diff and edit.

Everything after the search is a function of (Program, Plan). Predictions and the proof travel
with it but are never read by the rewrites or the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.mesh import Mesh

VERSION = 1
SCHEDULES = ("gpipe", "1f1b")
PRECISIONS = ("fp32", "bf16-mixed", "bf16")


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: the blocks it holds, in order, and which of them are recomputed."""

    blocks: tuple[str, ...]
    recompute: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All decisions.

    `placements[block][op]` names the strategy of an op on the tp axis (for example
    `"shard n"`, `"replicate"`); `block` is the first block of each distinct kind, and holds for all
    blocks of that kind (`kinds` lists them). `boundary` is the placement of the values that pass
    from block to block. `sizes` are the dims the program was planned for (batch is the
    micro-batch).
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
    predicted: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def recompute_label(self) -> str:
        """`none`, `full`, or `k/n blocks`."""
        done = sum(len(s.recompute) for s in self.stages)
        total = sum(len(s.blocks) for s in self.stages)
        return "none" if not done else "full" if done == total else f"{done}/{total} blocks"

    def decisions(self) -> dict[str, Any]:
        """The document without predictions and notes: what two ranks must agree on."""
        document = self.to_dict()
        document.pop("predicted")
        document.pop("notes")
        return document

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        return {"version": document.pop("version"), **document}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; raises `PlanError` naming the field that is wrong."""
        try:
            document = json.loads(Path(path).read_text())
        except FileNotFoundError as error:
            raise PlanError(f"no plan file {path}", next_step="check the path") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} is not JSON: {error}", next_step="repair the file") from error
        return Plan.from_dict(document)

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`; checks types and the closed sets, not the fit to a model."""
        if not isinstance(document, Mapping):
            raise PlanError("a plan is a JSON object", next_step="start from `autopar plan --out`")
        if document.get("version") != VERSION:
            raise PlanError(
                f"plan version {document.get('version')!r}, this autopar reads {VERSION}",
                next_step="make the plan again with this version",
            )
        known = set(Plan.__dataclass_fields__)
        unknown, missing = set(document) - known, known - set(document) - {"predicted", "notes"}
        if unknown or missing:
            raise PlanError(
                f"plan fields: unknown {sorted(unknown)}, missing {sorted(missing)}",
                next_step="compare with a plan from `autopar plan --out`",
            )
        d = dict(document)
        try:
            mesh = {
                k: _whole(f"mesh.{k}", v) for k, v in d["mesh"].items() if k not in ("cp", "ep")
            }
            d["mesh"] = Mesh(**mesh)
            d["stages"] = tuple(
                StagePlan(tuple(s["blocks"]), tuple(s["recompute"])) for s in d["stages"]
            )
            d["kinds"] = {k: tuple(v) for k, v in d["kinds"].items()}
            d["sizes"] = {k: _whole(f"sizes.{k}", v) for k, v in d["sizes"].items()}
            d["placements"] = {k: dict(v) for k, v in d["placements"].items()}
            d["notes"] = tuple(d.get("notes", ()))
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise PlanError(
                f"malformed plan: {error!r}",
                next_step="compare with a plan from `autopar plan --out`",
            ) from error
        for name in ("global_batch", "microbatch", "microbatches"):
            d[name] = _whole(name, d[name])
        _one_of("schedule", d["schedule"], SCHEDULES)
        _one_of("precision", d["precision"], PRECISIONS)
        _one_of("zero", d["zero"], (0, 1, 2, 3))
        return Plan(**d)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} is {value!r}", next_step="give a whole number of at least 1")
    return value


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise PlanError(f"{name} is {value!r}", next_step=f"choose one of {list(allowed)}")
