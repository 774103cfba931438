"""Experts moved between real ranks: later losses, gradients and states are as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.experts.assignment import Assignment, LayerAssignment, assign_experts
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from autopar.runtime.adafactor import Adafactor
from autopar.workflow.verification import build_real
from tests.runtime.expert_plans import ROWS, batch, run_split

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def assignment(ranks: int, **layers: list[Any]) -> Assignment:
    """`l0`, `l1`: the rank of each expert of a layer, or its ranks."""
    return Assignment(
        ranks,
        {
            LAYERS[int(name[1:])]: LayerAssignment(
                tuple(r if isinstance(r, tuple) else (r,) for r in held), 0, 0, 0, 0, 0
            )
            for name, held in layers.items()
        },
    )


def build(text: str, plan: Plan, program: Program) -> Any:
    from autopar.api import build

    model, _ = build_real(text, None, 0)
    return build(model, plan, ROWS, lambda: program, timeout_seconds=100.0)


def adamw(program: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(program.parameters(), lr=1e-2, weight_decay=0.1)


def train(program: Any, optimizer: Any, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    program.zero_grad()
    loss = float(program.step(batch(seed)))
    gradients = program.full_gradients()
    optimizer.step()
    return loss, gradients


def whole_state(program: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = program.optimizer_state_dict(optimizer)
    tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    # Copies: of what one rank holds, the whole is the memory that a later step changes.
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}
    return {k: v.clone() for k, v in whole.items()}


def moved(text: str, plans: list[Plan], program: Program) -> list[dict[str, Any]]:
    results = []
    for plan in plans:
        found: dict[str, Any] = {}
        ranks = max(plan.mesh.tp, plan.mesh.ep)
        for name in ("still", "moved"):
            distributed = build(text, plan, program)
            optimizer = adamw(distributed)
            steps = [train(distributed, optimizer, 1)]
            if name == "moved":
                by_load = assign_experts(distributed.expert_load(), ranks)
                distributed.rebalance(by_load, optimizer)
                found["after the first move"] = distributed.full_state_dict()
            else:
                found["before the first move"] = distributed.full_state_dict()
            steps.append(train(distributed, optimizer, 2))
            if name == "moved":
                order = [1, 0, 0, 1] if ranks == 2 else [3, 2, 0, 1]
                distributed.rebalance(assignment(ranks, l0=order), optimizer)
                found["rank of expert"] = order
                found["load then"] = distributed.expert_load()[LAYERS[0]]
                found["rows of ranks"] = distributed.routing().layers[LAYERS[0]].of_ranks
                found["here"] = held(distributed)
                found["whole"] = distributed.full_state_dict()
            steps.append(train(distributed, optimizer, 3))
            found[name] = steps, distributed.full_state_dict(), whole_state(distributed, optimizer)
            found[f"load {name}"] = distributed.expert_load()
        results.append(found)
    return results


def held(program: Any) -> torch.Tensor:
    """This rank's part of the first layer's weights, as it lies in memory."""
    local = dict(program.named_parameters()).get(f"{LAYERS[0]}.down_proj")
    return local.to_local().detach().clone() if local is not None else torch.empty(0)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=name)


def check_moved(nproc: int, pins: list[str], factor: str, in_part: bool = False) -> None:
    by_rank = run_split(moved, "mixtral", nproc, pins, factor, in_part)
    for layout, found in enumerate(by_rank[0]):
        for name, value in found["before the first move"].items():
            assert torch.equal(found["after the first move"][name], value), name
        (still, weights, state), (again, other_weights, other_state) = (
            found["still"],
            found["moved"],
        )
        for (loss, gradients), (other_loss, other_gradients) in zip(still, again, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            same(other_gradients, gradients)
        same(other_weights, weights)
        same(other_state, state)
        assert found["load moved"] == found["load still"]
        of_expert, rows = found["rank of expert"], found["load then"]
        experts = [[e for e, r in enumerate(of_expert) if r == rank] for rank in range(nproc)]
        wanted = [sum(rows[e] for e in each) for each in experts if each]
        assert list(found["rows of ranks"]) == wanted
        if f"tp={nproc}" in pins[layout]:
            whole = found["whole"][f"{LAYERS[0]}.down_proj"]
            for rank, own in enumerate(experts):
                assert torch.equal(by_rank[rank][layout]["here"], whole[own])


@pytest.mark.parametrize("factor", ["e", "t,e"])
def test_two_ranks(factor: str) -> None:
    check_moved(
        2, ["pp=1,dp=1,tp=2,weights=split", "pp=1,dp=1,tp=2,weights=split,recompute=full"], factor
    )


def test_four_ranks_with_sharded_states() -> None:
    pins = [
        "pp=1,dp=2,tp=2,weights=split,zero=3,microbatches=2",
        "pp=1,dp=2,tp=2,weights=split,zero=1",
        "pp=2,dp=1,tp=2,weights=split,microbatches=2",
        "pp=1,dp=1,tp=4,weights=split",
    ]
    check_moved(4, pins, "t,e")


def test_experts_that_replicas_split() -> None:
    pins = [
        "pp=1,dp=4,tp=1,ep=2,zero=0",
        "pp=1,dp=4,tp=1,ep=2,zero=3,microbatches=2",
        "pp=1,dp=2,tp=2,ep=2,zero=1,weights=split",
        "pp=1,dp=4,tp=1,ep=4,zero=1",
    ]
    check_moved(4, pins, "i")


@pytest.mark.slow
def test_blocks_that_are_recomputed_in_part() -> None:
    check_moved(2, ["pp=1,dp=1,tp=2,weights=split"], "e", in_part=True)


def saved_and_loaded(
    text: str,
    plans: list[Plan],
    program: Program,
    folder: str,
    spare: tuple[int, int] = (0, 0),
    held: Any = ([1, 0, 0, 1], [0, 1, 0, 1]),
    otherwise: Any = ([0, 1, 0, 1], [1, 1, 0, 0]),
) -> dict[str, Any]:
    """Saved by a program of the first plan, read into programs of the second; `held` and
    `otherwise`: assignments of both layers in the one and the other."""
    import torch.distributed.checkpoint as dcp

    found: dict[str, Any] = {}
    plans = [replace(p, spare_experts=n) for p, n in zip(plans, spare, strict=True)]
    first = build(text, plans[0], program)
    optimizer = adamw(first)
    train(first, optimizer, 1)
    ranks = [plan.mesh.ep if plan.mesh.ep > 1 else plan.mesh.tp for plan in plans]
    first.rebalance(assignment(ranks[0], l0=held[0], l1=held[1]), optimizer)
    train(first, optimizer, 2)
    state = {"model": first.state_dict(), "optimizer": first.optimizer_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=folder)
    found["saved"] = first.full_state_dict(), whole_state(first, optimizer)
    found["next"] = train(first, optimizer, 3)
    for name in ("fresh", "moved otherwise"):
        other = build(text, plans[1], program)
        optimizer = adamw(other)
        if name == "moved otherwise":
            moved = assignment(ranks[1], l0=otherwise[0], l1=otherwise[1])
            other.rebalance(moved, optimizer)
        state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        other.load_optimizer_state_dict(optimizer, state["optimizer"])
        found[name] = other.full_state_dict(), whole_state(other, optimizer)
        found[f"next {name}"] = train(other, optimizer, 3)
    return found


def check_checkpoints(
    folder: Path, nproc: int, pins: list[str], factor: str = "e", **how: Any
) -> None:
    function = partial(saved_and_loaded, folder=str(folder), **how)
    found = run_split(function, "mixtral", nproc, pins, factor)[0]
    weights, state = found["saved"]
    for name in ("fresh", "moved otherwise"):
        for got, expected in zip(found[name], (weights, state), strict=True):
            # Replicas of other parameters differ by rounding, and one of them is saved.
            same(got, expected)
            of_experts = [key for key in expected if ".experts." in key]
            assert of_experts and all(torch.equal(got[k], expected[k]) for k in of_experts)
        loss, gradients = found[f"next {name}"]
        assert loss == pytest.approx(found["next"][0], rel=1e-6)
        same(gradients, found["next"][1])


def test_checkpoints_are_in_the_order_of_experts(tmp_path: Path) -> None:
    pins = ["pp=1,dp=1,tp=2,weights=split", "pp=1,dp=1,tp=2,weights=split,recompute=full"]
    check_checkpoints(tmp_path, 2, pins)


def test_checkpoints_of_experts_that_replicas_split(tmp_path: Path) -> None:
    """Saved under one layout, read into another."""
    pins = ["pp=1,dp=4,tp=1,ep=2,zero=3", "pp=1,dp=2,tp=2,ep=2,zero=1,weights=split"]
    check_checkpoints(tmp_path, 4, pins)


COPIES_OF_4 = [(2, 0, 3), 1, (1, 2), 0], [0, 1, 2, (3, 0)]
COPIES_OF_2 = [(0, 1), 1, (0, 1), 0], [0, 1, (1, 0), 1]


@pytest.mark.parametrize(
    ("pins", "spare", "held", "otherwise"),
    [
        (
            ["pp=1,dp=4,tp=1,ep=4,zero=0", "pp=1,dp=4,tp=1,ep=2,zero=3"],
            (2, 1),
            COPIES_OF_4,
            COPIES_OF_2,
        ),
        (
            ["pp=1,dp=4,tp=1,ep=2,zero=1", "pp=1,dp=4,tp=1,ep=4,zero=3"],
            (2, 0),
            COPIES_OF_2,
            ([3, 2, 1, 0], [1, 0, 2, 3]),
        ),
    ],
)
def test_checkpoints_of_copies(
    tmp_path: Path, pins: list[str], spare: Any, held: Any, otherwise: Any
) -> None:
    check_checkpoints(tmp_path, 4, pins, "i", spare=spare, held=held, otherwise=otherwise)


@pytest.mark.slow
def test_checkpoints_of_copies_over_tp(tmp_path: Path) -> None:
    pins = ["pp=1,dp=2,tp=2,weights=split,zero=3", "pp=1,dp=2,tp=2,weights=split,zero=0"]
    check_checkpoints(
        tmp_path, 4, pins, "t,e", spare=(1, 3), held=COPIES_OF_2, otherwise=COPIES_OF_2[::-1]
    )


def message(function: Any) -> str:
    try:
        function()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(text: str, plans: list[Plan], program: Program) -> dict[str, str]:

    distributed = build(text, plans[0], program)
    before = distributed.full_state_dict()

    def said(layers: Any, ranks: int = 2, optimizer: Any = None) -> str:
        return message(lambda: distributed.rebalance(assignment(ranks, **layers), optimizer))

    copies = LayerAssignment(((0, 1), (0,), (1,), (0,)), 0, 0, 0, 0, 0)
    twice = {"l0": [(0, 0), 0, 1, 1]}
    found = {
        "twice": said(twice),
        "ranks": said({"l0": [0, 1, 2, 3]}, 4),
        "counts": said({"l0": [0, 0, 0, 1]}),
        "experts": said({"l0": [0, 1]}),
        "copies": message(lambda: distributed.rebalance(Assignment(2, {LAYERS[0]: copies}))),
        "layer": message(
            lambda: distributed.rebalance(
                Assignment(2, {"other": LayerAssignment(((0,), (1,)), 0, 0, 0, 0, 0)})
            )
        ),
    }
    adafactor = torch.optim.Adafactor([p for p in distributed.parameters() if p.dim() == 3])
    distributed.step(batch(1))
    name = f"{LAYERS[0]}.down_proj"
    parameter = dict(distributed.named_parameters())[name]
    adafactor.state[parameter]["row_var"] = torch.ones(2, 3)
    found["state"] = said({"l0": [1, 0, 0, 1]}, 2, adafactor)
    after = distributed.full_state_dict()
    found["unchanged"] = str(all(torch.equal(after[n], v) for n, v in before.items()))
    return found


def test_what_is_refused_moves_nothing() -> None:
    by_rank = run_split(refused, "mixtral", 2, ["pp=1,dp=1,tp=2,weights=split"], "e")
    for found in by_rank:
        assert "an assignment to 4 ranks" in found["ranks"]
        assert "gives ranks [3, 1] experts: its 2 ranks have 2 slots each" in found["counts"]
        assert "spare_experts=1, or assign with most=2" in found["counts"]
        assert "has 2 experts of layer" in found["experts"]
        assert "with copies gives ranks [3, 2] experts" in found["copies"]
        assert "spare_experts=1, or assign with most=2 or fewer" in found["copies"]
        assert "expert 0 of layer" in found["twice"] and "on ranks [0, 0] of 2" in found["twice"]
        assert "has layer 'other', the program has not" in found["layer"]
        assert "state row_var of Adafactor" in found["state"]
        assert all(text.startswith("UsageError") for text in list(found.values())[:-1])
    assert by_rank[0]["unchanged"] == "True"


def different(text: str, plans: list[Plan], program: Program) -> tuple[int, ...]:
    distributed = build(text, plans[0], program)
    mine = [0, 1, 0, 1] if dist.get_rank() else [1, 0, 1, 0]
    distributed.rebalance(assignment(2, l0=mine))
    return distributed._slots.layers[0].order


def test_the_assignment_of_rank_0_counts() -> None:
    # A solver with a time limit need not find the same one on every rank.
    by_rank = run_split(different, "mixtral", 2, ["pp=1,dp=1,tp=2,weights=split"], "e")
    assert by_rank == [(1, 3, 0, 2)] * 2


def without_optimizer(text: str, plans: list[Plan], program: Program) -> dict[str, Any]:
    """What `rebalance` without the optimizer says, for several of them."""
    ways: dict[str, Any] = {
        "foreach": adamw,
        "fused": lambda p: torch.optim.AdamW(p.parameters(), fused=True),
        "adafactor": lambda p: Adafactor(p.named_parameters()),
        "plain": lambda p: torch.optim.SGD(p.parameters(), lr=0.1),
    }

    def said(program: Any, *ranks: int, given: Any = None) -> str:
        return message(lambda: program.rebalance(assignment(2, l0=list(ranks)), given))

    found: dict[str, Any] = {}
    for name, make in ways.items():
        made = build(text, plans[0], program)
        optimizer = make(made)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        found[f"{name} before a step"] = said(made, 1, 0, 0, 1)
        train(made, optimizer, 1)
        before = held(made)
        found[f"{name} to where they are"] = said(made, 1, 0, 0, 1)
        found[name] = said(made, 0, 0, 1, 1)
        found[f"{name} moved"] = not torch.equal(held(made), before)
        del optimizer, scheduler
        found[f"{name} deleted"] = said(made, 0, 1, 0, 1)
    several = [torch.optim.AdamW([p]) for p in made.parameters()]
    for each in several:
        each.step()
    found["several"] = said(made, 1, 0, 0, 1, given=several[0])
    return found


def test_an_optimizer_with_states_of_moved_experts_has_to_be_given() -> None:
    for said in run_split(without_optimizer, "mixtral", 2, ["pp=1,dp=2,tp=1,ep=2,zero=1"], "i"):
        for name in ("foreach", "fused", "adafactor"):
            kind = "Adafactor" if name == "adafactor" else "AdamW"
            assert said[name].startswith(f"UsageError: {kind} has states of experts that move")
            assert "rebalance(assignment, optimizer)" in said[name]
            assert not said[f"{name} moved"]
        assert said["plain"] == "no error" and said["plain moved"]
        for name in ("foreach", "fused", "adafactor", "plain"):
            for when in ("before a step", "to where they are", "deleted"):
                assert said[f"{name} {when}"] == "no error", (name, when)
        assert "have one optimizer for all experts" in said["several"]


def unsplit(text: str, plans: list[Plan], program: Program) -> str:
    distributed = build(text, plans[0], program)
    return message(lambda: distributed.rebalance(assignment(2, l0=[0, 1, 0, 1])))


def test_experts_that_are_not_split() -> None:
    for said in run_split(unsplit, "mixtral", 2, ["pp=1,dp=2,tp=1,zero=0"], "t"):
        assert "does not split the experts" in said
