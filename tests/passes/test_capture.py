"""Capture: what becomes a program, what is symbolic, and errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.inputs import flatten_inputs
from autopar.passes.analysis.aliases import written
from autopar.passes.capture import capture
from autopar.passes.capture_twin import meta_twin
from autopar.program import Program
from tests.passes import toys


class Root(nn.Module):
    """A linear layer around which each test puts what it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


X = torch.ones(4, 4)


def test_batch_and_sequence_are_symbols_and_sizes_are_the_examples() -> None:
    program = toys.captured("mlp")
    assert set(program.symbols) == {"batch", "sequence"}
    assert program.sizes == {"batch": toys.BATCH, "sequence": toys.SEQUENCE}
    assert [(i.name, i.batch_dim) for i in program.of_kind("input")] == [("ids", 0), ("labels", 0)]
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    assert loss.meta["val"].dim() == 0
    assert program.graph.output_node().args[0] == (loss,)


def test_the_captured_graph_computes_the_loss() -> None:
    model, inputs = toys.model("mlp")
    program = toys.captured("mlp")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = [inputs[i.name] if i.kind == "input" else parameters[i.target] for i in program.inputs]
    (loss,) = program.graph_module(*values)
    torch.testing.assert_close(loss, model(**inputs))


def test_a_size_that_the_model_fixes_makes_the_program_static() -> None:
    class Fixed(Root):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).view(2, 8).sum() if x.shape[0] == 4 else x.sum()

    program = capture(Fixed(), {"x": X})
    assert program.is_static and program.sizes["batch"] == 4
    assert "torch.export fixes the batch" in program.batch_stays_whole


def test_one_example_row_is_made_a_symbol_by_those_of_more_rows() -> None:
    program = capture(Root(), {"x": X[:1]})
    assert "batch" in program.symbols and program.sizes["batch"] == 1


def test_positional_inputs() -> None:
    program = capture(Root(), (X,))
    assert [i.name for i in program.of_kind("input")] == ["x"]
    assert "batch" in program.symbols
    assert [i.name for i in capture(Root(), X).of_kind("input")] == ["x"]


def test_example_inputs_of_another_kind_are_refused() -> None:
    with pytest.raises(CaptureError, match="example_inputs is a int"):
        capture(Root(), 3)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="no tensor among the example inputs"):
        capture(Root(), {})


def test_tied_parameters_are_one_input_under_their_first_name() -> None:
    program = toys.simplified("tied")
    names = [i.target for i in program.of_kind("parameter")]
    assert names.count("embed.weight") == 1 and "head.weight" not in names
    assert program.aliases["head.weight"] == "embed.weight"


def test_frozen_parameters_need_no_gradient_and_what_hangs_on_them_alone_neither() -> None:
    model, inputs = toys.model("mlp")
    model.embed.weight.requires_grad_(False)
    program = capture(model, inputs)
    marked = {n.name: n.meta["requires_grad"] for n in program.graph.nodes if n.op != "output"}
    by_target = {i.target: marked[i.name] for i in program.of_kind("parameter")}
    assert not by_target["embed.weight"] and by_target["head.weight"]
    assert not marked["embedding"] and marked["linear"] and marked[program.loss]


def test_no_loss() -> None:
    with pytest.raises(CaptureError, match="no output of the model is a scalar loss") as info:
        capture(nn.Linear(4, 4), (X,))
    assert "labels" in info.value.next_step


def test_control_flow_on_values_names_module_and_line() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:  # the line that the error names
                return x
            return -x

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Branching()))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).sum()

    with pytest.raises(CaptureError) as info:
        capture(Loss(), {"x": X})
    line = Branching.forward.__code__.co_firstlineno + 1
    assert "module 'body.1.1'" in info.value.message
    assert f"{__file__}:{line}" in info.value.message
    assert "torch.where" in info.value.next_step


def test_a_tensor_attribute_must_be_registered() -> None:
    class Scaled(Root):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.arange(4.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * self.scale).sum()

    with pytest.raises(CaptureError, match="'scale'") as info:
        capture(Scaled(), {"x": X})
    assert "register_buffer" in info.value.next_step


