"""What copies of experts take to add up their gradients, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.block_cost import BlockCost, Experts
from autopar.cluster import Cluster
from autopar.cost.collective import collective_time
from autopar.cost.evaluate import evaluate_setting
from autopar.cost.expert_copies import expert_copies_seconds
from autopar.cost.setting import Setting
from autopar.cost.step import block_times
from autopar.mesh import Mesh
from autopar.plan_document import StagePlan

H100 = Cluster.parse("h100:2x8")
SPARE = 4_000_000
PLAIN = BlockCost("a", "k", 1e-3, 2e-3, 0.0, 0.0, 1.0, 40_000_000, 40_000_000, 500, 50, 30, 20)
OVER_EP = replace(PLAIN, experts=Experts(9_000_000, 9_000_000, (), SPARE))
OVER_TP = replace(PLAIN, spare_over_tp=SPARE)


def setting(mesh: Mesh, zero: int = 0, precision: str = "bf16-mixed") -> Setting:
    return Setting(H100, mesh, 1, 4, "1f1b", zero, precision)


def seconds(kind: str, nbytes: int, ranks: int, stride: int) -> float:
    return collective_time(kind, nbytes, ranks, stride, H100)


def test_gradients_of_all_spare_slots_travel_there_and_back() -> None:
    # As many as a rank has, of float32, from each of four ranks.
    expected = 2 * seconds("all_to_all", 4 * 4 * SPARE, 4, 2)
    found = setting(Mesh(dp=8, tp=2, ep=4))
    assert expert_copies_seconds(OVER_EP, found, "ep") == pytest.approx(expected)
    assert expert_copies_seconds(OVER_EP, found, "tp") == 0
    expected = 2 * seconds("all_to_all", 2 * 2 * SPARE, 2, 1)
    found = setting(Mesh(dp=8, tp=2), precision="bf16")
    assert expert_copies_seconds(OVER_TP, found, "tp") == pytest.approx(expected)


def test_ranks_of_a_shard_put_rows_together_first() -> None:
    mesh = Mesh(dp=16, ep=4)
    each = seconds("all_to_all", 16 * SPARE, 4, 1) + seconds("all_reduce", 4 * SPARE, 4, 4)
    assert expert_copies_seconds(OVER_EP, setting(mesh, 1), "ep") == pytest.approx(2 * each)
    # No other rank holds the same experts: nothing is split.
    alone = setting(Mesh(dp=16, ep=16), 3)
    expected = 2 * seconds("all_to_all", 64 * SPARE, 16, 1)
    assert expert_copies_seconds(OVER_EP, alone, "ep") == pytest.approx(expected)


@pytest.mark.parametrize(("block", "axis"), [(OVER_EP, "ep"), (OVER_TP, "tp")])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_search_and_the_evaluator_count_them_once_a_step(
    block: BlockCost, axis: str, zero: int
) -> None:
    found = setting(Mesh(dp=8, tp=2, ep=4 if axis == "ep" else 1), zero)
    without = replace(block, experts=replace(block.experts, spare=0), spare_over_tp=0)
    more = expert_copies_seconds(block, found, axis)
    assert more > 0
    ends = [block_times(b, found).end_tp for b in (block, without)]
    assert ends[0] - ends[1] == pytest.approx(more)
    stage = (StagePlan(("a",)),)
    times = [evaluate_setting(found, stage, (b,)) for b in (block, without)]
    assert times[0].step_seconds - times[1].step_seconds == pytest.approx(more)
    terms = [t.time_breakdown[f"{axis}_comm"] for t in times]
    assert terms[0] - terms[1] == pytest.approx(more)
