"""DTensor as a second opinion on our strategies: same result placements, same gradient placements.

It knows fewer placements than we do and moves data where it knows none: these are left out. Under
torch's LocalTensor mode all ranks are in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rules.draws import real
from tests.rules.execution import Call, call
from tests.warm_ranks import run_planner

pytest.importorskip("torch.distributed._local_tensor", reason="needs LocalTensor mode")
aten: Any = torch.ops.aten


def calls() -> list[Call]:
    torch.manual_seed(0)
    ids, rows = torch.randint(8, (4, 2)), torch.tensor([1, 2])
    chosen = torch.rand(4, 6) > 0.5
    return [
        call(aten.linear.default, real(2, 4, 6), real(8, 6), real(8)),
        call(aten.linear.default, real(4, 6), real(8, 6)),
        call(aten.mm.default, real(4, 6), real(6, 8)),
        call(aten.bmm.default, real(2, 4, 6), real(2, 6, 8)),
        call(aten.addmm.default, real(8), real(4, 6), real(6, 8)),
        call(aten.add.Tensor, real(4, 6), real(4, 6)),
        call(aten.mul.Tensor, real(4, 6), real(4, 6)),
        call(aten.mul.Scalar, real(4, 6), 2.0),
        call(aten.neg.default, real(4, 6)),
        call(aten.pow.Tensor_Scalar, real(4, 6), 2),
        call(aten.gelu.default, real(4, 6)),
        call(aten.tanh.default, real(4, 6)),
        call(aten.softmax.int, real(4, 6), -1),
        call(aten.layer_norm.default, real(4, 2, 6), [6], real(6), real(6)),
        call(aten.sum.dim_IntList, real(4, 6), [1]),
        call(aten.mean.dim, real(4, 6), [0]),
        call(aten.cumsum.default, real(4, 6), 1),
        call(aten.transpose.int, real(4, 2, 6), 0, 1),
        call(aten.permute.default, real(4, 2, 6), [2, 0, 1]),
        call(aten.view.default, real(4, 2, 6), [8, 6]),
        call(aten.cat.default, [real(4, 6), real(4, 6)], 0),
        call(aten.select.int, real(4, 6), 0, 1),
        call(aten.index_select.default, real(4, 6), 0, rows),
        call(aten.where.self, chosen, real(4, 6), real(4, 6)),
        call(aten.embedding.default, real(8, 6), ids),
    ]


def asked() -> list[Any]:
    from tests.rules.dtensor_opinion import opinions

    return opinions(calls())


def test_dtensor_places_results_and_gradients_alike() -> None:
    found = run_planner(asked, timeout_seconds=120)
    spoken = [o for o in found if not o.moved]
    assert len({o.op for o in spoken}) >= 20 and len(spoken) >= 100
    assert sum(bool(o.gradients) for o in spoken) >= 90
    for opinion in spoken:
        theirs, ours = opinion.result
        assert theirs == ours and opinion.equal, opinion
        for theirs, ours in opinion.gradients:
            # A whole gradient of a shard is sliced by its owner.
            assert theirs == ours or (theirs == "R" and ours.startswith("S")), opinion


def test_a_wrong_strategy_is_contradicted() -> None:
    found = run_planner(asked_wrongly, timeout_seconds=60)
    assert any(not o.moved and o.result[0] != o.result[1] for o in found), found


def asked_wrongly() -> list[Any]:
    """As if a product with its contracted dim split gave a whole result."""
    from dataclasses import replace

    from autopar.placement import Replicate
    from autopar.rules.strategy import strategies
    from tests.rules import dtensor_opinion

    def wrong(*args: Any) -> list[Any]:
        return [replace(s, result=Replicate) for s in strategies(*args) if s.name == "shard k"]

    dtensor_opinion.strategies = wrong  # in a process of its own
    return dtensor_opinion.opinions(calls()[1:2])
