"""The program in parts while it is rewritten: shared values, a graph per kind of block, stages.

Passes take and return `Parts`. `graphs` holds one graph per *kind* of block (identical layers share
it); `slots[kind]` tells what its placeholders are, so that each block of the kind gets its own
parameters when the stages are put together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.errors import PassError
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.stage_program import StageProgram


@dataclass(frozen=True, slots=True)
class Slot:
    """One placeholder of a block graph: `kind` parameter, buffer, constant or value; `name` of the
    representative's: an fqn for parameters, a node name for values."""

    kind: str
    name: str


@dataclass(slots=True)
class Parts:
    """`blocks` is the result of the blocks analysis; `shared` and `count` are graphs or None."""

    program: Program
    plan: Plan | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    blocks: Any = None
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    shared: fx.GraphModule | None = None
    count: fx.GraphModule | None = None
    stages: tuple[StageProgram, ...] = ()

    @property
    def decided(self) -> Plan:
        """The plan; for passes that run after the search."""
        if self.plan is None:
            raise PassError("this pass needs a plan", next_step="run the search first")
        return self.plan

    def evolve(self, **changes: Any) -> Parts:
        return replace(self, **changes)

    def text(self) -> str:
        """The printed graphs, for `--dump-after` and diffs."""
        parts = []
        if self.stages:
            for stage in self.stages:
                parts.append(f"# stage {stage.index} of {stage.stages}")
                for spec in stage.receive:
                    parts.append(
                        f"{spec.name} = autopar.recv(stage={stage.index - 1})  "
                        f"# {list(spec.shape)} {spec.dtype} {spec.placement}"
                    )
                for block in stage.blocks:
                    mark = "  # recomputed in the backward" if block.recompute else ""
                    if block.rerun is not None:
                        mark = f"  # runs again in the backward: {', '.join(block.rerun.ops)}"
                    parts.append(f"# block {block.name}{mark}\n{block.graph.code.strip()}")
                for spec in stage.send:
                    parts.append(
                        f"autopar.send({spec.name}, stage={stage.index + 1})  "
                        f"# {list(spec.shape)} {spec.dtype} {spec.placement}"
                    )
            return "\n\n".join(parts) + "\n"
        if self.graphs:
            if self.shared is not None:
                parts.append(f"# shared values\n{self.shared.code.strip()}")
            for kind, graph in self.graphs.items():
                alike = self.blocks.kinds[kind]
                parts.append(f"# block {kind} (x{len(alike)})\n{graph.code.strip()}")
            return "\n\n".join(parts) + "\n"
        return str(self.program.graph_module.code.strip()) + "\n"
