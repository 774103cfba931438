"""Small models for the tests of the passes, and the road up to each pass."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import fx, nn

import autopar.runtime.collectives  # noqa: F401 - registers the ops that the passes insert
from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.mesh import Mesh
from autopar.op_call import Bindings
from autopar.parts import Parts, Slot
from autopar.passes.analysis.blocks import Blocks, analyse_blocks
from autopar.passes.capture import capture
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import front_pipeline
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.placement import Placement
from autopar.plan_document import Plan, StagePlan
from autopar.program import Program
from tests.end_to_end import models

Inputs = dict[str, torch.Tensor]
BATCH, SEQUENCE, WIDTH, VOCABULARY = 4, 8, 16, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    """Embedding, two equal layers, a head: a language model without attention."""

    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def batch(size: int = BATCH) -> Inputs:
    ids = torch.arange(size * SEQUENCE).view(size, SEQUENCE) % VOCABULARY
    return {"ids": ids, "labels": (ids + 1) % VOCABULARY}


def model(name: str) -> tuple[nn.Module, Inputs]:
    """`mlp`, `tied`, or a toy of transformers, with the same weights at each call."""
    torch.manual_seed(0)
    if name in ("mlp", "tied"):
        return Mlp(tied=name == "tied"), batch()
    found: tuple[nn.Module, Inputs] = getattr(models, name)()
    return found


@cache
def _captured(name: str) -> Program:
    return capture(*model(name), name=name)


def captured(name: str) -> Program:
    """As captured: a copy that a pass may edit."""
    program = _captured(name)
    return program.with_graph(copy_graph(program.graph_module))


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        values[node] = made.node_copy(node, lambda n: values[n])
        values[node].meta = copy.copy(node.meta)
    module = fx.GraphModule(nn.Module(), made)
    for key, buffer in graph.named_buffers():
        module.register_buffer(key, buffer, persistent=False)
    return module


@cache
def simplified(name: str) -> Program:
    """After the front passes. Not to be edited."""
    program = captured(name)
    parts, _ = run_passes(Parts(program, sizes=program.sizes), front_pipeline())
    return parts.program


@cache
def blocks(name: str) -> Blocks:
    return analyse_blocks(simplified(name))


def block(name: str, kind: str) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
    """The static graph of a block, fresh."""
    program = simplified(name)
    bindings = Bindings(program.symbols, program.sizes)
    return cut_block(program, blocks(name).block(kind), bindings)


def axis(ranks: int = 2) -> Axis:
    return Axis(ranks, 1, Cluster.parse("h100:1x8"))


def plan(
    name: str,
    *,
    mesh: Mesh | None = None,
    placements: dict[str, dict[str, str]] | None = None,
    boundary: str = "R",
    stages: tuple[StagePlan, ...] | None = None,
) -> Plan:
    """A plan that replicates what `placements` does not name; one stage unless told."""
    program, found = simplified(name), blocks(name)
    names = tuple(b.name for b in found.chain)
    return Plan(
        model=name,
        fingerprint=program.fingerprint(),
        cluster="cpu:1",
        mesh=mesh or Mesh(),
        global_batch=BATCH,
        microbatch=program.sizes["batch"],
        microbatches=1,
        schedule="gpipe",
        zero=0,
        precision="fp32",
        optimizer="adamw",
        boundary=boundary,
        stages=stages or (StagePlan(names),),
        placements=placements or {},
        kinds=found.kinds,
        sizes=dict(program.sizes),
    )


# Column and row parallel, as a person would write it in a plan for the layers of `mlp`.
MEGATRON = {
    "parameter up.weight": "S(0)",
    "parameter up.bias": "S(0)",
    "parameter down.weight": "S(1)",
    "linear": "shard n",
    "gelu": "shard d2",
    "linear.1": "shard k",
}


def start(name: str, plan_: Plan) -> Parts:
    return Parts(simplified(name), plan_, dict(plan_.sizes))


def placement(text: str) -> Placement:
    return Placement.parse(text)
