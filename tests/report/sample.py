"""Hand-built plans that look like real ones: a Llama-like model, its blocks, a 1F1B timeline."""

from __future__ import annotations

from functools import partial

from autopar.mesh import Mesh
from autopar.plan_document import Plan, StagePlan
from autopar.report.block_picture import BlockPicture, EdgePicture, OpPicture
from autopar.report.timeline import TimelineEvent, simulated, split_recompute

GIB = 1024**3


class Picture:
    """Writes a block op by op; `call` returns the new op's name, as a tracer would."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.ops: list[OpPicture] = []
        self.edges: list[EdgePicture] = []
        self.module = ""

    def call(
        self,
        op: str,
        *inputs: str | EdgePicture,
        shape: tuple[int, ...] = (1, 8192, 8192),
        placement: str = "S(1)",
        strategy: str = "shard d1",
        flops: float = 0.0,
        trivial: bool = False,
    ) -> str:
        used = sum(1 for known in self.ops if known.op == op)
        name = f"{op}_{used}" if used else op
        bound = "compute" if flops else "memory"
        seconds = 0.0 if trivial else flops / 5e14 if flops else 6e-5
        saved = 0 if trivial or op == "add" else 16 << 20
        path = f"{self.prefix}.{self.module}" if self.module else self.prefix
        self.ops.append(
            OpPicture(
                name, op, path, shape, placement, strategy, flops, seconds, bound, saved, trivial
            )
        )
        for item in inputs:
            edge = EdgePicture(item, name, bytes=16 << 20) if isinstance(item, str) else item
            self.edges.append(
                EdgePicture(
                    edge.source, name, edge.collective, edge.backward_collective, edge.bytes
                )
            )
        return name

    def view(self, op: str, x: str, placement: str, shape: tuple[int, ...]) -> str:
        return self.call(op, x, placement=placement, shape=shape, strategy="shard f0", trivial=True)


def sent(source: str, forward: str, backward: str) -> EdgePicture:
    return EdgePicture(source, "", forward, backward, 128 << 20)


def norm(p: Picture, x: str, module: str) -> str:
    p.module = module
    cast = p.call("to", x, trivial=True)
    mean = p.call("mean", p.call("pow", cast), shape=(1, 8192, 1))
    scale = p.call("rsqrt", p.call("add", mean, shape=(1, 8192, 1)), shape=(1, 8192, 1))
    cast = p.call("to", p.call("mul", cast, scale), trivial=True)
    return p.call("mul", cast)


def linear(
    p: Picture, module: str, x: str | EdgePicture, column: bool, shape: tuple[int, ...]
) -> str:
    p.module = module
    return p.call(
        "linear", x, shape=shape, placement=f"S({len(shape) - 1})" if column else "P",
        strategy="shard n" if column else "shard k", flops=2.0e12,
    )  # fmt: skip


def rotated(p: Picture, x: str, cos: str, sin: str, heads: int) -> str:
    """Rotary embedding as Hugging Face writes it: two slices, neg, cat, two mul, add."""
    shape = (1, heads, 8192, 128)
    plain = p.call("mul", x, cos, shape=shape)
    first, second = (p.view("slice", x, "S(1)", (1, heads, 8192, 64)) for _ in range(2))
    turned = p.call("cat", p.call("neg", second, shape=shape), first, shape=shape)
    return p.call("add", plain, p.call("mul", turned, sin, shape=shape), shape=shape)


def layer(index: int = 0, count: int = 80) -> BlockPicture:
    """A Llama layer with Megatron TP and sequence parallelism: about 70 ops."""
    name = f"model.layers.{index}"
    p = Picture(name)
    x = norm(p, "hidden_states", "input_layernorm")
    shared = sent(x, "all_gather", "reduce_scatter")
    heads = {}
    for which, many in (("q", 64), ("k", 8), ("v", 8)):
        y = linear(p, f"self_attn.{which}_proj", shared, True, (1, 8192, many * 128))
        p.module = "self_attn"
        y = p.view("view", y, "S(2)", (1, 8192, many, 128))
        heads[which] = p.view("transpose", y, "S(1)", (1, many, 8192, 128))
    p.module = "self_attn"
    cos, sin = (
        p.call("unsqueeze", v, shape=(1, 1, 8192, 128), placement="R", trivial=True)
        for v in ("cos", "sin")
    )
    q, k = rotated(p, heads["q"], cos, sin, 64), rotated(p, heads["k"], cos, sin, 8)
    y = p.call(
        "scaled_dot_product_attention", q, k, heads["v"], shape=(1, 64, 8192, 128),
        placement="S(1)", strategy="shard g", flops=3.3e12,
    )  # fmt: skip
    y = p.view("transpose", y, "S(2)", (1, 8192, 64, 128))
    y = p.view("reshape", y, "S(2)", (1, 8192, 8192))
    y = linear(p, "self_attn.o_proj", y, False, (1, 8192, 8192))
    p.module = ""
    residual = p.call("add", "hidden_states", sent(y, "reduce_scatter", "all_gather"))
    shared = sent(norm(p, residual, "post_attention_layernorm"), "all_gather", "reduce_scatter")
    gate = linear(p, "mlp.gate_proj", shared, True, (1, 8192, 28672))
    up = linear(p, "mlp.up_proj", shared, True, (1, 8192, 28672))
    p.module = "mlp.act_fn"
    wide = partial(p.call, shape=(1, 8192, 28672), placement="S(2)", strategy="shard d2")
    gate = wide("silu", gate)
    p.module = "mlp"
    y = linear(p, "mlp.down_proj", wide("mul", gate, up), False, (1, 8192, 8192))
    p.module = ""
    p.call("add", residual, sent(y, "reduce_scatter", "all_gather"))
    return BlockPicture(name, count, tuple(p.ops), tuple(p.edges))


def embedding() -> BlockPicture:
    p = Picture("model.embed_tokens")
    p.call("embedding", "input_ids", placement="P", strategy="shard v")
    return BlockPicture("embed", 1, tuple(p.ops), tuple(p.edges))


def head() -> BlockPicture:
    p = Picture("model")
    x = norm(p, "hidden_states", "norm")
    gathered = sent(x, "all_gather", "reduce_scatter")
    logits = linear(p, "lm_head", gathered, True, (1, 8192, 128256))
    p.module = ""
    flat = p.view("view", logits, "S(1)", (8192, 128256))
    flat = p.call(
        "to", flat, shape=(8192, 128256), placement="S(1)", strategy="shard d1", trivial=True
    )
    p.call("cross_entropy_loss", flat, "labels", shape=(), placement="R", strategy="shard c")
    return BlockPicture("head", 1, tuple(p.ops), tuple(p.edges))


def pictures(layers: int = 80) -> list[BlockPicture]:
    return [embedding(), layer(0, layers), head()]


def stage_cuts(stages: int, layers: int) -> tuple[StagePlan, ...]:
    names = ["embed", *(f"model.layers.{i}" for i in range(layers)), "head"]
    edges = [round(i * len(names) / stages) for i in range(stages + 1)]
    cuts = [tuple(names[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return tuple(StagePlan(c, tuple(n for n in c if "layers" in n)[: len(c) // 3]) for c in cuts)


def stage_times(cuts: tuple[StagePlan, ...]) -> list[dict[str, float]]:
    times = []
    for cut in cuts:
        forward = 0.0055 * sum("layers" in b for b in cut.blocks) + 0.006 * ("head" in cut.blocks)
        again = 0.0055 * len(cut.recompute)
        times.append({"forward": forward, "backward": 2 * forward + again, "recompute": again})
    return times


def memory(cuts: tuple[StagePlan, ...], scale: float = 1.0) -> list[dict[str, int]]:
    """Later stages hold fewer micro-batches in flight."""
    stages, found = len(cuts), []
    for index, cut in enumerate(cuts):
        weights = int(scale * GIB * 0.11 * len(cut.blocks))
        live = int(scale * GIB * 0.32 * (stages - index) * (len(cut.blocks) - len(cut.recompute)))
        terms = {
            "parameters": weights, "gradients": 2 * weights, "optimizer": 6 * weights // 4,
            "activations": live // 2, "buffers": int(2.6 * GIB * scale),
        }  # fmt: skip
        found.append({**terms, "total": sum(terms.values())})
    return found


def make_plan(
    stages: int = 4,
    layers: int = 80,
    microbatches: int = 32,
    model: str = "zoo:llama3-70b",
    mesh: Mesh | None = None,
    blocks: list[BlockPicture] | None = None,
) -> Plan:
    mesh = mesh or Mesh(stages, 2, 8)
    cuts, shown = stage_cuts(stages, layers), blocks if blocks is not None else pictures(layers)
    times = stage_times(cuts)
    slowest = max(t["forward"] + t["backward"] for t in times)
    busy, again = slowest * microbatches, max(t["recompute"] for t in times) * microbatches
    breakdown = {
        "compute": busy * 0.83 - again, "recompute": again, "tp_comm": busy * 0.17,
        "dp_comm": 0.21, "pp_comm": 0.0016 * microbatches, "bubble": slowest * (stages - 1),
        "optimizer": 0.034,
    }  # fmt: skip
    if stages == 1:
        breakdown |= {"pp_comm": 0.0, "bubble": 0.0}
    step = sum(breakdown.values())
    return Plan(
        model=model, fingerprint="5f1c0a9e7d3b2468", cluster="h100:8x8", mesh=mesh,
        global_batch=microbatches * mesh.dp, microbatch=1, microbatches=microbatches,
        schedule="1f1b", zero=1, precision="bf16-mixed", optimizer="adamw", boundary="S(1)",
        stages=cuts, placements={b.name: {o.name: o.strategy for o in b.ops} for b in shown},
        kinds={
            "embed": ("embed",), "head": ("head",),
            "model.layers.0": tuple(f"model.layers.{i}" for i in range(layers)),
        },
        sizes={"batch": 1, "sequence": 8192},
        notes=("Op histc has no sharding rule: replicated on every rank.",),
        predicted=predictions(cuts, times, breakdown, step, microbatches * mesh.dp, mesh.size),
    )  # fmt: skip


def predictions(
    cuts: tuple[StagePlan, ...],
    times: list[dict[str, float]],
    breakdown: dict[str, float],
    step: float,
    batch: int,
    ranks: int,
) -> dict[str, object]:
    return {
        "status": "optimal",
        "step_seconds": step,
        "tokens_per_second_per_gpu": batch * 8192 / step / ranks,
        "mfu": 0.463,
        "memory_limit_bytes": 70 * GIB,
        "memory_per_stage": memory(cuts, 4 / len(cuts) if len(cuts) < 5 else 0.9),
        "time_breakdown": breakdown,
        "stage_seconds": times,
        "search": {
            "seconds": {"capture": 6.12, "analyse": 3.4, "search": 11.8},
            "shapes": 62, "pruned": 47, "bound_step_seconds": step * 0.9997, "gap": 0.0003,
        },
        "alternatives": [
            {"mesh": "pp2 dp4 tp8", "step_seconds": step * 1.021, "why": "more gradient traffic"},
            {"mesh": "pp8 dp1 tp8", "step_seconds": step * 1.083, "why": "larger bubble"},
            {"mesh": "pp4 dp4 tp4", "step_seconds": None, "why": "stage 0 is 11.2 GiB over"},
        ],
        "recipes": [
            {"name": "data parallel", "step_seconds": None, "fits": False},
            {"name": "FSDP (ZeRO-3)", "step_seconds": step * 1.41, "fits": True},
            {"name": "Megatron tp8 pp4", "step_seconds": step * 1.032, "fits": True},
        ],
    }  # fmt: skip


def timeline(plan: Plan) -> list[TimelineEvent]:
    again = [stage["recompute"] for stage in plan.predicted["stage_seconds"]]
    return split_recompute(simulated(plan), again)
