"""Repeated layers traced once: the graph is that of a full trace, and only like stands for like."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.errors import CaptureError
from autopar.passes import capture_export
from autopar.passes.capture import capture
from autopar.passes.capture_export import Exported
from autopar.passes.capture_repeats import Repeats
from autopar.program import Program, module_path
from tests.passes.repeated_layers import (
    LAYER_KINDS,
    LAYERS,
    MODELS,
    Collecting,
    Counting,
    KeepsActivation,
    Layer,
    ListArgument,
    NoOpOnInput,
    OfTorch,
    OnOtherLines,
    ReturnsInput,
    Shared,
    Stack,
    WithoutGrad,
    X,
)


def rows(program: Program) -> list[Any]:
    """All that a graph says, but for the names of its nodes."""
    order: dict[fx.Node, str] = {}
    found = []
    for node in program.graph.nodes:
        order[node] = f"%{len(order)}"
        operands = str(fx.map_arg((node.args, node.kwargs), lambda n: order[n]))
        value = node.meta.get("val")
        described = [
            (str(v.shape), str(v.stride()), v.dtype, v.device)
            if isinstance(v, torch.Tensor)
            else str(v)
            for v in (value if isinstance(value, list | tuple) else [value])
        ]
        # Constants get their names from a counter.
        kept = [(k, v) for k, v in node.meta.get("nn_module_stack", {}).items()]
        target = node.target if node.op == "call_function" else node.op
        lines = node.meta.get("stack_trace"), node.meta["requires_grad"] if node.users else None
        found.append((target, operands, described, kept, lines))
    return [*found, program.inputs, program.updates, program.notes, program.sizes]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each export did not trace, in order."""
    counts: list[int] = []
    plain = capture_export._export

    def counted(*args: Any) -> Exported:
        found = plain(*args)
        counts.append(found.replayed)
        return found

    monkeypatch.setattr(capture_export, "_export", counted)
    return counts


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the full trace of the last layer: what is replayed has to be right by itself."""
    plain = Repeats.__init__

    def without(self: Repeats, twin: nn.Module) -> None:
        plain(self, twin)
        self._last.clear()

    monkeypatch.setattr(Repeats, "__init__", without)


def compare(model: nn.Module, inputs: Any = (X,), **options: Any) -> None:
    shared = capture(model, inputs, replay_repeats=True, **options)
    full = capture(model, inputs, replay_repeats=False, **options)
    assert rows(shared) == rows(full)
    assert shared.fingerprint() == full.fingerprint()


def test_equal_layers_are_traced_at_the_start_and_at_the_end(replays: list[int]) -> None:
    compare(Stack())
    # The first one's input needs no gradient: it is a kind of its own. Then two and the last.
    assert replays == [LAYERS - 4, 0]


def test_each_replayed_layer_has_its_own_parameters_and_paths() -> None:
    program = capture(Stack(), (X,), replay_repeats=True)
    places = {n.name: program.input(n.name).target for n in program.graph.nodes if n.op[0] == "p"}
    found = [
        (module_path(n), places[n.args[1].name])
        for n in program.graph.nodes
        if n.target is torch.ops.aten.linear.default
    ]
    paths = [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("up", "down")]
    assert found == [(path, f"{path}.weight") for path in paths]


def test_three_layers_are_not_worth_it(replays: list[int]) -> None:
    capture(Stack(layers=3), (X,), replay_repeats=True)
    assert replays == [0]


@pytest.mark.usefixtures("no_second_look")
@pytest.mark.parametrize("kind", LAYER_KINDS, ids=lambda k: k.__name__)
def test_layers_that_differ_in_what_they_read(kind: type[Layer]) -> None:
    Counting.calls = Shared.calls = 0
    shared = capture(Stack(kind), (X,), replay_repeats=True)
    Counting.calls = Shared.calls = 0
    assert rows(shared) == rows(capture(Stack(kind), (X,), replay_repeats=False))


def test_layers_of_two_kinds_by_an_attribute_are_two_kinds(replays: list[int]) -> None:
    class Alternating(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.wide = index % 2 == 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * 2 if self.wide else self.body(x)

    compare(Stack(Alternating, layers=10))
    assert replays == [4, 0]


@pytest.mark.usefixtures("no_second_look")
@pytest.mark.parametrize("kind", MODELS, ids=lambda k: k.__name__)
def test_the_graph_is_that_of_a_full_trace(kind: type[nn.Module]) -> None:
    compare(kind())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ReturnsInput, 3), (NoOpOnInput, 3), (OnOtherLines, 3), (WithoutGrad, 3), (OfTorch, 3)],
    ids=lambda k: getattr(k, "__name__", ""),
)
def test_what_is_allowed_is_replayed(
    kind: type[nn.Module], expected: int, replays: list[int]
) -> None:
    capture(kind(), (X,), replay_repeats=True)
    assert replays == [expected]


@pytest.mark.parametrize("kind", [Collecting, ListArgument, KeepsActivation], ids=str)
def test_what_leaves_by_another_way_is_not_replayed(
    kind: type[nn.Module], replays: list[int]
) -> None:
    capture(kind(), (X,), replay_repeats=True)
    assert replays == [0]


def test_a_refusal_names_the_layer_that_a_full_trace_names() -> None:
    class Branching(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) if self.index < 5 or x.sum() > 0 else x

    with pytest.raises(CaptureError, match=r"module 'layers.5'"):
        capture(Stack(Branching), (X,), replay_repeats=True)


def test_a_last_layer_that_differs_in_a_way_nobody_sees_ends_in_a_full_trace(
    replays: list[int],
) -> None:
    hidden: dict[int, float] = {}

    class ByIdentity(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * hidden.get(id(self.up.weight), 1.0)

    class Marked(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden.clear()
            hidden[id(self.layers[-1].up.weight)] = 5.0
            return super().forward(x)

    compare(Marked(ByIdentity))
    assert replays == [0, 0]
