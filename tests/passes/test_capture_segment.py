"""One call's nodes: recorded, compared with another call's, and added again for a third."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.passes.capture_segment import (
    Before,
    NotRepeatable,
    Segment,
    Site,
    narrowed,
    record,
    replay,
    same_value,
)

X = torch.ones(2, 4)


class Traced(nn.Module):
    """Runs a function of the input, and of the way to make a site, while it is exported."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer

        def site(*leaves: Any, **own: torch.Tensor) -> Site:
            return Site(tracer, list(leaves), own, dict(tracer.module_stack), "")

        return self.run(x, site)


def trace(run: Callable[..., torch.Tensor]) -> fx.Graph:
    return torch.export.export(Traced(run), (X,), strict=False).graph


def recorded(site: Site, call: Callable[..., Any]) -> Segment:
    before = Before.of(site)
    return record(site, before, call(*site.leaves, *site.own.values()))


def proven(one: Site, other: Site, call: Callable[..., Any]) -> Segment:
    return narrowed(recorded(one, call), recorded(other, call))


def ops(graph: fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]


def test_a_segment_is_added_for_other_arguments_and_other_tensors_of_the_layer() -> None:
    def run(x: torch.Tensor, site: Any) -> torch.Tensor:
        y, u, v = x * 2, x + 1, x + 2
        segment = proven(site(x, w=u), site(u, w=x), lambda a, w: torch.relu(a) @ w.t())
        return replay(segment, site(y, w=v)).sum()  # type: ignore[no-any-return]

    graph = trace(run)
    assert ops(graph) == ["mul", "add", "add", *["relu", "t", "matmul"] * 3, "sum"]
    relu, t = list(graph.nodes)[10:12]
    assert (str(relu.args[0]), str(t.args[0])) == ("mul", "add_1")


def test_what_is_neither_argument_nor_of_the_layer_stays() -> None:
    def run(x: torch.Tensor, site: Any) -> torch.Tensor:
        y, outer = x * 2, x + 1
        segment = proven(site(x), site(x * 3), lambda a: a - outer)
        return replay(segment, site(y)).sum()  # type: ignore[no-any-return]

    sub = [n for n in trace(run).nodes if "sub" in str(n.target)][2]
    assert [str(a) for a in sub.args] == ["mul", "add"]


def test_an_operand_that_could_be_two_things_is_refused_until_a_second_call_tells() -> None:
    def run(x: torch.Tensor, site: Any) -> torch.Tensor:
        y, z = x * 2, x * 3
        first = recorded(site(x), lambda a: a - x)
        with pytest.raises(NotRepeatable, match="two things"):
            replay(first, site(y))
        second = recorded(site(y), lambda a: a - x)
        return replay(narrowed(first, second), site(z)).sum()  # type: ignore[no-any-return]

    sub = [n for n in trace(run).nodes if "sub" in str(n.target)][2]
    assert [str(a) for a in sub.args] == ["mul_1", "x"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda a: a * 2, lambda a: a * 3),
        (lambda a: a * 2, lambda a: a + 2),
        (lambda a: a * 2, lambda a: (a * 2) * 2),
        (lambda a: a - a * 2, lambda a: a * 2 - a),
        (lambda a: (a * 2, a), lambda a: (a * 2, None)),
        (lambda a: a * 2, lambda a: a * 2.0),
    ],
)
def test_calls_that_differ_do_not_stand_for_each_other(one: Any, other: Any) -> None:
    def run(x: torch.Tensor, site: Any) -> torch.Tensor:
        first, second = recorded(site(x), one), recorded(site(x * 5), other)
        with pytest.raises(NotRepeatable, match="differ"):
            narrowed(first, second)
        return x.sum()

    trace(run)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda a: a.add_(1), "writes into"),
        (lambda a: a.view(-1), "view of another"),
        (lambda a: (a * 2)[1:], "part of a tensor"),
        (lambda a: torch.tensor([1.0], device=a.device) * a, "get_attr"),
        (lambda a: (a * 2, {1}), "returns a set"),
        (lambda a: (a * 2).chunk(2), "part of a tensor|view of another"),
    ],
)
def test_calls_with_an_effect_that_a_copy_would_not_have(call: Any, reason: str) -> None:
    def run(x: torch.Tensor, site: Any) -> torch.Tensor:
        with pytest.raises(NotRepeatable, match=reason):
            recorded(site(x * 1), call)
        return x.sum()

    trace(run)


def test_an_output_is_like_a_traced_one_and_an_input_is_passed_on() -> None:
    def run(x: torch.Tensor, site: Any) -> torch.Tensor:
        scale = (x[0] * 2).detach().requires_grad_()
        y = x * 2
        kept: list[Any] = []

        def call(a: torch.Tensor, w: torch.Tensor) -> Any:
            kept.append({"new": (a * w).t(), "given": a, "plain": 3})
            return kept[-1]

        segment = proven(site(x, w=scale), site(x * 3, w=scale), call)
        found = replay(segment, site(y, w=scale))
        new, old = found["new"], kept[-1]["new"]
        assert found["given"] is y and found["plain"] == 3
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert new.requires_grad == old.requires_grad and not new.is_leaf
        return new.sum()  # type: ignore[no-any-return]

    trace(run)


def test_values_are_compared_by_all_that_a_graph_says_of_them() -> None:
    assert same_value(torch.ones(2), torch.zeros(2))
    assert not same_value(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same_value(torch.ones(2, 3), torch.ones(3, 2).t())
    assert same_value([torch.ones(2), 1], [torch.ones(2), 1])
    assert not same_value([torch.ones(2), 1], [torch.ones(2), True])
