"""Prices of a model whose experts replicas split: what is a part, what is the same, and the
search over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest

from autopar.api import search_program
from autopar.block_cost import ChainCost
from autopar.cluster import Cluster
from autopar.cost.memory import optimizer_bytes, parameter_bytes
from autopar.cost.setting import Setting
from autopar.cost.step import dp_collectives
from autopar.errors import UsageError
from autopar.experts import BESIDE
from autopar.mesh import Mesh
from autopar.op_call import OpCall
from autopar.passes.analysis.beside_exchange import SURELY, exchanges
from autopar.passes.analysis.candidates import candidates
from autopar.passes.capture import capture
from autopar.placement import Placement
from autopar.program import Program
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy
from autopar.workflow.expert_kinds import NO_EXPERTS
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from tests.passes import toys
from tests.passes.expert_toys import library

CLUSTER = Cluster.parse("h100:1x8")


@lru_cache(maxsize=1)
def mixtral() -> Program:
    model, inputs = library("mixtral")
    return capture(model, inputs, name="mixtral")


@lru_cache(maxsize=1)
def costs() -> ModelCosts:
    sizes = dict(mixtral().sizes)
    return ModelCosts(prepare(mixtral(), sizes), CLUSTER, sizes)


def test_ep_divides_the_experts_of_all_layers() -> None:
    assert (costs().experts, costs().no_experts) == (4, "")
    program = toys.captured("mlp")
    none = ModelCosts(program, CLUSTER, dict(program.sizes))
    assert (none.experts, none.no_experts) == (1, NO_EXPERTS)


@pytest.mark.parametrize("ep", [2, 4])
def test_a_rank_holds_a_part_of_experts_and_all_else(ep: int) -> None:
    whole, part = (costs().over(1, 1, n).whole(2).blocks for n in (1, ep))
    for before, block in zip(whole, part, strict=True):
        rest = block.parameters - block.experts.parameters
        assert before.parameters == rest + ep * block.experts.parameters
        assert before.experts.parameters == 0
        if not block.experts.parameters:
            # The same object: solved and priced once.
            assert block == before
            continue
        assert block.forward_ep > 0 and block.backward_ep > 0
        assert block.forward_comm == block.forward_ep and block.hidden_ep == 0
        # As many rows as before, of fewer experts.
        assert block.flops == pytest.approx(before.flops)


@lru_cache(maxsize=2)
def with_shared_experts(overlap: bool = True) -> ModelCosts:
    model, inputs = library("qwen2_moe")
    program = capture(model, inputs, name="qwen2_moe")
    sizes = dict(program.sizes)
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, overlap_experts=overlap))
    return ModelCosts(prepare(program, sizes), cluster, sizes)


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 4), (2, 2)])
def test_shared_experts_hide_a_part_of_the_exchange(tp: int, ep: int) -> None:
    """As much as they take, with what overlap costs them."""
    split = with_shared_experts().over(1, tp, ep)
    layer = next(b for b in split.alternatives(tp, 2)[0].price().blocks if b.experts.parameters)
    whole = with_shared_experts(False).over(1, tp, ep)
    alone = next(b for b in whole.alternatives(tp, 2)[0].price().blocks if b.experts.parameters)
    assert alone.hidden_ep == 0 < layer.hidden_ep
    exchanges = alone.forward_ep + alone.backward_ep
    assert layer.forward_ep + layer.backward_ep + layer.hidden_ep == pytest.approx(exchanges)
    assert layer.forward_ep < alone.forward_ep and layer.backward_ep < alone.backward_ep
    assert layer.seconds == pytest.approx(alone.seconds - layer.hidden_ep)
    assert layer.forward_compute == alone.forward_compute
    # What runs again without its shared experts is hidden by nothing.
    again = layer.partial[-1]
    assert again.comm <= alone.forward_comm * (1 + 1e-9)


def test_shared_experts_hide_an_exchange_over_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's price is that of the graph (asserted where it is made), with and without."""
    from autopar.passes.analysis import candidates as source

    every = source.strategies

    def only(op: OpCall, rule: Rule | None, ranks: int) -> list[Strategy]:
        legal = every(op, rule, ranks)
        return (
            [s for s in legal if s.name == "shard t,e"]
            if op.op_name == "experts" and ranks > 1
            else legal
        )

    monkeypatch.setattr(source, "strategies", only)
    seconds = {}
    for overlap in (True, False):
        model = with_shared_experts.__wrapped__(overlap)
        chains = [a.price() for a in model.alternatives(2, 2)]
        blocks = [b for c in chains for b in c.blocks if c.boundary == "S(1)"]
        seconds[overlap] = [(b.forward_comm, b.backward_comm, b.forward_compute) for b in blocks]
        assert not any(b.hidden_ep for b in blocks)
        for chain in chains:
            _check_sure(model, chain)
    pairs = list(zip(seconds[True], seconds[False], strict=True))
    fewer = [(a[0] < b[0], a[1] < b[1], a[2] == b[2]) for a, b in pairs]
    assert fewer.count((True, True, True)) >= 2 and not any(a[0] > b[0] for a, b in pairs)


