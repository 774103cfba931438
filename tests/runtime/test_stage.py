"""A stage module runs its blocks like the model, and knows its parameters by the model's names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.mesh import Mesh
from autopar.runtime.stage import StageModule
from autopar.stage_program import ParameterSpec, StageProgram
from tests.runtime.toy import graph, make_batch, make_model, make_plan, make_stages


def build(program: StageProgram, model: nn.Module) -> StageModule:
    def make(spec: ParameterSpec) -> nn.Parameter:
        return nn.Parameter(model.get_parameter(spec.fqn).detach().clone())

    return StageModule(program, make, {"scale": model.get_buffer("scale")})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_equals_the_model(tied: bool, recompute: bool, keep: bool) -> None:
    model = make_model(tied)
    (program,) = make_stages(make_plan(Mesh(), recompute=recompute), tied=tied)
    stage, batch = build(program, model), make_batch(2)
    if keep:
        stage.keep_parameters()
    for _ in range(2):  # two microbatches share what is kept
        loss = stage(**batch)
        loss.backward()
        expected = model(**batch)
        expected.backward()
        torch.testing.assert_close(loss, expected)
    stage.release_parameters()
    names = dict(model.named_parameters())
    parameters = stage.fqn_parameters()
    assert parameters.keys() == names.keys()
    for fqn, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, names[fqn].grad)


def test_tied_parameters_are_one_and_belong_to_the_stage() -> None:
    (program,) = make_stages(make_plan(Mesh()), tied=True)
    stage = build(program, make_model(tied=True))
    assert [spec.fqn for spec in stage.specs.values()] == ["embed.weight"]
    assert len(list(stage.parameters())) == len(stage.fqn_parameters())


def test_recomputed_blocks_save_their_inputs_only() -> None:
    def saved_bytes(recompute: bool) -> int:
        (program,) = make_stages(make_plan(Mesh(), recompute=recompute))
        stage = build(program, make_model())
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stage(**make_batch(2))
        return sum(sizes.values())

    assert saved_bytes(True) < saved_bytes(False) / 3


def test_shared_values_and_whole_inputs() -> None:
    (program,) = make_stages(make_plan(Mesh()))
    # The labels become a shared value made from a buffer and an input that is not cut.
    program = replace(
        program,
        shared=graph(lambda scale, shift: ((shift * scale * 2).long(),)),
        shared_buffers=("scale",),
        shared_inputs=("shift",),
        shared_outputs=("labels",),
    )
    model, batch = make_model(), make_batch(2)
    stage = build(program, model)
    stage.whole_inputs = {"shift": batch["labels"].double()}
    torch.testing.assert_close(stage(ids=batch["ids"]), model(**batch))


def test_dtype_of_the_graph() -> None:
    """Parameters kept in float32 are read in the dtype the graph was captured in."""
    (program,) = make_stages(make_plan(Mesh()), dtype=torch.bfloat16)
    model = make_model(dtype=torch.bfloat16)

    def make(spec: ParameterSpec) -> nn.Parameter:
        return nn.Parameter(model.get_parameter(spec.fqn).detach().float())

    stage = StageModule(program, make, {"scale": model.get_buffer("scale")})
    loss = stage(**make_batch(2))
    loss.backward()
    assert loss.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in stage.parameters())
