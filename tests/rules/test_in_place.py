"""`add_` has the dims of `add`, so that the batch can be followed, and is never sharded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.rules import rule_for
from autopar.rules.strategy import strategies
from tests.rules.draws import real
from tests.rules.execution import Call, call, check_all, op_call_of

aten = torch.ops.aten
IDS = torch.tensor([[1, 0, 2, 3]])
MASK = torch.tensor([True, False, True, False])

# The form that writes in place, and the one that does not.
FORMS = {
    "add": (aten.add_.Tensor, aten.add.Tensor, (real(4),)),
    "mul": (aten.mul_.Tensor, aten.mul.Tensor, (real(1, 4),)),
    "relu": (aten.relu_.default, aten.relu.default, ()),
    "clamp": (aten.clamp_.default, aten.clamp.default, (-1.0, 1.0)),
    "dropout": (aten.dropout_.default, aten.dropout.default, (0.5, True)),
    "masked_fill": (aten.masked_fill_.Scalar, aten.masked_fill.Scalar, (MASK, 0.0)),
    "zero": (aten.zero_.default, aten.zero.default, ()),
    "fill": (aten.fill_.Scalar, aten.fill.Scalar, (2.0,)),
    "tril": (aten.tril_.default, aten.tril.default, ()),
    "cumsum": (aten.cumsum_.default, aten.cumsum.default, (1,)),
    "scatter": (aten.scatter_.value, aten.scatter.value, (0, IDS, 1.0)),
    "index_add": (aten.index_add_.default, aten.index_add.default, (0, IDS[0], real(4, 4))),
    "index_put": (aten.index_put_.default, aten.index_put.default, ([IDS[0]], real(4, 4), True)),
    "copy": (aten.copy_.default, aten.copy.default, (real(4, grad=False),)),
    "transpose": (aten.transpose_.default, aten.transpose.int, (0, 1)),
}


def forms(name: str) -> tuple[Call, Call]:
    in_place, functional, arguments = FORMS[name]
    x = real(4, 4, grad=name != "copy")
    return call(in_place, x, *arguments), call(functional, x, *arguments)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_rule_is_that_of_the_other_form(name: str) -> None:
    written, fresh = (op_call_of(made)[0] for made in forms(name))
    assert written.writes_in_place and not fresh.writes_in_place
    rule = rule_for(written)
    assert rule is not None and rule == rule_for(replace(fresh, kwargs=written.kwargs))


@pytest.mark.parametrize("name", sorted(FORMS))
def test_it_is_replicated_and_gives_what_one_device_gives(name: str) -> None:
    op, operands = op_call_of(forms(name)[0])
    assert check_all(op, operands) == {"replicate"}
    assert [s.name for s in strategies(op, rule_for(op), 2)] == ["replicate"]
