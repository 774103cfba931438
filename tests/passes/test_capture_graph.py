"""Names of inputs, symbols and constants of a captured program."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from autopar.passes.capture_graph import batch_size, parameter_aliases
from autopar.program import outputs_of

X = torch.ones(4, 4)


class Sums(nn.Module):
    """Every input adds to the loss; the names are those of ops and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, linear: torch.Tensor, input: dict[str, torch.Tensor], factor: float = 1.0
    ) -> torch.Tensor:
        hidden = self.inner(linear) * factor
        return (hidden + input["sum"] + input["deep"][0]).mean()


def test_nested_inputs_have_joined_names_and_what_is_no_tensor_is_fixed() -> None:
    inputs = {"linear": X, "input": {"sum": X.clone(), "deep": [X.clone()]}, "factor": 2.0}
    program = capture(Sums(), inputs)
    names = [i.name for i in program.of_kind("input")]
    assert names == ["linear", "input_sum", "input_deep_0"]
    assert program.fixed == {"factor": 2.0}
    placeholders = [n.name for n in program.graph.find_nodes(op="placeholder")]
    assert set(names) < set(placeholders)
    assert "batch" in program.symbols


def test_an_op_called_like_an_input_takes_another_name() -> None:
    program = capture(Sums(), {"linear": X, "input": {"sum": X, "deep": [X]}})
    names = [n.name for n in program.graph.nodes]
    assert len(set(names)) == len(names)
    assert program.graph.find_nodes(op="placeholder")[-3].name == "linear"
    assert "linear_op" in names


def test_the_same_tensor_given_twice_is_two_inputs() -> None:
    program = capture(Sums(), {"linear": X.to("meta"), "input": {"sum": X, "deep": [X]}})
    users = [len(n.users) for n in program.graph.find_nodes(op="placeholder")]
    assert all(users)


@dataclass
class Result:
    loss: torch.Tensor
    hidden: torch.Tensor


def test_a_users_own_dataclass_is_an_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Result:
            hidden = self.inner(x)
            return Result(hidden.mean(), hidden)

    program = capture(Model(), {"x": X})
    assert program.loss == "mean"


def test_batch_size_is_the_size_most_tensors_share() -> None:
    found = batch_size({"a": torch.ones(3), "b": torch.ones(4, 2), "c": torch.ones(4)})
    assert found == 4
    with pytest.raises(CaptureError, match="no tensor"):
        batch_size({"a": torch.ones(())})


def test_aliases_lead_to_the_first_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert parameter_aliases(model)["1.weight"] == "0.weight"


class Averages(nn.Module):
    """Keeps a running mean in one dim, by assignment with a gradient or in place without."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.in_place:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        else:
            self.mean = self.mean * 0.9 + hidden.mean((0, 1)) * 0.1
        return self.second(hidden).square().mean()


@pytest.mark.parametrize("in_place", [True, False])
def test_new_values_of_buffers_have_no_gradient(in_place: bool) -> None:
    import autopar

    model, inputs = Averages(in_place), {"x": torch.randn(8, 4, 8)}
    program = capture(model, inputs)
    _, mean = outputs_of(program.graph)
    assert program.updates == ("mean",) and not mean.meta["requires_grad"]
    # One dim: such a value can't be split as those between blocks are.
    pins = "tp=2,dp=1,pp=1,boundary=S(1)"
    plan = autopar.plan(model, "cpu:2", example_inputs=inputs, global_batch_size=8, pins=pins)
    assert plan.mesh.tp == 2
