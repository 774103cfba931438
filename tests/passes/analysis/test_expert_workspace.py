"""What the experts need for a moment: counted on shapes, and what the real kernels allocate."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.passes.analysis.expert_workspace import experts_workspace

TEXT = "v0 = split.Tensor(x, w // 2, -1); v1 = silu.default(v0[0]); v2 = mul.Tensor(v1, v0[1]); v2"
TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 64, 32, 48, 4, 2


class Allocated(TorchDispatchMode):
    """Bytes alive of what real ops have made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, Any] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            key = storage._cdata if storage is not None else None
            if storage is None or key in self.sizes or key in known:
                continue
            gone = weakref.ref(storage, partial(self.remove, key, storage.nbytes()))
            self.sizes[key] = gone
            self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return result

    def remove(self, key: int, size: int, _: object) -> None:
        del self.sizes[key]
        self.now -= size


def node(experts: int, device: str) -> tuple[fx.Node, list[Any]]:
    """The call in a graph, and its arguments."""
    torch.manual_seed(0)
    index = torch.arange(TOKENS * CHOICES).view(TOKENS, CHOICES) % EXPERTS
    given: list[Any] = [
        torch.randn(TOKENS, HIDDEN, requires_grad=True),
        index,
        torch.rand(TOKENS, CHOICES, requires_grad=True),
        torch.randn(experts, INNER, HIDDEN, requires_grad=True),
        torch.randn(experts, HIDDEN, INNER, requires_grad=True),
        torch.randn(experts, INNER, HIDDEN, requires_grad=True),
        *[None] * 3, EXPERTS, 0, 1, False, TEXT,
    ]  # fmt: skip
    graph = fx.Graph()
    args: list[Any] = []
    for number, value in enumerate(given):
        if not isinstance(value, torch.Tensor):
            args.append(value)
            continue
        args.append(graph.placeholder(f"x{number}"))
        args[-1].meta = {"val": value.detach().to(device), "requires_grad": value.requires_grad}
    return graph.call_function(torch.ops.autopar.experts.default, tuple(args)), given


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS // 2])
def test_as_much_as_the_kernels_allocate(experts: int) -> None:
    """The routing of the example is even, as the analysis takes it to be."""
    call, given = node(experts, "meta")
    with Allocated() as alive:
        result = torch.ops.autopar.experts(*given)
        forward = alive.most - alive.now
        seed = torch.ones_like(result)
        alive.most = before = alive.now
        leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        found = torch.autograd.grad(result, leaves, seed)
        backward = alive.most - before - sum(g.nbytes for g in found)
    predicted = experts_workspace(call)
    assert forward > 0 and backward > 0
    # Sorting the rows is not looked at: a few numbers of each.
    assert predicted[0] == pytest.approx(forward, rel=0.05)
    assert predicted[1] == pytest.approx(backward, rel=0.05)


def test_no_backward_of_what_is_not_trained() -> None:
    call, _ = node(EXPERTS, "meta")
    for operand in call.all_input_nodes:
        operand.meta["requires_grad"] = False
    forward, backward = experts_workspace(call)
    assert forward > 0 and backward == 0
