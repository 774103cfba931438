"""Blocks of ZeRO-3 whose parameters are kept gathered: messages of a step, and equal gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.mesh import Mesh
from tests.runtime.test_state import close, make_program, one_device
from tests.runtime.toy import LAYERS, make_batch
from tests.warm_ranks import run_on_ranks

MICROBATCHES = 3
KEPT = ("embed", "layer1", "head")
OPTIONS: dict[str, dict[str, Any]] = {
    "dp4": {"mesh": Mesh(dp=4)},
    "dp4 one micro-batch": {"mesh": Mesh(dp=4), "microbatches": 1},
    "dp4 recomputed": {"mesh": Mesh(dp=4), "recompute": True},
    "pp2 dp2": {"mesh": Mesh(pp=2, dp=2)},
    "pp2 dp2 gpipe": {"mesh": Mesh(pp=2, dp=2), "schedule": "gpipe"},
    "dp2 tp2": {"mesh": Mesh(dp=2, tp=2)},
    "dp4 shard2": {"mesh": Mesh(dp=4, dp_replicate=2)},
    "dp4 shard2 one micro-batch": {"mesh": Mesh(dp=4, dp_replicate=2), "microbatches": 1},
}
ALL = ("embed", *(f"layer{i}" for i in range(LAYERS)), "head")


def kept_program(options: dict[str, Any], kept: tuple[str, ...] = KEPT, **more: Any) -> Any:
    return make_program({"microbatches": MICROBATCHES, **options, "zero": 3, "kept": kept}, **more)


def gathers(found: dict[str, Any]) -> None:
    """How often each block's parameters are gathered in a step, by its number of elements."""
    from unittest import mock

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    for name, kept in (("some", KEPT), ("none", ()), ("all", ALL)):
        for layout in ("dp4", "pp2 dp2"):
            program = kept_program(OPTIONS[layout], kept)
            batch = make_batch(program.plan.global_batch)
            program.step(batch)
            with mock.patch.object(
                fsdp, "foreach_all_gather", wraps=fsdp.foreach_all_gather
            ) as gather:
                program.step(batch)
                program.step(batch)
            own = {
                id(p): block.name
                for block, module in zip(
                    program._programs[0].blocks, program._engines[0].stage.blocks, strict=True
                )
                for p in module.parameters()
            }
            counts: dict[str, int] = {}
            for call in gather.call_args_list:
                block = own[id(call.args[0][0].sharded_param)]
                counts[block] = counts.get(block, 0) + 1
            found[f"gathers {name} {layout}"] = counts


def gradients(found: dict[str, Any]) -> None:
    """Of two steps that add up, without a pipeline with an evaluation between them."""
    for name, options in OPTIONS.items():
        tied = "tp2" not in name and "shard2" not in name
        program = kept_program(options, tied=tied)
        rows = program.plan.global_batch
        program.step(make_batch(rows, 1))
        if program.plan.mesh.pp == 1:
            program.eval().step(make_batch(rows, 3))
        loss = float(program.train().step(make_batch(rows, 2)))
        found[name] = rows, tied, loss, program.full_gradients()


def training(found: dict[str, Any]) -> None:
    """Parameters after two updates, an evaluation between: with blocks kept and without."""
    for name, kept in (("kept", KEPT), ("plain", ())):
        program = kept_program(OPTIONS["pp2 dp2"], kept, tied=True)
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        rows = program.plan.global_batch
        for seed in (1, 2):
            optimizer.zero_grad()
            program.step(make_batch(rows, seed))
            optimizer.step()
            evaluated = float(program.eval().step(make_batch(rows, 5)))
            program.train()
        found[f"training {name}"] = evaluated, program.full_state_dict()


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    gathers(found)
    gradients(found)
    training(found)
    options = {"mesh": Mesh(dp=4), "precision": "bf16-mixed"}
    program = kept_program(options, dtype=torch.bfloat16)
    rows = program.plan.global_batch
    found["bf16"] = rows, float(program.step(make_batch(rows))), program.full_gradients()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 4, timeout_seconds=200)


def test_kept_parameters_are_gathered_once_a_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for layout in ("dp4", "pp2 dp2"):
            for name, kept in (("some", KEPT), ("none", ()), ("all", ALL)):
                counts = found[f"gathers {name} {layout}"]
                assert len(counts) == (len(ALL) if layout == "dp4" else len(ALL) // 2)
                # Two steps; else in forward and backward of each micro-batch.
                for block, count in counts.items():
                    assert count == 2 * (1 if block in kept else 2 * MICROBATCHES), (name, block)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_one_device(ranks: list[dict[str, Any]], name: str) -> None:
    rows, tied, loss, found = ranks[0][name]
    expected, all_gradients = one_device([make_batch(rows, s) for s in (1, 2)], tied=tied)
    assert loss == pytest.approx(expected, rel=1e-6)
    close(found, all_gradients)


def test_updates_are_seen_by_what_was_kept(ranks: list[dict[str, Any]]) -> None:
    kept, plain = ranks[0]["training kept"], ranks[0]["training plain"]
    assert kept[0] == pytest.approx(plain[0], rel=1e-6)
    close(kept[1], plain[1])


def test_mixed_precision(ranks: list[dict[str, Any]]) -> None:
    rows, loss, found = ranks[0]["bf16"]
    expected, whole = one_device([make_batch(rows)])
    assert loss == pytest.approx(expected, rel=2e-2)
    for name, value in whole.items():
        error = (found[name].double() - value).norm() / value.norm()
        assert error < 5e-2, (name, error)
