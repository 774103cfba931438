"""The price of a layer's experts: work and bytes of the busiest rank, exchanges by link."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.cluster import Cluster
from autopar.cost.experts import (
    ExchangeTime,
    backward_flops,
    busiest_rows,
    exchange_seconds,
    experts_time,
)
from autopar.experts.operands import spread_arguments
from autopar.op_call import OpCall, Operand
from autopar.program import TensorType
from autopar.rules import rule_for

TEXT = "v0 = split.Tensor(x, w // 2, -1); v1 = silu.default(v0[0]); v2 = mul.Tensor(v1, v0[1]); v2"
TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 8192, 4096, 1536, 64, 4
H100 = Cluster.parse("h100:4x8")


def call(tokens: int = TOKENS, here: int = EXPERTS, inner: int = INNER) -> OpCall:
    def real(*shape: int) -> TensorType:
        return TensorType(shape, torch.bfloat16, True)

    types = (
        real(tokens, HIDDEN),
        TensorType((tokens, CHOICES), torch.int64),
        real(tokens, CHOICES),
        real(here, inner, HIDDEN),
        real(here, HIDDEN, inner),
        real(here, inner, HIDDEN),
    )
    args = (*map(Operand, range(6)), None, None, None, EXPERTS, 0, 1, False, TEXT)
    names = tuple(f"x{i}" for i in range(6))
    target = torch.ops.autopar.experts.default
    return OpCall("experts", target, args, {}, names, types, (types[0],))


def test_flops_are_those_of_three_matrices_for_each_choice() -> None:
    rule = rule_for(call())
    assert rule is not None
    assert rule.flops == 2 * TOKENS * CHOICES * 3 * HIDDEN * INNER
    assert backward_flops(call(), rule.flops) == 2 * rule.flops
    frozen = [replace(t, requires_grad=False) for t in call().types]
    frozen[0] = call().types[0]
    assert backward_flops(replace(call(), types=tuple(frozen)), rule.flops) == rule.flops


def test_the_busiest_of_several_ranks_has_more_than_its_share() -> None:
    assert busiest_rows(1000.0, 1) == 1000
    assert 1000 < busiest_rows(1000.0, 2) < busiest_rows(1000.0, 16) < 1000 + 4 * sqrt(1000)
    # Many rows even out.
    assert busiest_rows(1e6, 8) / 1e6 < 1.01 < busiest_rows(1e3, 8) / 1e3


def test_the_bound_on_the_busiest_holds_for_random_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, 8, (300, 1000), generator=generator)
    most = torch.stack([(chosen == r).sum(1) for r in range(8)]).amax(0).double().mean()
    bound = busiest_rows(1000 / 8, 8)
    assert float(most) <= bound <= 1.1 * float(most)


def test_time_near_the_arithmetic_where_rows_are_many() -> None:
    found = experts_time(call(), H100.device)
    flops = 2 * TOKENS * CHOICES * 3 * HIDDEN * INNER
    least = flops / H100.device.flops["bfloat16"]
    assert least < found.forward.seconds < 3 * least
    assert 1.5 * found.forward.seconds < found.backward < 4 * found.forward.seconds
    assert 0 < found.weights < found.backward


def test_few_rows_for_each_expert_are_read_for_little_work() -> None:
    """The weights of all experts are read whatever the number of tokens."""
    found = experts_time(call(tokens=8), H100.device)
    assert found.forward.bound == "memory"


def test_half_of_the_experts_take_half_the_time_and_the_imbalance() -> None:
    whole, half = (experts_time(call(here=n), H100.device) for n in (EXPERTS, EXPERTS // 2))
    assert 0.5 < half.forward.seconds / whole.forward.seconds < 0.6


def test_exchanges_cost_by_the_links_they_cross() -> None:
    spread = replace(call(TOKENS // 8, EXPERTS // 8), args=spread_arguments(call().args, 8))
    inside = exchange_seconds(spread, 1, H100)
    across = exchange_seconds(spread, 4, H100)
    assert 0 < inside.backward <= inside.forward < across.forward
    # Numbers of rows and their weights travel there as well.
    assert inside.there > inside.back == inside.gradient_back < inside.gradient_there
    assert exchange_seconds(call(), 1, H100) == ExchangeTime()
    # As many rows come to a rank as under experts alone.
    alone = experts_time(call(here=EXPERTS // 8), H100.device)
    assert experts_time(spread, H100.device).forward.seconds == pytest.approx(
        alone.forward.seconds, rel=0.2
    )


def test_the_number_of_rows_is_no_stride() -> None:
    """The gradients of weights are summed over rows, however many there are: twice the forward."""
    odd, even = (experts_time(call(tokens=n), H100.device) for n in (TOKENS - 8, TOKENS))
    assert (TOKENS - 8) * CHOICES % (8 * EXPERTS)
    assert odd.backward == pytest.approx(even.backward, rel=0.05)
    assert odd.backward < 3 * odd.forward.seconds


def test_a_published_layer() -> None:
    """Mixtral-8x7B's experts, one for each of 8 H100, 4096 tokens on each, forced balance, NCCL's
    all-to-all: 4.327 ms forward, 7.684 ms backward with the router (Megatron-LM d98e8a64dd,
    moe_perf/baseline.json). Nothing was fitted to it."""
    hidden, inner = 4096, 14336
    types = list(call().types)
    for place, shape in enumerate(
        [(4096, hidden), (4096, 2), (4096, 2), (1, inner, hidden), (1, hidden, inner)]
    ):
        types[place] = replace(types[place], shape=shape)
    types[5] = types[3]
    args = list(call().args)
    args[9] = 8
    layer = replace(call(), types=tuple(types), results=(types[0],), args=tuple(args))
    layer = replace(layer, args=spread_arguments(layer.args, 8))
    cluster = Cluster.parse("h100:1x8")
    time, exchanges = experts_time(layer, cluster.device), exchange_seconds(layer, 1, cluster)
    assert time.forward.seconds + exchanges.forward == pytest.approx(4.327e-3, rel=0.15)
    assert time.backward + exchanges.backward == pytest.approx(7.684e-3, rel=0.2)


def test_even_routers_leave_no_rank_more_than_its_share() -> None:
    even = replace(H100.device, even_experts=True)
    part = call(here=EXPERTS // 8)
    by_chance, made_even = (experts_time(part, d) for d in (H100.device, even))
    assert made_even.forward.seconds < by_chance.forward.seconds
    # One rank has all rows either way.
    assert experts_time(call(), even) == experts_time(call(), H100.device)


def test_a_part_of_the_rows_each_sends_less_between_nodes() -> None:
    spread = replace(call(), args=spread_arguments(call().args, 8))
    whole = exchange_seconds(spread, 4, H100)
    parts = exchange_seconds(spread, 4, H100, parts=4)
    assert parts.forward < whole.forward and parts.backward < whole.backward
    # Not a fourth of it: what comes is gathered inside the node.
    assert parts.forward > whole.forward / 4
