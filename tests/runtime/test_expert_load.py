"""Rows counted on real ranks against the choices of the single-device model's own routers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.plan_document import Plan
from autopar.program import Program
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from autopar.runtime.expert_load import LayerExperts, summed_load
from autopar.runtime.ranks import Ranks
from autopar.workflow.verification import build_real
from tests.runtime.expert_plans import ROWS, batch, run_split


def counted_by_hand(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Choices that reach the experts' modules of a model of transformers."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):

            def count(module: nn.Module, inputs: Any, name: str = name) -> None:
                # Not what we count with.
                index, experts = inputs[1], module.num_experts
                one_hot = nn.functional.one_hot(index.reshape(-1), experts)
                found[name] = found.get(name, 0) + one_hot.sum(0)

            module.register_forward_pre_hook(count)
    with torch.no_grad():
        for each in batches:
            model(**each)
    return {name: rows.tolist() for name, rows in found.items()}


def run(text: str, plans: list[Plan], program: Program) -> list[dict[str, Any]]:
    from autopar.api import build

    found = []
    for plan in plans:
        model, _ = build_real(text, None, 0)
        # A model that counts what it routes must not be the one that is captured.
        by_hand = counted_by_hand(copy.deepcopy(model), [batch(1), batch(2)])
        distributed = build(model, plan, ROWS, lambda: program, timeout_seconds=100.0)
        before = distributed.expert_load()
        distributed.step(batch(1))
        distributed.eval().step(batch(2))
        routing = distributed.routing()
        distributed.record_routing()
        distributed.reset_expert_load()
        after = distributed.expert_load()
        records = []
        for _ in range(2):
            distributed.step(batch(2))
            records.append(distributed.record_routing()["layers"])
            rows = distributed.routing().layers
            distributed.reset_expert_load()
        found.append(
            {
                "before": before,
                "by hand": by_hand,
                "load": routing.load,
                "ranks": {layer.ranks for layer in routing.layers.values()},
                "after reset": after,
                "records": records,
                "entropy": {name: layer.entropy for name, layer in rows.items()},
            }
        )
    return found


def check(
    model: str, nproc: int, pins: list[str], factor: str, ranks: int, in_part: bool = False
) -> None:
    by_rank = run_split(run, model, nproc, pins, factor, in_part)
    for found in by_rank:
        for layout, one in zip(pins, found, strict=True):
            assert one["by hand"], layout
            assert one["load"] == one["by hand"], layout
            assert list(one["load"]) == list(one["by hand"])
            assert one["ranks"] == {ranks}
            for record in one["records"]:  # each after a reset, of the same batch
                assert {n: of["entropy"] for n, of in record.items()} == one["entropy"]
            for empty in (one["before"], one["after reset"]):
                assert list(empty) == list(one["by hand"])
                assert not any(any(rows) for rows in empty.values())


@pytest.mark.parametrize(("factor", "ranks"), [("e", 2), ("t,e", 2), ("t", 1), ("i", 1)])
def test_each_way_to_split_counts_every_token_once(factor: str, ranks: int) -> None:
    pins = "pp=1,dp=1,tp=2" + (",weights=split" if factor != "t" else "")
    check("mixtral", 2, [pins, f"{pins},recompute=full"], factor, ranks)


def test_data_parallel_ranks_and_microbatches_add_up() -> None:
    pins = ["pp=1,dp=2,tp=1,zero=0", "pp=1,dp=2,tp=1,zero=3,microbatches=2,recompute=full"]
    check("mixtral", 2, pins, "t", 1)


def test_parts_of_sequences_add_up() -> None:
    check("mixtral", 2, ["pp=1,dp=1,cp=2,tp=1"], "t", 1)


def test_four_ranks() -> None:
    pins = [
        "pp=1,dp=2,tp=2,weights=split,zero=3,microbatches=2",
        "pp=2,dp=1,tp=2,weights=split,microbatches=2",
    ]
    check("mixtral", 4, pins, "t,e", 2)


@pytest.mark.slow
def test_a_block_that_is_recomputed_in_part() -> None:
    check("mixtral", 2, ["pp=1,dp=1,tp=2,weights=split"], "e", 2, in_part=True)


@pytest.mark.slow
def test_a_model_with_dense_layers_and_grouped_routing() -> None:
    check("deepseek_v3", 2, ["pp=1,dp=1,tp=2,weights=split"], "e", 2)


def test_without_values_nothing_is_counted() -> None:
    layer = LayerExperts("moe", 3, False, 1)
    layer.add(torch.empty(2, 2, dtype=torch.int64, device="meta"))
    assert layer.counts is None
    for kind in (torch.int64, torch.int32):
        layer.add(torch.tensor([[0, 2], [2, 2]], dtype=kind))
    assert layer.counts is not None and layer.counts.tolist() == [2, 0, 6]
    layer.reset()
    assert layer.counts is None


def test_a_layer_that_is_called_twice_is_one(one_rank: Ranks) -> None:
    called = [LayerExperts("moe", 3, False, 1) for _ in range(2)]
    other = LayerExperts("other", 2, False, 1)
    called[0].add(torch.tensor([[0, 2]]))
    called[1].add(torch.tensor([[2, 2]]))
    found = summed_load({0: called, 1: [other]}, one_rank)
    assert {name: load.rows for name, load in found.items()} == {"moe": (1, 0, 3), "other": (0, 0)}
