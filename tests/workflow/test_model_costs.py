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
from autopar.program import Program
from autopar.search.more_ranks import with_nodes
from autopar.search.placement_objective import Solution
from autopar.workflow import placed_blocks
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from tests.workflow.on_paper import planned

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


class Factorised(nn.Module):
    """An embedding and a projection that the head uses again; two layers share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(32, 8), nn.Linear(8, 16, bias=False)
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.project(self.embed(ids))
        for layer in (self.first, self.second, self.third):
            x = x + layer(x).relu()
        logits = x @ self.project.weight @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def factorised() -> Program:
    ids = torch.zeros(4, 6, dtype=torch.int64)
    return capture(Factorised(), {"ids": ids, "labels": ids})


def test_tied_parameters_by_the_blocks_that_hold_them(factorised: Program) -> None:
    prepared = prepare(factorised, factorised.sizes)
    found = ModelCosts(prepared, Cluster.parse("cpu:2"), factorised.sizes)
    assert found.block_names == ("embed", "project", "first", "second", "third", "head")
    chain = found.alternatives(1, 4)[0].price().blocks
    held = [{t.group: (t.parameters, t.trainable) for t in b.tied} for b in chain]
    embed, project = {"embed.weight": (256, 256)}, {"project.weight": (128, 128)}
    first = {"first.weight": (256, 256)}
    assert held == [embed, project, first, {}, first, embed | project]
    # The head is placed with both that it shares a parameter with.
    assert sorted(map(sorted, found.groups)) == [
        ["embed", "head", "project"], ["first", "third"], ["second"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pins", ["pp=2,zero=3", "pp=2,tp=2,weights=split", "pp=4", "dp=4,zero=3", "pp=4,zero=2"]
)
def test_search_and_evaluation_agree_on_several_groups(factorised: Program, pins: str) -> None:
    """`search_program` raises `PassError` where they don't."""
    assert planned(factorised, 4, 16, pins, "1GiB")


@pytest.mark.parametrize("tp", [2, 4])
def test_a_larger_cluster_shares_prices_and_has_those_of_its_own(tp: int) -> None:
    """Groups within the smaller cluster are linked alike on both; larger ones are priced there."""
    small = costs(apart, 2)
    on = with_nodes(small.cluster, 2 * small.cluster.nodes)
    small.alternatives(2, 4)
    shared, alone = small.on(on), ModelCosts(small.program, on, small.sizes)
    found, wanted = (
        [(a.boundary, a.least, a.price()) for a in each.alternatives(tp, 4)]
        for each in (shared, alone)
    )
    assert found == wanted and found
    assert (shared.alternatives(2, 4) is small.alternatives(2, 4)) and shared.cluster is on
