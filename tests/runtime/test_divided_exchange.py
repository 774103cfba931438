"""Shared experts run while rows travel, forward and backward: the order of calls, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.experts.journey import Journey
from autopar.passes.rewrite.order_exchanges import order_exchanges
from autopar.runtime.divided_exchange import divided
from autopar.stage_program import Rerun
from tests.passes.shared_experts import CHOICES, EXPERTS, SHARED, TOKENS, names, shared_experts
from tests.warm_ranks import run_on_ranks

Tensor = torch.Tensor


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of the shared expert, and what departs and arrives, in the order in which they
    run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in ("mm", "addmm") and any(SHARED in a.shape for a in args[-2:]):
            self.seen.append("shared")
        return func(*args, **(kwargs or {}))


def operands(graph: fx.GraphModule) -> list[Tensor]:
    """Its values, other tokens on every rank."""
    torch.manual_seed(dist.get_rank())
    index = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    kinds = [node.meta for node in graph.graph.find_nodes(op="placeholder")]
    return [
        torch.randn(m["val"].shape, requires_grad=True) if m["requires_grad"] else index
        for m in kinds
    ]


def prepared(whole: bool) -> fx.GraphModule:
    graph = shared_experts(dist.get_world_size(), dist.group.WORLD.group_name)
    if not whole:
        order_exchanges(graph)
        divided(graph.graph, None)
    graph.recompile()
    return graph


def results(graph: fx.GraphModule, calls: list[str]) -> list[Tensor]:
    given = operands(graph)
    (made,) = graph(*given)
    calls.append("backward")
    leaves = [g for g in given if g.requires_grad]
    return [made.detach(), *torch.autograd.grad(made, leaves, torch.ones_like(made))]


def run() -> list[str]:
    expected = results(prepared(whole=True), [])
    calls = Calls()
    real = Journey.depart, Journey.arrive

    def depart(self: Journey, what: str, rows: Tensor, **how: Any) -> Tensor:
        calls.seen.append(f"{what} depart")
        return real[0](self, what, rows, **how)

    def arrive(self: Journey, what: str) -> Tensor:
        calls.seen.append(f"{what} arrive")
        return real[1](self, what)

    graph = prepared(whole=False)
    Journey.depart, Journey.arrive = depart, arrive  # type: ignore[method-assign]
    try:
        with calls:
            found = results(graph, calls.seen)
    finally:
        Journey.depart, Journey.arrive = real  # type: ignore[method-assign]
    torch.testing.assert_close(found, expected)
    return calls.seen


FORWARD = [
    *("shared", "rows depart", "weights depart", "shared", "rows arrive", "weights arrive"),
    *("made depart", "shared", "made arrive"),
]
# Each product has two gradients. Rows and their weights: in either order.
BACKWARD = [
    *("made depart", "shared", "shared", "made arrive", "weights depart", "rows depart"),
    *("shared", "shared", "shared", "shared", "weights arrive", "rows arrive"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_experts_run_between_start_and_wait(ranks: int) -> None:
    for seen in run_on_ranks(run, ranks):
        at = seen.index("backward")
        assert seen[:at] == FORWARD
        assert seen[at + 1 :] == BACKWARD


def test_the_graph_in_steps() -> None:
    graph = shared_experts(2, "tp")
    order_exchanges(graph)
    rerun = Rerun(ops=("doubled", "gate", "experts", "down_1"), views=(), sources=("mul",))
    found = divided(graph.graph, rerun)
    graph.graph.lint()
    assert names(graph) == [
        *("doubled", "experts_announced", "gate", "experts_dispatched", "act", "up_1", "mul"),
        *("experts_processed", "down_1", "experts", "add"),
    ]
    steps = ("experts_announced", "experts_dispatched", "experts_processed", "experts")
    assert found == Rerun(("doubled", "gate", *steps, "down_1"), (), ("mul",))


def test_alone_it_stays_one_node() -> None:
    graph = shared_experts(2)
    before = names(graph)
    assert divided(graph.graph, None) is None and names(graph) == before
