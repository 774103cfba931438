"""What surrounds a step: bad batches, evaluation, accumulation, norms, precision, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from tests.runtime.toy import IGNORED, make_batch, make_model, make_plan, make_stages
from tests.warm_ranks import run_on_ranks

LAYOUTS = {
    "pp2 dp2 zero3": {"mesh": Mesh(pp=2, dp=2), "zero": 3},
    "dp2 tp2 zero0": {"mesh": Mesh(dp=2, tp=2), "zero": 0},
    "dp2 tp2 zero3": {"mesh": Mesh(dp=2, tp=2), "zero": 3},
    "pp4": {"mesh": Mesh(pp=4), "microbatches": 4},
}


def make_program(options: Mapping[str, Any], tied: bool = False, dtype: Any = torch.float64) -> Any:
    from autopar.runtime import collectives  # noqa: F401
    from autopar.runtime.program import DistributedProgram
    from autopar.runtime.ranks import Ranks

    plan = make_plan(**options)
    ranks = Ranks.create(plan.mesh)
    group = ranks.group("tp").group_name if plan.mesh.tp > 1 else ""
    stages = make_stages(plan, group, tied, dtype)
    return DistributedProgram(lambda index: stages[index], plan, ranks, make_model(tied, dtype))


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def bad_batches(found: dict[str, Any]) -> None:
    program = make_program({"mesh": Mesh(pp=2, dp=2), "zero": 1})
    start = time.monotonic()
    good = make_batch(program.plan.global_batch)
    odd = make_batch(3) if program.ranks.rank == 2 else good
    found["odd batch on one rank"] = message(lambda: program.step(odd))
    found["odd batch on all"] = message(lambda: program.step(make_batch(3)))
    ignored = {**good, "labels": torch.full_like(good["labels"], IGNORED)}
    found["no target"] = message(lambda: program.step(ignored))
    found["seconds"] = time.monotonic() - start
    # A microbatch without any target is no error.
    program.zero_grad()
    partly = {**good, "labels": good["labels"].clone()}
    partly["labels"][:2] = IGNORED
    found["partly"] = float(program.step(partly)), program.full_gradients()


def evaluation(found: dict[str, Any]) -> None:
    for zero in (0, 2, 3):
        program = make_program({"mesh": Mesh(pp=2, dp=2), "zero": zero})
        batch = make_batch(program.plan.global_batch)
        before = float(program.eval().step(**batch))
        assert all(p.grad is None for _, p in program.named_parameters())
        optimizer = torch.optim.SGD(program.parameters(), lr=0.5, momentum=0.9)
        trained = float(program.train().step(batch))
        optimizer.step()
        after = float(program.eval().step(batch))
        found[f"evaluation {zero}"] = (before, trained, after)


def accumulation(found: dict[str, Any]) -> None:
    for zero in (0, 1, 3):
        program = make_program({"mesh": Mesh(pp=2, dp=2), "zero": zero}, tied=True)
        rows = program.plan.global_batch
        program.step(make_batch(rows, 1))
        # Evaluation between leaves gradients alone, and after them as well.
        program.eval().step(make_batch(rows, 3))
        program.train().step(make_batch(rows, 2))
        program.eval().step(make_batch(rows, 3))
        gradients = program.full_gradients()
        norms = [float(program.clip_grad_norm_(1e9, kind)) for kind in (2.0, 1.0, float("inf"))]
        program.clip_grad_norm_(0.1)
        clipped = float(program.clip_grad_norm_(1e9))
        found[f"accumulation {zero}"] = (gradients, norms, clipped)


def precision(found: dict[str, Any]) -> None:
    for kind in ("bf16-mixed", "bf16"):
        for zero in (0, 1, 3):
            options = {"mesh": Mesh(dp=2, tp=2), "zero": zero, "precision": kind}
            program = make_program(options, dtype=torch.bfloat16)
            loss = program.step(make_batch(program.plan.global_batch))
            stored = {p.dtype for _, p in program.named_parameters()}
            found[f"{kind} {zero}"] = (loss, stored, program.full_gradients())


def checkpoints(found: dict[str, Any], folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    saved = make_program(LAYOUTS["pp2 dp2 zero3"])
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.5)
    saved.step(make_batch(saved.plan.global_batch))
    optimizer.step()
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    found["saved"] = saved.full_state_dict()
    momentum(found, saved, folder + "-optimizer")
    for name, options in LAYOUTS.items():
        program = make_program(options)
        program.step(make_batch(program.plan.global_batch))
        state = program.state_dict()
        dcp.load(state, checkpoint_id=folder)
        found[f"loaded {name}"] = program.full_state_dict()
        loss = program.eval().step(make_batch(program.plan.global_batch))
        found[f"loss {name}"] = float(loss)
        program.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
        found[f"zeros {name}"] = max(float(v.abs().max()) for v in state.values())


def momentum(found: dict[str, Any], saved: Any, folder: str) -> None:
    """Two AdamW steps, a checkpoint, a third; and the third again from it under other layouts."""
    import torch.distributed.checkpoint as dcp

    def adamw(program: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(program.parameters(), lr=1e-2, weight_decay=0.1)

    def step(program: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        program.step(make_batch(program.plan.global_batch, seed))
        optimizer.step()

    optimizer = adamw(saved)
    step(saved, optimizer, 1)
    step(saved, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 3e-2
    state = {"model": saved.state_dict(), "optimizer": saved.optimizer_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=folder)
    step(saved, optimizer, 3)
    found["third step"] = saved.full_state_dict()
    for name, options in LAYOUTS.items():
        program = make_program(options)
        fresh = adamw(program)
        state = {"model": program.state_dict(), "optimizer": program.optimizer_state_dict(fresh)}
        dcp.load(state, checkpoint_id=folder)
        program.load_state_dict(state["model"])
        program.load_optimizer_state_dict(fresh, state["optimizer"])
        step(program, fresh, 3)
        found[f"third step {name}"] = program.full_state_dict()


def shards(found: dict[str, Any]) -> None:
    program = make_program({"mesh": Mesh(dp=2, tp=2), "zero": 3})
    found["elements"] = sum(p.to_local().numel() for _, p in program.named_parameters())


def surroundings(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bad_batches(found)
    evaluation(found)
    accumulation(found)
    precision(found)
    checkpoints(found, folder)
    shards(found)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return run_on_ranks(surroundings, 4, (folder,), timeout_seconds=200)


def one_device(
    batches: list[dict[str, torch.Tensor]], tied: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    model = make_model(tied)
    loss = torch.zeros(())
    for batch in batches:
        loss = model(**batch)
        loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_bad_batches_fail_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for index, found in enumerate(ranks):
        kind = (
            "PlanError: " if index == 2 else "RuntimeFault: rank 2 (of 1 that failed): PlanError: "
        )
        assert found["odd batch on one rank"].startswith(kind + "batch input 'ids' has 3 rows")
        assert found["odd batch on all"].startswith("PlanError: batch input 'ids' has 3 rows")
        assert found["no target"].startswith("PlanError: the batch has no target")
        assert found["seconds"] < 10


def test_microbatch_without_target(ranks: list[dict[str, Any]]) -> None:
    batch = make_batch(8)
    batch["labels"][:2] = IGNORED
    loss, gradients = one_device([batch])
    assert ranks[0]["partly"][0] == pytest.approx(loss, rel=1e-6)
    close(ranks[0]["partly"][1], gradients)


def test_evaluation(ranks: list[dict[str, Any]]) -> None:
    loss, _ = one_device([make_batch(8)])
    for zero in (0, 2, 3):
        before, trained, after = ranks[3][f"evaluation {zero}"]
        assert before == pytest.approx(loss, rel=1e-6)
        assert trained == before
        assert after < before - 0.1


def test_gradients_add_up_over_steps(ranks: list[dict[str, Any]]) -> None:
    _, gradients = one_device([make_batch(8, 1), make_batch(8, 2)], tied=True)
    flat = torch.cat([g.flatten() for g in gradients.values()])
    for zero in (0, 1, 3):
        close(ranks[0][f"accumulation {zero}"][0], gradients)
        for found in ranks:
            _, norms, clipped = found[f"accumulation {zero}"]
            expected = [float(flat.norm(kind)) for kind in (2.0, 1.0, float("inf"))]
            assert norms == pytest.approx(expected, rel=1e-6)
            assert clipped == pytest.approx(0.1, rel=1e-4)


def test_precision(ranks: list[dict[str, Any]]) -> None:
    loss, gradients = one_device([make_batch(8)])
    for kind, stored in (("bf16-mixed", torch.float32), ("bf16", torch.bfloat16)):
        for zero in (0, 1, 3):
            got, dtypes, found = ranks[0][f"{kind} {zero}"]
            assert got.dtype == torch.float32
            assert dtypes == {stored}
            assert got.item() == pytest.approx(loss, rel=2e-2)
            for name, expected in gradients.items():
                error = (found[name].double() - expected).norm() / expected.norm()
                assert error < 5e-2, (kind, zero, name, error)


def test_checkpoint_loads_under_every_layout(ranks: list[dict[str, Any]]) -> None:
    saved = ranks[0]["saved"]
    reference = make_model()
    reference.load_state_dict({**saved, "scale": reference.scale})
    assert saved.keys() == dict(reference.named_parameters()).keys()
    for name, options in LAYOUTS.items():
        close(ranks[0][f"loaded {name}"], saved)
        batch = make_batch(make_plan(**options).global_batch)
        expected = reference(**batch).item()
        for found in ranks:
            assert found[f"loss {name}"] == pytest.approx(expected, rel=1e-6)
            assert found[f"zeros {name}"] == 0


def test_optimizer_state_loads_under_every_layout(ranks: list[dict[str, Any]]) -> None:
    for name in LAYOUTS:
        close(ranks[0][f"third step {name}"], ranks[0]["third step"])


def test_a_rank_holds_its_shards_only(ranks: list[dict[str, Any]]) -> None:
    model = make_model()
    whole = sum(p.numel() for p in model.parameters())
    # Norms and the bias of `down` are whole on both tp ranks.
    twice = sum(p.numel() for n, p in model.named_parameters() if "norm" in n or "down.bias" in n)
    assert sum(found["elements"] for found in ranks) == whole + twice
