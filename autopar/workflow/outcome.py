"""From a search result to a plan: decisions, predictions and proof in one document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.block_cost import ChainCost
from autopar.cluster import Cluster
from autopar.cost.block_moment import gathered_bytes
from autopar.cost.evaluate import evaluate
from autopar.cost.fullest_moment import rooted
from autopar.cost.setting import PRECISION
from autopar.cost.stage_walk import divided_seconds
from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.search.result import Choice, SearchResult
from autopar.workflow.explanation import Explanation

NOTES_SHOWN = 40


@dataclass(frozen=True)
class Outcome:
    """A plan (None when nothing fits) with the search that found it and the program it is for."""

    plan: Plan | None
    result: SearchResult
    program: Program
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """What `autopar plan --json` prints."""
        result = self.result
        search = result.search_dict()
        search["seconds"] = {**search["seconds"], **self.seconds}
        document: dict[str, Any] = {"status": result.status, "model": self.program.name}
        if self.plan is not None:
            predicted = dict(self.plan.predicted)
            predicted.pop("search", None)
            predicted.pop("decisions")
            plan = self.plan
            document |= {
                **predicted,
                "mesh": plan.mesh.to_dict(),
                "microbatch": {"size": plan.microbatch, "count": plan.microbatches},
                "schedule": plan.schedule,
                "chunks": plan.chunks,
                "zero": plan.zero,
                "recompute": plan.recompute_label,
                "precision": plan.precision,
                "optimizer": plan.optimizer,
                "spare_experts": plan.spare_experts,
                "boundary": plan.boundary,
                "stages": [{"blocks": len(s.blocks), "first": s.blocks[0]} for s in plan.stages],
                "notes": list(plan.notes),
            }
        if result.infeasible is not None:
            document["infeasible"] = result.infeasible.to_dict()
        if result.no_cut[0]:
            document["infeasible"] = {"why": result.no_cut[0], "next_step": result.no_cut[1]}
        document["memory_limit_bytes"] = result.memory_limit
        document["search"] = search
        return document


def build_plan(
    program: Program,
    cluster: Cluster,
    result: SearchResult,
    sizes: dict[str, int],
    global_batch: int,
    kinds: dict[str, tuple[str, ...]],
    flops_per_sample: float,
    seconds: dict[str, float],
    notes: tuple[str, ...],
    more: Explanation | None = None,
    spare_experts: int = 0,
) -> Plan:
    """The plan of a search that found one. `flops_per_sample`: forward and backward of one sample,
    whole model; `spare_experts`: what the search was asked to leave room for."""
    choice = result.choice
    assert choice is not None
    bound = {**sizes, "batch": choice.microbatch}
    plan = Plan(
        model=program.name,
        fingerprint=program.fingerprint(),
        cluster=cluster.name,
        mesh=choice.mesh,
        global_batch=global_batch,
        microbatch=choice.microbatch,
        microbatches=choice.microbatches,
        schedule=choice.schedule,
        chunks=choice.chunks,
        zero=choice.zero,
        precision=choice.precision,
        optimizer=choice.optimizer,
        spare_experts=spare_experts,
        boundary=choice.boundary,
        stages=choice.stages,
        placements={k: dict(v) for k, v in choice.chain.placements.items()},
        cp_placements={k: dict(v) for k, v in choice.chain.cp_placements.items()},
        kinds=kinds,
        sizes=bound,
        reruns=choice.reruns,
        predicted=(more or Explanation()).into(
            _predictions(result, choice, cluster, bound, global_batch, flops_per_sample, seconds)
        ),
        notes=tuple(dict.fromkeys((*notes, *result.notes)))[:NOTES_SHOWN],
    )
    return plan.predicted_by_decisions()


def _links(cluster: Cluster) -> list[dict[str, Any]]:
    """The innermost links of a cluster and the next ones."""
    return [
        {"name": link.name, "ranks": link.ranks, "bytes_per_second": link.bytes_per_second}
        for link in cluster.links[:2]
    ]


def _predictions(
    result: SearchResult,
    choice: Choice,
    cluster: Cluster,
    sizes: dict[str, int],
    global_batch: int,
    flops_per_sample: float,
    seconds: dict[str, float],
) -> dict[str, Any]:
    step = choice.step_seconds
    search = result.search_dict()
    others = {name: search.pop(name) for name in ("alternatives", "recipes", "neighbours")}
    search["seconds"] = {**search["seconds"], **seconds}
    dtype = PRECISION[choice.precision].dtype
    peak = cluster.device.flops.get(dtype, cluster.device.flops["float32"])
    tokens = global_batch * sizes.get("sequence", 1)
    return {
        "status": result.status,
        "step_seconds": step,
        "tokens_per_second_per_gpu": tokens / step / cluster.size,
        "mfu": flops_per_sample * global_batch / step / cluster.size / peak,
        "memory_limit_bytes": result.memory_limit,
        "memory_per_stage": result.memory_per_stage,
        "time_breakdown": result.time_breakdown,
        "stage_seconds": stage_seconds(choice.chain, choice),
        "reruns": _reruns(choice),
        "tp_links": _links(cluster),
        **kept_gathered(choice),
        **{
            name: [{**o, "mesh": _text(o["mesh"])} if "mesh" in o else o for o in found]
            for name, found in others.items()
        },
        "search": search,
    }


def kept_gathered(choice: Choice) -> dict[str, dict[str, float]]:
    """What keeping blocks of ZeRO-3 gathered costs and saves: `bytes` of a rank of the stage that
    keeps the most, `seconds` of the step, beside the same plan with all of them resharded."""
    if not choice.keep_label:
        return {}
    priced = {b.name: b for b in choice.chain.blocks}
    held = []
    for stage in choice.stages:
        groups = rooted([priced[name] for name in stage.blocks])
        mine = (priced[name] for name in stage.keep_gathered)
        held.append(sum(gathered_bytes(b, choice.setting, rooted=groups) for b in mine))
    stages = tuple(replace(stage, keep_gathered=()) for stage in choice.stages)
    plain = replace(choice, stages=stages)
    seconds = evaluate(plain, choice.chain.blocks, choice.setting.cluster).step_seconds
    found = {"bytes": max(held), "seconds": seconds - choice.step_seconds}
    return {"kept_gathered": found}


def _reruns(choice: Choice) -> dict[str, dict[str, dict[str, float]]]:
    """Of every set of ops in use: its seconds and those of its block (forward and backward), bytes
    that the block keeps with it and without recomputation."""
    blocks = {b.kind: b for b in reversed(choice.chain.blocks)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, sets in choice.reruns.items():
        block = blocks[kind]
        for label in sets:
            option = block.option(label)
            found.setdefault(kind, {})[label] = {
                "seconds": option.seconds,
                "block_seconds": block.seconds,
                "kept_bytes": option.kept,
                "saved_bytes": block.saved_bytes,
            }
    return found


def _text(mesh: dict[str, Any]) -> str:
    return str(Mesh(**mesh))


def stage_seconds(chain: ChainCost, choice: Choice) -> list[dict[str, float]]:
    """Forward and backward (recomputation included) of every stage for one micro-batch; of a
    divided backward also what is done for `weights`, which in the first stage is all."""
    costs = {b.name: b for b in chain.blocks}
    found: list[dict[str, float]] = []
    for stage in choice.stages:
        ways = stage.recomputed.items()
        again = sum(costs[n].option(label).seconds for n, label in ways)
        found.append(
            {
                "forward": sum(costs[n].forward for n in stage.blocks),
                "backward": sum(costs[n].backward for n in stage.blocks) + again,
                "recompute": again,
            }
        )
        if choice.setting.divided:
            own, more = divided_seconds([costs[n] for n in stage.blocks], choice.setting)
            if len(found) == 1:
                own, more = found[0]["backward"], 0.0
            found[-1]["backward"] += more
            found[-1]["weights"] = own + more
    return found
