"""A rank's parameters come from the user's model, or from its initialiser when it is on meta."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.placement import Replicate, Shard
from autopar.runtime.initialize import materialize_model
from autopar.runtime.parameters import ParameterSource, storage_dtype
from autopar.runtime.ranks import Ranks
from autopar.stage_program import ParameterSpec
from tests.runtime.toy import INNER, WIDTH, Toy, make_model

NAME = "layers.1.up.weight"
SPEC = ParameterSpec(NAME, (INNER, WIDTH), torch.float32, Shard(0))


@pytest.mark.parametrize(
    ("dtype", "precision", "kept"),
    [
        (torch.float32, "fp32", torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.bfloat16, "bf16-mixed", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
        (torch.float32, "fp16", torch.float16),
        (torch.float64, "bf16", torch.float64),
        (torch.int64, "bf16", torch.int64),
    ],
)
def test_storage_dtype(dtype: torch.dtype, precision: str, kept: torch.dtype) -> None:
    assert storage_dtype(dtype, precision) == kept


def test_a_real_model_is_copied(one_rank: Ranks) -> None:
    model = make_model(dtype=torch.float32)
    source = ParameterSource(model)
    parameter = source.parameter(SPEC, one_rank, "fp32")
    assert isinstance(parameter.data, DTensor)
    assert parameter.shape == SPEC.shape
    with torch.no_grad():
        parameter.zero_()
    assert model.get_parameter(NAME).abs().sum() > 0
    assert source.buffer("scale", one_rank) == 0.5
    frozen = source.parameter(replace(SPEC, requires_grad=False), one_rank, "fp32")
    assert not frozen.requires_grad


def test_a_model_on_meta_is_initialised(one_rank: Ranks) -> None:
    with torch.device("meta"):
        model = Toy()
    parameter = ParameterSource(model, seed=3).parameter(SPEC, one_rank, "bf16").data
    assert isinstance(parameter, DTensor)
    model.register_buffer("scale", torch.tensor(0.5))
    expected = materialize_model(model, seed=3).get_parameter(NAME)
    torch.testing.assert_close(parameter.full_tensor(), expected.bfloat16(), rtol=0, atol=0)


def test_each_tp_rank_takes_its_slice(one_rank: Ranks) -> None:
    class OfTwo:
        mesh, device, tp = Mesh(tp=2), torch.device("cpu"), one_rank.tp

        def index(self, axis: str) -> int:
            return 1

    model = make_model(dtype=torch.float32)
    whole = model.get_parameter(NAME)
    ranks: Any = cast(Any, OfTwo())
    for placement, piece in (
        (Shard(0), whole[INNER // 2 :]),
        (Shard(1), whole[:, WIDTH // 2 :]),
        (Replicate, whole),
    ):
        spec = replace(SPEC, placement=placement)
        parameter: Any = ParameterSource(model).parameter(spec, ranks, "fp32")
        torch.testing.assert_close(parameter.to_local(), piece.detach(), rtol=0, atol=0)


def test_another_model(one_rank: Ranks) -> None:
    source = ParameterSource(make_model())
    with pytest.raises(PlanError, match=r"has shape \(12, 8\), the program was made for \(3, 8\)"):
        source.parameter(replace(SPEC, shape=(3, WIDTH)), one_rank, "fp32")
    for name in ("layers.9.up.weight", "layers.1.up.nothing"):
        with pytest.raises(PlanError, match="the model has no parameter or buffer"):
            source.tensor(name)
