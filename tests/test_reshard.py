"""The table of reshards follows from what placements mean for a value and for its gradient."""

from __future__ import annotations

import pytest

from autopar.placement import Partial, Placement, Replicate, ReplicatePartialGrad, Shard
from autopar.reshard import Reshard, reshard

PLACEMENTS = (Replicate, ReplicatePartialGrad, Shard(0), Partial)
# What turns a tensor held in one form by all ranks into another form; '' is no communication.
COLLECTIVES = {
    ("whole", "whole"): "",
    ("whole", "slice"): "",
    ("whole", "terms"): "",
    ("terms", "whole"): "all_reduce",
    ("terms", "slice"): "reduce_scatter",
    ("terms", "terms"): "",
    ("slice", "whole"): "all_gather",
    ("slice", "terms"): "",
    ("slice", "slice"): "all_to_all",
}


def value_form(p: Placement) -> str:
    return "slice" if p.is_shard else "terms" if p.kind == "P" else "whole"


def gradient_form(p: Placement) -> str:
    return "slice" if p.is_shard else "terms" if p.gradient_is_partial else "whole"


@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
@pytest.mark.parametrize("target", [*PLACEMENTS, Shard(1)], ids=str)
def test_forward_and_backward_are_what_the_forms_ask_for(
    source: Placement, target: Placement
) -> None:
    edge = reshard(source, target)
    if edge is None:
        assert (source.kind, target.kind) == ("R*", "P")  # the only pair that no rule asks for
    elif source == target:
        assert edge == Reshard("") and edge.is_free
    else:
        assert edge.op
        assert edge.forward == COLLECTIVES[value_form(source), value_form(target)]
        assert edge.backward == COLLECTIVES[gradient_form(target), gradient_form(source)]
        assert edge.is_free == (not edge.forward and not edge.backward)


def test_without_gradient_both_whole_placements_are_one_and_nothing_runs_backward() -> None:
    assert reshard(Replicate, ReplicatePartialGrad, requires_grad=False) == Reshard("")
    assert reshard(ReplicatePartialGrad, Replicate, requires_grad=False) == Reshard("")
    for source in PLACEMENTS:
        for target in PLACEMENTS:
            edge = reshard(source, target, requires_grad=False)
            assert edge is None or edge.backward == ""
    assert reshard(Replicate, Shard(0), requires_grad=False) == Reshard("slice")


def test_every_op_of_the_table_exists() -> None:
    import torch

    import autopar.runtime.collectives  # noqa: F401 - registers them

    for source in PLACEMENTS:
        for target in (*PLACEMENTS, Shard(1)):
            edge = reshard(source, target)
            if edge is not None and edge.op:
                assert hasattr(torch.ops.autopar, edge.op)
