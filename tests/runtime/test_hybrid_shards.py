"""Hybrid sharding: shards in groups of neighbours, copies across; steps, messages and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autopar.mesh import Mesh
from tests.runtime.test_state import close, make_program, one_device
from tests.runtime.toy import make_batch, make_model
from tests.warm_ranks import run_on_ranks

MICROBATCHES = 3
HYBRID = Mesh(dp=4, dp_replicate=2)
ZERO3 = {"mesh": HYBRID, "zero": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4 shard2 zero1": {"mesh": HYBRID, "zero": 1},
    "dp4 zero3": {"mesh": Mesh(dp=4), "zero": 3},
    "dp4 zero0": {"mesh": Mesh(dp=4), "zero": 0},
    # As many samples a step on half the ranks.
    "dp2 tp2 zero3": {"mesh": Mesh(dp=2, tp=2), "zero": 3, "microbatches": 4},
    "pp2 dp2 zero2": {"mesh": Mesh(pp=2, dp=2), "zero": 2, "microbatches": 4},
}


def gradients(found: dict[str, Any]) -> None:
    """Of one step and of two that add up, with norms of several types and after clipping."""
    for zero in (1, 2, 3):
        options = {"mesh": HYBRID, "zero": zero, "microbatches": MICROBATCHES}
        program = make_program(options, tied=True)
        rows = program.plan.global_batch
        found["rows"] = rows
        program.step(make_batch(rows, 1))
        found[f"first {zero}"] = program.full_gradients()
        program.step(make_batch(rows, 2))
        both = program.full_gradients()
        norms = [float(program.clip_grad_norm_(1e9, kind)) for kind in (2.0, 1.0, float("inf"))]
        program.clip_grad_norm_(0.1)
        found[f"both {zero}"] = both, norms, float(program.clip_grad_norm_(1e9))


def messages(found: dict[str, Any]) -> None:
    """Of one step: reduce-scatters of a block, and all-reduces over a group of two, which here are
    those over the copies of its shards."""
    from unittest import mock

    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    for zero in (1, 2, 3):
        options = {"mesh": HYBRID, "zero": zero, "microbatches": MICROBATCHES}
        program = make_program(options)
        batch = make_batch(program.plan.global_batch)
        program.step(batch)
        reduce = _fsdp_param_group.foreach_reduce
        with (
            mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=reduce) as scattered,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed,
        ):
            program.step(batch)
        blocks = len(program._programs[0].blocks)
        found[f"scattered {zero}"] = scattered.call_count / blocks
        sizes = [call.kwargs["group"].size() for call in summed.call_args_list]
        found[f"summed {zero}"] = sizes.count(2) / blocks


def state(found: dict[str, Any], folder: str) -> None:
    """A checkpoint of hybrid shards under other layouts, and one of all shards under hybrid."""
    import torch.distributed.checkpoint as dcp

    def adamw(program: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(program.parameters(), lr=1e-2, weight_decay=0.1)

    def step(program: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        program.step(make_batch(program.plan.global_batch, seed))
        program.clip_grad_norm_(0.5)
        optimizer.step()

    for name, options, others in (
        ("hybrid", ZERO3, LAYOUTS),
        ("whole", LAYOUTS["dp4 zero3"], {"dp4 shard2 zero3": ZERO3}),
    ):
        saved = make_program(options)
        optimizer = adamw(saved)
        step(saved, optimizer, 1)
        step(saved, optimizer, 2)
        kept = {"model": saved.state_dict(), "optimizer": saved.optimizer_state_dict(optimizer)}
        dcp.save(kept, checkpoint_id=f"{folder}/{name}")
        step(saved, optimizer, 3)
        found[name] = saved.full_state_dict()
        for layout, other in others.items():
            program = make_program(other)
            fresh = adamw(program)
            read = {"model": program.state_dict(), "optimizer": program.optimizer_state_dict(fresh)}
            dcp.load(read, checkpoint_id=f"{folder}/{name}")
            program.load_state_dict(read["model"])
            program.load_optimizer_state_dict(fresh, read["optimizer"])
            step(program, fresh, 3)
            found[f"{name} as {layout}"] = program.full_state_dict()


def precision(found: dict[str, Any]) -> None:
    for zero in (1, 3):
        options = {"mesh": HYBRID, "zero": zero, "precision": "bf16-mixed", "microbatches": 2}
        program = make_program(options, dtype=torch.bfloat16)
        found[f"bf16 {zero}"] = (
            program.plan.global_batch,
            float(program.step(make_batch(program.plan.global_batch))),
            program.full_gradients(),
        )


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    gradients(found)
    messages(found)
    state(found, folder)
    precision(found)
    program = make_program(ZERO3)
    found["elements"] = sum(p.to_local().numel() for _, p in program.named_parameters())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return run_on_ranks(everything, 4, (folder,), timeout_seconds=200)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_and_norms_equal_one_device(ranks: list[dict[str, Any]], zero: int) -> None:
    batches = [make_batch(ranks[0]["rows"], seed) for seed in (1, 2)]
    close(ranks[0][f"first {zero}"], one_device(batches[:1], tied=True)[1])
    expected = one_device(batches, tied=True)[1]
    close(ranks[0][f"both {zero}"][0], expected)
    flat = torch.cat([g.flatten() for g in expected.values()])
    for found in ranks:
        _, norms, clipped = found[f"both {zero}"]
        assert norms == pytest.approx([float(flat.norm(k)) for k in (2.0, 1.0, float("inf"))])
        assert clipped == pytest.approx(0.1, rel=1e-4)


def test_copies_are_summed_once_a_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for zero in (1, 2, 3):
            assert found[f"scattered {zero}"] == (1 if zero == 1 else MICROBATCHES)
            assert found[f"summed {zero}"] == 1


def test_a_rank_holds_the_shard_of_its_group(ranks: list[dict[str, Any]]) -> None:
    whole = sum(p.numel() for p in make_model().parameters())
    assert [found["elements"] for found in ranks[:2]] == [found["elements"] for found in ranks[2:]]
    assert sum(found["elements"] for found in ranks[:2]) == whole


def test_state_loads_under_other_layouts_and_from_them(ranks: list[dict[str, Any]]) -> None:
    found: Mapping[str, Any] = ranks[0]
    for layout in LAYOUTS:
        close(found[f"hybrid as {layout}"], found["hybrid"])
    close(found["whole as dp4 shard2 zero3"], found["whole"])
    close(found["whole"], found["hybrid"])


@pytest.mark.parametrize("zero", [1, 3])
def test_mixed_precision(ranks: list[dict[str, Any]], zero: int) -> None:
    rows, loss, found = ranks[0][f"bf16 {zero}"]
    expected, gradients = one_device([make_batch(rows)])
    assert loss == pytest.approx(expected, rel=2e-2)
    for name, whole in gradients.items():
        error = (found[name].double() - whole).norm() / whole.norm()
        assert error < 5e-2, (zero, name, error)
