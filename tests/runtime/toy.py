"""A small chain model and its stage programs, written by hand as the rewrites would make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx, nn
from torch.nn import functional

from autopar.mesh import Mesh
from autopar.placement import Placement, Replicate, ReplicatePartialGrad, Shard
from autopar.plan_document import Plan, StagePlan
from autopar.stage_program import BlockProgram, ParameterSpec, StageProgram, ValueSpec

VOCABULARY, WIDTH, INNER, SEQUENCE, LAYERS = 16, 8, 12, 6, 4
IGNORED = -100
ops = torch.ops.autopar


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Embedding, layers, head (tied to the embedding or not), mean loss over kept labels."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )


def make_model(tied: bool = False, dtype: torch.dtype = torch.float64) -> Toy:
    torch.manual_seed(0)
    model = Toy(tied).to(dtype)
    model.scale = torch.tensor(0.5, dtype=dtype)
    return model


def make_batch(rows: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Labels are ignored unevenly over the rows: the first half has few left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    labels[: rows // 2, 1:] = IGNORED
    return {"ids": ids, "labels": labels}


def graph(function: Callable[..., object]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def _embed(group: str) -> fx.GraphModule:
    if not group:
        return graph(lambda w, scale, ids: (functional.embedding(ids, w) * scale,))
    return graph(
        lambda w, scale, ids: (
            ops.all_reduce(ops.vocab_embedding(w, ids, -1, 2, group), group) * scale,
        )
    )


def _layer(group: str) -> fx.GraphModule:
    def alone(g, b, wu, bu, wd, bd, x):  # type: ignore[no-untyped-def]
        h = functional.layer_norm(x, (WIDTH,), g, b)
        return (x + functional.linear(functional.gelu(functional.linear(h, wu, bu)), wd, bd),)

    def split(g, b, wu, bu, wd, bd, x):  # type: ignore[no-untyped-def]
        # Megatron with sequence parallelism: the norm works on a rank's own tokens.
        own = ops.slice(x, 1, 2, group)
        h = ops.all_gather(functional.layer_norm(own, (WIDTH,), g, b), 1, 2, group)
        part = functional.linear(functional.gelu(functional.linear(h, wu, bu)), wd)
        return (x + ops.all_reduce(part, group) + bd,)

    return graph(split if group else alone)


def _head(group: str) -> fx.GraphModule:
    def alone(w, x, labels):  # type: ignore[no-untyped-def]
        logits = functional.linear(x, w)
        return (
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED),
        )

    def split(w, x, labels):  # type: ignore[no-untyped-def]
        logits = functional.linear(ops.copy(x, group), w)
        return (
            ops.vocab_cross_entropy(logits.flatten(0, 1), labels.flatten(), IGNORED, 0.0, 2, group),
        )

    return graph(split if group else alone)


def _placements(tp: int) -> dict[str, Placement]:
    if tp == 1:
        return {}
    return {
        "embed.weight": Shard(0),
        "head.weight": Shard(0),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "norm.weight": ReplicatePartialGrad,
        "norm.bias": ReplicatePartialGrad,
    }


def make_stages(
    plan: Plan, group: str = "", tied: bool = False, dtype: torch.dtype = torch.float64
) -> list[StageProgram]:
    """Stage programs of a `Toy`; `group`: name of the tp group when tp is 2."""
    head = "embed.weight" if tied else "head.weight"
    layer_graph = _layer(group)
    names = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    blocks = [
        BlockProgram("embed", _embed(group), ("embed.weight",), ("scale",), ("ids",), ("h0",))
    ]
    for i in range(LAYERS):
        parameters = tuple(f"layers.{i}.{name}" for name in names)
        blocks.append(
            BlockProgram(f"layer{i}", layer_graph, parameters, (), (f"h{i}",), (f"h{i + 1}",))
        )
    last = (f"h{LAYERS}", "labels")
    blocks.append(BlockProgram("head", _head(group), (head,), (), last, ("loss",)))
    rows = plan.microbatch
    known = {block.name: block for block in blocks}
    shapes = {k: tuple(v.shape) for k, v in make_model(tied, dtype).named_parameters()}
    where: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for name in stage.blocks:
            for fqn in known[name].parameters:
                where.setdefault(fqn, []).append(index)
    made = []
    for index, stage in enumerate(plan.stages):
        held = [replace(known[n], recompute=n in stage.recompute) for n in stage.blocks]
        first, final = index == 0, index == len(plan.stages) - 1
        made.append(
            StageProgram(
                index=index,
                stages=len(plan.stages),
                blocks=held,
                parameters={
                    fqn: _spec(fqn, shapes[fqn], dtype, plan.mesh.tp, where[fqn])
                    for block in held
                    for fqn in block.parameters
                },
                buffers=tuple(n for block in held for n in block.buffers),
                receive=() if first else (_value(held[0].inputs[0], rows, dtype),),
                send=() if final else (_value(held[-1].outputs[0], rows, dtype),),
                count=graph(lambda labels: (labels != IGNORED).sum()) if final else None,
                count_inputs=("labels",) if final else (),
                loss="loss" if final else None,
                batch_inputs={
                    name: ValueSpec(name, (rows, SEQUENCE), torch.int64)
                    for name in ("ids", "labels")
                },
            )
        )
    return made


def _spec(
    fqn: str, shape: tuple[int, ...], dtype: torch.dtype, tp: int, stages: list[int]
) -> ParameterSpec:
    placed = _placements(tp)
    short = fqn if fqn in placed else ".".join(fqn.split(".")[-2:])
    return ParameterSpec(
        fqn, shape, dtype, placed.get(short, Replicate), True, tuple(sorted(set(stages)))
    )


def _value(name: str, rows: int, dtype: torch.dtype) -> ValueSpec:
    return ValueSpec(name, (rows, SEQUENCE, WIDTH), dtype, requires_grad=True)


def make_plan(
    mesh: Mesh,
    *,
    microbatch: int = 2,
    microbatches: int = 2,
    zero: int = 0,
    schedule: str = "1f1b",
    precision: str = "fp32",
    recompute: bool = False,
    chunks: int = 1,
    kept: tuple[str, ...] = (),
) -> Plan:
    """`kept`: blocks whose parameters ZeRO-3 keeps gathered."""
    names = ["embed", *(f"layer{i}" for i in range(LAYERS)), "head"]
    size = -(-len(names) // (mesh.pp * chunks))
    cuts = [tuple(names[i : i + size]) for i in range(0, len(names), size)]
    stages = mesh.pp * chunks
    if len(cuts) < stages:
        first = len(names) - stages + 1
        cuts = [tuple(names[:first]), *((n,) for n in names[first:])]
    return Plan(
        model="toy",
        fingerprint="",
        cluster="",
        mesh=mesh,
        global_batch=microbatch * microbatches * mesh.dp,
        microbatch=microbatch,
        microbatches=microbatches,
        schedule=schedule,
        zero=zero,
        precision=precision,
        optimizer="adamw",
        boundary="R",
        stages=tuple(
            StagePlan(c, c if recompute else (), {}, tuple(n for n in c if n in kept)) for c in cuts
        ),
        placements={},
        kinds={},
        sizes={},
        chunks=chunks,
    )
