"""What the search is told about a model: alternatives, their bounds, and what was left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.cluster import Cluster
from autopar.errors import PassError
from autopar.passes.capture import capture
from autopar.search.placement_objective import Solution
from autopar.workflow import placed_blocks
from autopar.workflow.model_costs import ModelCosts, prepare

Attend = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.project(x)).pow(2).mean()


def flat(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def same(q: torch.Tensor) -> torch.Tensor:
    q = q.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def apart(q: torch.Tensor) -> torch.Tensor:
    q = q.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q * 2, q * 3)


def costs(attend: Attend, ranks: int) -> ModelCosts:
    program = capture(Attention(attend), {"x": torch.ones(4, 6, 8)})
    prepared = prepare(program, program.sizes)
    return ModelCosts(prepared, Cluster.parse(f"cpu:{ranks}"), program.sizes)


@pytest.mark.parametrize(
    ("attend", "tp", "said"),
    [
        (flat, 2, "no dim of heads"),
        (same, 2, "one tensor is query, key or value at once"),
        (apart, 2, ""),
        (apart, 4, "2 query and 2 key heads do not divide by 4"),
    ],
)
def test_attention_that_is_not_split_by_heads_says_why(attend: Attend, tp: int, said: str) -> None:
    found = costs(attend, tp)
    assert found.alternatives(tp, 4)
    notes = [note for note in found.notes if "by heads" in note]
    assert len(notes) == bool(said) and all(said in note for note in notes)


def test_an_alternative_costs_what_its_sketch_says_and_no_less_than_the_bound() -> None:
    found = costs(apart, 2)
    floor = found.optimistic(2, 4)
    for known in found.alternatives(2, 4):
        priced = known.price()
        assert priced is known.price() and priced.boundary == known.boundary
        for block, least, optimistic in zip(
            priced.blocks, known.least.blocks, floor.blocks, strict=True
        ):
            assert block.seconds == pytest.approx(least.seconds, rel=1e-9)
            assert block.seconds >= optimistic.seconds * (1 - 1e-12)
            assert block.saved_bytes >= least.saved_bytes
            assert block.parameters >= least.parameters


def test_a_second_solver_confirms_the_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    found = costs(apart, 2)
    for known in found.alternatives(2, 4):
        assert found.confirm(known.price(), 2, 4) == len(found.kinds.groups()) > 0
    assert found.confirm(found.whole(4), 1, 4) == 0
    monkeypatch.setattr(
        placed_blocks,
        "eliminate",
        lambda problem, prices: [Solution({}, 1.0, 0.0)],
    )
    with pytest.raises(PassError, match="elimination finds 1"):
        found.confirm(found.alternatives(2, 4)[0].price(), 2, 4)