def test_a_tensor_made_from_numbers_in_the_forward_keeps_them() -> None:
    class Constant(Root):
        def __init__(self, device: str | None) -> None:
            super().__init__()
            self.device = device

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            where = x.device if self.device is None else self.device
            return (self.inner(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=where)).sum()

    (value,) = capture(Constant(None), {"x": X}).constants.values()
    assert value.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(CaptureError, match="meta and cpu") as info:
        capture(Constant("cpu"), {"x": X})
    assert "register_buffer" in info.value.next_step


def test_a_tensor_shape_of_the_forward_is_no_constant() -> None:
    class Full(Root):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * torch.full((4,), 2.0, device=x.device)).sum()

    assert not capture(Full(), {"x": X}).constants


def run(program: Program, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The captured graph on the model's own parameters and buffers."""
    for node in program.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", torch.device("cpu"))
    program.graph_module.recompile()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors, _ = flatten_inputs(inputs)
    values = {**state, **tensors}
    found: tuple[torch.Tensor, ...] = program.graph_module(
        *(
            program.constants[i.name] if i.kind == "constant" else values[i.target]
            for i in program.inputs
        )
    )
    return found


def test_a_batch_norm_in_training_returns_its_new_statistics() -> None:
    class Normed(Root):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.bn(self.inner(x)) ** 3).sum()

    model, x = Normed(), torch.randn(6, 4)
    program = capture(model, {"x": x})
    names = ["bn.num_batches_tracked", "bn.running_mean", "bn.running_var"]
    assert sorted(program.updates) == names
    loss, *values = run(program, model, {"x": x})
    torch.testing.assert_close(loss, model(x))
    for name, value in zip(program.updates, values, strict=True):
        torch.testing.assert_close(value, model.get_buffer(name))
    model.bn.eval()
    assert not capture(model, {"x": X}).updates


def test_a_write_through_a_view_becomes_a_new_value() -> None:
    class Viewed(Root):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y[:, :2].mul_(2)
            out = torch.zeros(x.shape[0], 4, device=x.device)
            for index in range(4):
                out[:, index] = y[:, 3 - index] * index
            return (out * y).sum()

    model = Viewed()
    program = capture(model, {"x": X})
    assert not [n for n in program.graph.nodes if written(n)]
    (loss,) = run(program, model, {"x": X})
    torch.testing.assert_close(loss, model(X))


def test_a_counter_is_an_update_and_a_written_parameter_is_refused() -> None:
    class Counting(Root):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.inner(x).sum()

    class Clamped(Root):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.inner.weight.clamp_(-1, 1)
            return self.inner(x).sum()

    assert capture(Counting(), {"x": X}).updates == ("count",)
    with pytest.raises(CaptureError):
        capture(Clamped(), {"x": X})


def test_the_twin_is_on_meta_and_the_model_is_left_as_it_was() -> None:
    model, inputs = toys.model("tied")
    model.register_buffer("table", torch.ones(3))
    before = {n: (p, p.device, p.detach().clone()) for n, p in model.named_parameters()}
    twin = meta_twin(model, torch.bfloat16)
    capture(model, inputs, dtype=torch.bfloat16)
    for name, (parameter, device, value) in before.items():
        now = model.get_parameter(name)
        assert now is parameter and now.device == device and torch.equal(now, value)
    assert {p.device.type for p in [*twin.parameters(), *twin.buffers()]} == {"meta"}
    assert twin.head.weight is twin.embed.weight
    assert twin.embed.weight.dtype is torch.bfloat16 and twin.table.dtype is torch.float32


def test_a_model_on_meta_is_captured_in_the_asked_dtype() -> None:
    with torch.device("meta"):
        model = toys.Mlp()
    program = capture(model, toys.batch(), dtype=torch.bfloat16)
    nodes = {n.name: n for n in program.graph.nodes}
    kinds = {nodes[i.name].meta["val"].dtype for i in program.of_kind("parameter")}
    assert kinds == {torch.bfloat16}


def test_equal_models_have_equal_fingerprints_and_others_not() -> None:
    program = toys.captured("mlp")
    assert capture(toys.Mlp(), toys.batch()).fingerprint() == program.fingerprint()
    assert capture(toys.Mlp(), toys.batch(6)).fingerprint() == program.fingerprint()
    assert capture(toys.Mlp(layers=3), toys.batch()).fingerprint() != program.fingerprint()
