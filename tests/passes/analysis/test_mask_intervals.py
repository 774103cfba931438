"""Masks as intervals: equal to the mask itself, entry by entry, or no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.analysis import mask_intervals as analysis
from autopar.passes.analysis.mask_intervals import mask_intervals

SIZE = 12
Mask = Callable[[Tensor, Tensor], Tensor]


def graph_of(mask: Mask) -> fx.GraphModule:
    """`mask(queries, keys)` of positions [n, 1] and [1, n] as a graph without inputs."""

    def build() -> tuple[Tensor]:
        place = torch.arange(SIZE)
        return (mask(place[:, None], place[None, :]),)

    made: fx.GraphModule = make_fx(build)()
    values: dict[fx.Node, Any] = {}
    for node in made.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "get_attr":
            made.register_buffer(node.target, getattr(made, node.target), persistent=False)
            values[node] = made.get_buffer(node.target)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
        node.meta["val"] = values[node]
    return made


@pytest.fixture(autouse=True)
def only_vectors_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "SMALL", 2 * SIZE)


KNOWN: dict[str, Mask] = {
    "causal": lambda q, k: k <= q,
    "turned": lambda q, k: q >= k,
    "strict": lambda q, k: k < q,
    "window": lambda q, k: (k <= q) & (k > q - 3),
    "both sides": lambda q, k: (k < q + 2) & (k >= q - 2),
    "of one document": lambda q, k: (q // 5) == (k // 5),
    "causal and of one document": lambda q, k: (k <= q) & ((q // 5) == (k // 5)),
    "and what always holds": lambda q, k: (k <= q) & (q[:1, :1] >= 0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_intervals_are_the_mask(name: str) -> None:
    found = mask_intervals(graph_of(KNOWN[name]))
    assert found is not None
    key = torch.arange(SIZE)[None, :]
    made = (key >= found.start[:, None]) & (key < found.stop[:, None])
    place = torch.arange(SIZE)
    assert torch.equal(made, KNOWN[name](place[:, None], place[None, :]))


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: (k <= q) | (k < 2),
        lambda q, k: ((q * 7) % 5) == ((k * 7) % 5),
        lambda q, k: (q - k).abs() < 3,
        lambda q, k: torch.where(k <= q, 0.0, -1.0),
        lambda q, k: (k <= q) & (k < 5),
    ],
    ids=["prefix", "keys in no order", "of differences", "floating", "a vector of its own"],
)
def test_other_forms_have_no_answer(mask: Mask) -> None:
    assert mask_intervals(graph_of(mask)) is None
