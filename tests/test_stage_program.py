"""Stage programs describe themselves with plain values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.placement import Replicate
from autopar.stage_program import BlockProgram, ParameterSpec, StageProgram, ValueSpec


def test_defaults() -> None:
    graph = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    block = BlockProgram("b", graph, (), (), ("x",), ("y",))
    stage = StageProgram(0, 1, [block], {}, (), (), ())
    assert not block.recompute
    assert stage.shared is None and stage.count is None and stage.loss is None
    assert stage.batch_inputs == {} and not stage.whole_inputs
    assert StageProgram(0, 1, [], {}, (), (), ()).batch_inputs is not stage.batch_inputs


def test_specs_are_values() -> None:
    a = ValueSpec("x", (2, 3), torch.float32)
    assert (
        a == ValueSpec("x", (2, 3), torch.float32)
        and a.placement == Replicate
        and not a.requires_grad
    )
    spec = ParameterSpec("w", (2,), torch.float32, Replicate)
    assert spec.requires_grad and spec.stages == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.fqn = "v"  # type: ignore[misc]
