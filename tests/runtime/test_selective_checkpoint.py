"""A block that runs a part of itself again has the gradients of the block that keeps all, keeps
what is planned, and runs again what is planned."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import UsageError
from autopar.runtime.selective_checkpoint import SelectiveCheckpoint
from autopar.stage_program import Rerun

ROWS, WIDTH, INNER = 6, 8, 12


def block(w: Any, b: Any, up: Any, down: Any, x: Any) -> Any:
    """Its nodes: layer_norm, linear, gelu, softmax (saves its result), chunk and getitems (views),
    mul, linear_1, add, exp (saves its result)."""
    h = functional.layer_norm(x, (WIDTH,), w, b)
    h = functional.linear(h, up)
    g = functional.gelu(h)
    s = torch.softmax(h, -1)
    left, right = torch.chunk(s, 2, -1)
    h = g * torch.cat([right, left], -1)
    return (x + functional.linear(h, down), torch.sum(torch.exp(h)))


OPS = ("layer_norm", "linear", "gelu", "softmax", "cat", "mul", "linear_1", "add", "exp", "sum_1")
VIEWS = ("chunk", "getitem", "getitem_1")


def rerun(graph: fx.GraphModule, ops: tuple[str, ...]) -> Rerun:
    """What the rewrite makes of op names, for this graph."""
    views = VIEWS if "softmax" in ops else ()
    again = {*ops, *views}
    read = {
        n.name for node in graph.graph.nodes if node.name in again for n in node.all_input_nodes
    }
    given = {n.name for n in graph.graph.find_nodes(op="placeholder")}
    order = [n.name for n in graph.graph.nodes]
    return Rerun(
        tuple(n for n in order if n in ops),
        views,
        tuple(n for n in order if n in read - again - given),
    )


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(WIDTH,), (WIDTH,), (INNER, WIDTH), (WIDTH, INNER), (ROWS, WIDTH)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [t.requires_grad_() for t in made]


def gradients(run: Any) -> list[torch.Tensor]:
    operands = leaves()
    first, second = run(*operands)
    return list(torch.autograd.grad(first.square().sum() + second, operands))


class Calls(TorchDispatchMode):
    """How often each kernel ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def selective(graph: fx.GraphModule, ops: tuple[str, ...]) -> Any:
    def run(*operands: torch.Tensor) -> Any:
        read = operands[:4]
        return SelectiveCheckpoint(graph, rerun(graph, ops), lambda: list(read))(operands[4])

    return run


SETS = [s for n in range(len(OPS) + 1) for s in combinations(OPS, n)]


def test_every_set_of_ops_has_the_gradients_of_none() -> None:
    graph = fx.symbolic_trace(block)
    expected = gradients(graph)
    for ops in SETS[:: len(SETS) // 150] + SETS[-1:]:
        for found, wanted in zip(gradients(selective(graph, ops)), expected, strict=True):
            assert torch.equal(found, wanted), ops


def test_planned_ops_run_twice_and_others_once() -> None:
    graph = fx.symbolic_trace(block)
    with Calls() as plain:
        gradients(graph)
    with Calls() as calls:
        gradients(selective(graph, ("gelu", "softmax", "exp")))
    more = calls.counts - plain.counts
    for views in ("detach", "as_strided", "split", "alias"):
        more.pop(views, None)
    assert more == Counter({"gelu": 1, "_softmax": 1, "exp": 1})


def storages() -> dict[int, int]:
    """Bytes of the storages of all tensors that are alive."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.float64]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


def kept(graph: fx.GraphModule, ops: tuple[str, ...]) -> int:
    """Bytes that the block holds between forward and backward, beside its results."""
    operands = leaves()
    before = storages()
    results = selective(graph, ops)(*operands)
    own = {r.untyped_storage().data_ptr() for r in results}
    return sum(size for key, size in storages().items() if key not in before.keys() | own)


def test_what_is_planned_again_is_not_kept() -> None:
    graph = fx.symbolic_trace(block)
    inner = ROWS * INNER * 8
    hidden, statistics = ROWS * WIDTH * 8, 2 * ROWS * 8
    # Of layer_norm result and statistics; of linear, gelu, softmax, cat, mul and exp the result.
    everything = hidden + statistics + 6 * inner
    assert kept(graph, ()) == everything
    assert kept(graph, ("gelu",)) == everything - inner
    assert kept(graph, ("softmax", "cat")) == everything - 2 * inner
    assert kept(graph, ("layer_norm",)) == everything - hidden - statistics
    # exp is made again of mul, which is kept anyway.
    assert kept(graph, ("exp",)) == everything - inner
    # Everything but what gelu and softmax are made of again.
    assert kept(graph, ("gelu", "softmax", "cat", "mul", "exp")) == everything - 5 * inner


def test_a_second_backward_reads_what_was_made_again() -> None:
    graph = fx.symbolic_trace(block)
    operands = leaves()
    first, second = selective(graph, OPS)(*operands)
    loss = first.square().sum() + second
    once = torch.autograd.grad(loss, operands, retain_graph=True)
    twice = torch.autograd.grad(loss, operands)
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a, b)


def test_a_change_in_between_is_an_error() -> None:
    graph = fx.symbolic_trace(block)
    operands = leaves()
    first, _ = selective(graph, ("gelu",))(*operands)
    with torch.no_grad():
        operands[3].mul_(2)
    with pytest.raises(UsageError, match="changed in place"):
        first.sum().backward()


def test_what_autograd_lets_go_of_is_gone() -> None:
    """A value is not kept by its block when its reader's backward is done."""
    graph = fx.symbolic_trace(block)
    operands = leaves()
    first, second = selective(graph, ("layer_norm", "linear", "softmax"))(*operands)
    alive: list[int] = []

    def count(_gradient: torch.Tensor) -> None:
        found = [
            t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (ROWS, INNER)
        ]
        alive.append(len({t.untyped_storage().data_ptr() for t in found}))

    # The weight of the first product: the norm has its backward, and so its block, still to come.
    operands[2].register_hook(count)
    (first.square().sum() + second).backward()
    # The gradient of linear's result may be there yet, nothing else.
    assert len(alive) == 1 and alive[0] <= 1
