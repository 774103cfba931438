"""Prices of a part of the sequence, what can be split, and when the search does so by itself."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.cost.evaluate import evaluate
from autopar.errors import UsageError
from autopar.passes.capture import capture
from autopar.program import Program
from autopar.search.result import SearchResult
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from autopar.workflow.sequence_kinds import splits
from tests.end_to_end import sequence_models
from tests.passes import sequence_toy

LONG = 2**16


@cache
def toy() -> Program:
    program = sequence_toy.program()
    return prepare(program, {**program.sizes, "sequence": LONG})


def costs(cluster: str = "h100:1x8") -> ModelCosts:
    program = toy()
    return ModelCosts(program, Cluster.parse(cluster), {**program.sizes, "sequence": LONG})


def found(
    pins: str, batch: int = 1, cluster: str = "h100:1x4", sequence: int = LONG
) -> SearchResult:
    return search_program(
        toy(),
        Cluster.parse(cluster),
        global_batch_size=batch,
        precision="fp32",
        pins=pins,
        sequence=sequence,
        explain=False,
    ).result


def test_the_price_of_a_part_is_the_searched_one_and_not_below_its_bound() -> None:
    root = costs()
    for cp, tp in ((2, 1), (2, 2), (8, 1)):
        part = root.over(cp, tp)
        assert part is root.over(cp, tp) and part is not root
        floor = part.optimistic(tp, 1)
        for known in part.alternatives(tp, 1):
            priced = known.price()  # asserts that the graph costs what the search says
            for block, least in zip(priced.blocks, floor.blocks, strict=True):
                assert block.seconds >= least.seconds * (1 - 1e-9)
                assert block.saved_bytes >= least.saved_bytes
            assert any(b.forward_cp > 0 and b.forward_comm >= b.forward_cp for b in priced.blocks)
    whole, part = root.whole(1).blocks[1], root.over(2, 1).whole(1).blocks[1]
    assert part.parameters == whole.parameters
    assert part.saved_bytes < 0.8 * whole.saved_bytes


def test_rows_wait_for_the_last_rank_and_heads_do_not() -> None:
    """Over n ranks the last does (2n - 1) / n of an equal part of causal attention."""
    root = costs()
    by = {}
    for tp in (1, 2):  # two key heads: for tp 2 there are none to split over cp as well
        part = root.over(2, tp)
        graph = part.kinds.at(1)["layers.0"]
        way = part.kinds.placements[1]["layers.0"]["scaled_dot_product_attention"]  # type: ignore[attr-defined]
        name = next(n for n in graph.calls if "attention" in n)
        by[way] = graph.over(1).prices(name, root.cluster.device)[0].cost.forward_seconds
    assert set(by) == {"shard g", "shard q"}
    assert by["shard q"] == pytest.approx(1.5 * by["shard g"], rel=0.05)


class Pictures(nn.Module):
    """What passes between its blocks has channels in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_what_is_no_sequence_is_not_split_and_says_so() -> None:
    program = capture(Pictures(), {"x": torch.ones(2, 3, 8, 8)})
    program = prepare(program, program.sizes)
    root = ModelCosts(program, Cluster.parse("cpu:2"), program.sizes)
    length, why = splits(program, root.blocks, root.kinds.bindings(2))
    assert length == 1 and "[2, 8, 8, 8] passes between blocks" in why
    assert root.cp_degrees(8) == [1]
    with pytest.raises(UsageError, match=r"cp=2 is not legal .*\[2, 8, 8, 8\] passes between"):
        search_program(program, Cluster.parse("cpu:2"), global_batch_size=2, pins="cp=2")


class Averaging(nn.Module):
    """Its layers keep a mean of what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x.square().mean()


def test_a_buffer_that_a_step_changes_is_named() -> None:
    program = capture(Averaging(), {"x": torch.ones(2, 4, 8)})
    program = prepare(program, program.sizes)
    root = ModelCosts(program, Cluster.parse("cpu:2"), program.sizes)
    assert root.cp_degrees(2) == [1] and "the buffer 'mean'" in root.no_sequence


def test_what_every_cp_rank_computes_whole_is_named() -> None:
    model, inputs = sequence_models.recurrent()
    program = capture(model, inputs, dtype=torch.float32)
    program = prepare(program, program.sizes)
    root = ModelCosts(program, Cluster.parse("cpu:2"), program.sizes)
    root.over(2, 1).whole(1)
    assert "cp=2: gru of layers.0 can't be split by position" in " ".join(root.all_notes())


def test_a_long_sample_alone_is_split_by_the_search_itself() -> None:
    result = found("")
    assert result.choice is not None and result.choice.mesh.cp > 1
    other = found("cp=1")
    assert other.choice is None or other.choice.step_seconds > result.choice.step_seconds
    assert result.evaluation is not None and result.evaluation.time_breakdown["cp_comm"] > 0


def test_short_sequences_are_split_by_pin_only() -> None:
    short = found("", batch=1, sequence=2048)
    assert short.choice is not None and short.choice.mesh.cp == 1
    assert "cp_comm" not in short.time_breakdown
    pinned = found("cp=4", batch=1, sequence=2048)
    assert pinned.choice is not None and pinned.choice.mesh.cp == 4


def test_state_is_shared_out_over_dp_and_cp_together() -> None:
    whole, shared = (found(f"cp=4,tp=1,pp=1,zero={zero}").choice for zero in (0, 3))
    assert whole is not None and shared is not None and shared.mesh.dp == 1
    states = [
        evaluate(c, c.chain.blocks, c.setting.cluster).memory_per_stage[0].optimizer
        for c in (whole, shared)
    ]
    assert states[1] == pytest.approx(states[0] / 4, rel=0.01)
