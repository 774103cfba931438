"""Every parallel form of the toy equals one device: loss, gradients, ten optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.mesh import Mesh
from tests.runtime.toy import make_batch, make_model, make_plan, make_stages
from tests.warm_ranks import run_on_ranks

INTERLEAVED = {"mesh": Mesh(pp=2), "schedule": "interleaved", "chunks": 2, "microbatches": 4}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2 zero0": {"mesh": Mesh(dp=2), "zero": 0},
        "dp2 zero1": {"mesh": Mesh(dp=2), "zero": 1},
        "dp2 zero2": {"mesh": Mesh(dp=2), "zero": 2},
        "dp2 zero3": {"mesh": Mesh(dp=2), "zero": 3},
        "dp2 zero3 recompute": {"mesh": Mesh(dp=2), "zero": 3, "recompute": True},
        "dp2 zero2 tied": {"mesh": Mesh(dp=2), "zero": 2, "tied": True},
        "tp2": {"mesh": Mesh(tp=2)},
        "tp2 recompute": {"mesh": Mesh(tp=2), "recompute": True},
        "pp2 gpipe": {"mesh": Mesh(pp=2), "schedule": "gpipe", "microbatches": 4},
        "pp2 1f1b": {"mesh": Mesh(pp=2), "microbatches": 4},
        "pp2 one microbatch": {"mesh": Mesh(pp=2), "microbatches": 1},
        "pp2 tied recompute": {"mesh": Mesh(pp=2), "tied": True, "recompute": True},
        "pp2 two chunks": INTERLEAVED,
        "pp2 three chunks, rounds of three": {**INTERLEAVED, "chunks": 3, "microbatches": 3},
        "pp2 two chunks tied recompute": {**INTERLEAVED, "tied": True, "recompute": True},
    },
    4: {
        "pp2 dp2 zero0": {"mesh": Mesh(pp=2, dp=2), "zero": 0, "microbatches": 3},
        "pp2 dp2 zero1": {"mesh": Mesh(pp=2, dp=2), "zero": 1, "microbatches": 3},
        "pp2 dp2 zero2": {"mesh": Mesh(pp=2, dp=2), "zero": 2, "microbatches": 3},
        "pp2 dp2 zero3": {"mesh": Mesh(pp=2, dp=2), "zero": 3, "microbatches": 3},
        "pp2 dp2 zero1 tied": {"mesh": Mesh(pp=2, dp=2), "zero": 1, "tied": True},
        "pp2 dp2 zero3 gpipe recompute": {
            "mesh": Mesh(pp=2, dp=2),
            "zero": 3,
            "schedule": "gpipe",
            "recompute": True,
        },
        "dp2 tp2 zero3": {"mesh": Mesh(dp=2, tp=2), "zero": 3},
        "dp2 tp2 zero0": {"mesh": Mesh(dp=2, tp=2), "zero": 0},
        "pp2 tp2": {"mesh": Mesh(pp=2, tp=2)},
        "pp2 tp2 tied": {"mesh": Mesh(pp=2, tp=2), "tied": True},
        "pp4, fewer microbatches": {"mesh": Mesh(pp=4), "microbatches": 2},
        "pp2 dp2 two chunks zero0": {**INTERLEAVED, "mesh": Mesh(pp=2, dp=2), "zero": 0},
        "pp2 dp2 two chunks zero1 tied": {
            **INTERLEAVED,
            "mesh": Mesh(pp=2, dp=2),
            "zero": 1,
            "tied": True,
        },
        "pp2 dp2 two chunks zero2": {**INTERLEAVED, "mesh": Mesh(pp=2, dp=2), "zero": 2},
        "pp2 dp2 two chunks zero3 recompute": {
            **INTERLEAVED,
            "mesh": Mesh(pp=2, dp=2),
            "zero": 3,
            "recompute": True,
        },
        "pp2 tp2 two chunks": {**INTERLEAVED, "mesh": Mesh(pp=2, tp=2)},
    },
}


def run_cases(names: list[str]) -> dict[str, Any]:
    """On each rank: every case's losses, gradients and parameters after ten AdamW steps."""
    import torch.distributed as dist

    from autopar.runtime import collectives  # noqa: F401
    from autopar.runtime.program import DistributedProgram
    from autopar.runtime.ranks import Ranks

    cases = CASES[dist.get_world_size()]
    found = {}
    for name in names:
        options = dict(cases[name])
        tied = options.pop("tied", False)
        plan = make_plan(**options)
        ranks = Ranks.create(plan.mesh)
        group = ranks.group("tp").group_name if plan.mesh.tp > 1 else ""
        program = DistributedProgram(make_stages(plan, group, tied), plan, ranks, make_model(tied))
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        losses, gradients, norms = [], {}, []
        for step in range(10):
            losses.append(float(program.step(make_batch(plan.global_batch, step))))
            if step == 0:
                gradients = program.full_gradients()
            norm = torch.nn.utils.clip_grad_norm_(program.parameters(), 0.5)
            norms.append(float(norm.full_tensor()))
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (losses, gradients, norms, program.full_state_dict())
    return found


def reference(
    tied: bool, rows: int
) -> tuple[list[float], dict[str, Any], list[float], dict[str, Any]]:
    model = make_model(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients, norms = [], {}, []
    for step in range(10):
        loss = model(**make_batch(rows, step))
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, norms, {n: p.detach() for n, p in model.named_parameters()}


@pytest.fixture(scope="module", params=sorted(CASES))
def results(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    world = request.param
    return world, run_on_ranks(run_cases, world, (list(CASES[world]),), timeout_seconds=200)


def test_equals_one_device(results: tuple[int, list[dict[str, Any]]]) -> None:
    world, by_rank = results
    for name, options in CASES[world].items():
        plan = make_plan(**{k: v for k, v in options.items() if k != "tied"})
        losses, gradients, norms, parameters = reference(
            options.get("tied", False), plan.global_batch
        )
        for found in by_rank:
            torch.testing.assert_close(found[name][0], losses, rtol=1e-6, atol=0, msg=name)
            torch.testing.assert_close(found[name][2], norms, rtol=1e-5, atol=0, msg=name)
        _, got, _, after = by_rank[0][name]
        assert got.keys() == gradients.keys(), name
        for key, expected in gradients.items():
            torch.testing.assert_close(
                got[key], expected, rtol=1e-9, atol=1e-12, msg=f"{name} {key}"
            )
        for key, expected in parameters.items():
            torch.testing.assert_close(
                after[key], expected, rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
            )