def _check_sure(model: ModelCosts, chain: ChainCost) -> None:
    """What the price takes to run beside an exchange does in the graph of a rank."""
    layer = next(b.kind for b in chain.blocks if "experts" in chain.placements.get(b.kind, {}))
    boundary = Placement.parse(chain.boundary)
    graph, _ = model.placed_graph(layer, 2, 2, chain.placements[layer], boundary)
    (call,) = exchanges(graph.graph)
    sure = [n for n in graph.graph.nodes if SURELY in n.meta]
    assert sure and all(n.meta[BESIDE][0] == n.meta[SURELY][0] == call.name for n in sure)


@pytest.mark.parametrize("model", [costs, with_shared_experts])
def test_no_alternative_undercuts_its_bound(model: Callable[[], ModelCosts]) -> None:
    for tp, ep in product((1, 2), (1, 2, 4)):
        split = model().over(1, tp, ep)
        floor = split.optimistic(tp, 2).blocks
        for found in split.alternatives(tp, 2):
            priced = found.price()
            for low, least, block in zip(floor, found.least.blocks, priced.blocks, strict=True):
                assert low.seconds <= block.seconds * (1 + 1e-9)
                assert least.seconds == pytest.approx(block.seconds, rel=1e-9)
                assert low.saved_bytes <= block.saved_bytes
                assert low.parameters <= block.parameters
                assert low.experts.parameters <= block.experts.parameters


def test_other_ops_have_the_strategies_and_prices_of_the_whole_block() -> None:
    """What is taken over from the whole block is what a rank's own graph gives."""
    whole, part = (costs().over(1, 1, n).kinds.at(2) for n in (1, 2))
    (name,) = [n for n in part if part[n] is not whole[n]]
    for tp in (1, 2):
        taken, own = part[name].over(tp), candidates(part[name].graph, tp)
        assert taken.calls.keys() == own.calls.keys()
        assert (taken.strategies, taken.flops) == (own.strategies, own.flops)
        for node in own.calls:
            assert taken.prices(node, CLUSTER.device) == own.prices(node, CLUSTER.device)


def test_shards_of_experts_are_over_the_ranks_that_hold_the_same() -> None:
    block = max(costs().over(1, 1, 2).whole(2).blocks, key=lambda b: b.experts.parameters)
    experts, rest = block.experts.parameters, block.parameters - block.experts.parameters
    for zero in (1, 3):
        setting = Setting(CLUSTER, Mesh(dp=8, ep=2), 2, 1, zero=zero)
        copy = 4 * block.parameters if zero == 1 else 0
        assert parameter_bytes(block, setting) == 4 * (-(-rest // 8) + -(-experts // 4)) + copy
        assert optimizer_bytes(block, setting) == 8 * (-(-rest // 8) + -(-experts // 4))
    alone = Setting(CLUSTER, Mesh(dp=8, ep=8), 2, 1, zero=0)
    plain = Setting(CLUSTER, Mesh(dp=8), 2, 1, zero=0)
    # Experts that no other rank holds have no gradients to sum.
    assert dp_collectives(block, alone)[1] < dp_collectives(block, plain)[1]


def test_the_search_takes_the_best_ep() -> None:
    """What it chooses freely is the fastest of all that are pinned."""

    def seconds(pins: str) -> float:
        found = search_program(
            mixtral(), CLUSTER, global_batch_size=32, pins=pins, explain=False
        ).plan
        assert found is not None
        return float(found.predicted["step_seconds"])

    free = seconds("")
    assert free == pytest.approx(min(seconds(f"ep={ep}") for ep in (1, 2, 4)), rel=1e-9)


@pytest.mark.parametrize(
    ("pins", "message"),
    [("ep=3", "it must divide the 4 experts"), ("ep=8", "it must divide the 4 experts")],
)
def test_an_illegal_pin_is_told(pins: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search_program(mixtral(), CLUSTER, global_batch_size=32, pins=pins)


def test_ep_of_more_ranks_than_replicas() -> None:
    with pytest.raises(UsageError, match="ep"):
        search_program(mixtral(), CLUSTER, global_batch_size=32, pins="tp=4,pp=1,dp=2,ep=4")


def test_a_model_without_experts() -> None:
    program = toys.captured("mlp")
    with pytest.raises(UsageError, match="has no experts"):
        search_program(program, CLUSTER, global_batch_size=8, pins="ep=2")


def test_the_plain_answer_for_experts_is_scored_too() -> None:
    found = search_program(mixtral(), CLUSTER, global_batch_size=32).plan
    assert found is not None
    by_name = {r["name"]: r for r in found.predicted["recipes"]}
    plain = by_name["expert parallel (ep in the node, least pp, ZeRO-1)"]
    assert "ep4" in plain["mesh"] and "tp1" in plain["mesh"] and plain["fits"]
    assert plain["step_seconds"] >= found.predicted["step_seconds"] * (1 - 1e-9)
    beside = {n["change"] for n in found.predicted["neighbours"]}
    assert any(change.startswith("EP ") for change in beside)
