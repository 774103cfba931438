"""From rules to strategies: which are legal, what their placements are."""

from __future__ import annotations

import torch

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.placement import Partial, Replicate, ReplicatePartialGrad, Shard
from autopar.rules import rule_for
from autopar.rules.strategy import Strategy, strategies
from tests.rules.draws import real
from tests.rules.execution import Call, call, op_call_of

aten = torch.ops.aten
R, RG, P, S = Replicate, ReplicatePartialGrad, Partial, Shard


def of(made: Call, ranks: int = 2) -> dict[str, Strategy]:
    op, _ = op_call_of(made)
    return {s.name: s for s in strategies(op, rule_for(op), ranks)}


def test_linear_has_column_row_and_token_parallelism() -> None:
    found = of(call(aten.linear.default, real(2, 4, 8), real(6, 8)))
    assert list(found)[0] == "replicate"
    assert (found["shard n"].operands, found["shard n"].result) == ((RG, S(0)), S(2))
    assert (found["shard k"].operands, found["shard k"].result) == ((S(2), S(1)), P)
    assert (found["shard b1"].operands, found["shard b1"].result) == ((S(1), RG), S(1))
    assert found["shard n"].share == 0.5
    assert (found["partial 0"].operands, found["partial 0"].result) == ((P, RG), P)


def test_the_bias_of_a_row_parallel_linear_is_added_once() -> None:
    found = of(call(aten.linear.default, real(2, 8), real(6, 8), real(6)))
    assert found["shard k"].operands == (S(1), S(1), P)
    assert found["partial 0,2"].operands == (P, RG, P)


def test_a_frozen_weight_has_no_partial_gradient() -> None:
    found = of(call(aten.linear.default, real(2, 8), real(6, 8, grad=False)))
    assert found["shard b0"].operands == (S(0), R)
    assert "partial 1" not in found


def test_without_gradients_nothing_is_partial() -> None:
    found = of(call(aten.mm.default, real(4, 8, grad=False), real(8, 4, grad=False)))
    assert set(found) == {"replicate", "shard m", "shard n"}


def test_sizes_that_do_not_divide_are_not_sharded() -> None:
    made = call(aten.linear.default, real(3, 8), real(6, 8))
    assert "shard b0" not in of(made)
    assert "shard n" in of(made) and "shard n" not in of(made, 4)
    assert "shard k" in of(made, 8) and "shard k" not in of(made, 16)


def test_one_rank_has_nothing_to_choose() -> None:
    assert set(of(call(aten.neg.default, real(8)), 1)) == {"replicate"}


def test_only_the_major_factor_of_a_merged_dim_is_sharded() -> None:
    found = of(call(aten.view.default, real(2, 4, 8), [2, 32]), 4)
    assert {s for s in found if s.startswith("shard")} == {"shard f1"}
    assert (found["shard f1"].operands, found["shard f1"].result) == ((S(1),), S(1))


def test_attention_over_grouped_heads() -> None:
    q, k, v = real(2, 8, 4, 6), real(2, 4, 4, 6), real(2, 4, 4, 6)
    sdpa = aten.scaled_dot_product_attention.default
    found = of(call(sdpa, q, k, v, None, 0.0, True, enable_gqa=True), 4)
    assert {s for s in found if s.startswith("shard")} == {"shard g"}
    assert (found["shard g"].operands, found["shard g"].result) == ((S(1),) * 3, S(1))
    assert "shard q" in of(call(sdpa, q, k, v, enable_gqa=True), 4)


def test_a_vocabulary_can_be_split_at_both_ends() -> None:
    table = of(call(aten.embedding.default, real(8, 4), torch.randint(8, (2, 4))))["shard v"]
    assert (table.operands, table.result, table.local_op) == ((S(0), R), P, "vocab_embedding")
    loss = of(call(aten.cross_entropy_loss.default, real(4, 8), torch.randint(8, (4,))))
    assert (loss["shard c"].result, loss["shard c"].local_op) == (R, "vocab_cross_entropy")
    assert (loss["shard t"].result, loss["shard t"].local_op) == (P, "token_cross_entropy")


def test_only_the_sum_of_a_smoothed_or_weighted_loss_is_partial() -> None:
    logits, target = real(4, 8), torch.randint(8, (4,))
    smooth = call(aten.cross_entropy_loss.default, logits, target, None, 1, -100, 0.1)
    summed = call(aten.cross_entropy_loss.default, logits, target, None, 2)
    weighted = call(aten.cross_entropy_loss.default, logits, target, real(8, grad=False))
    assert set(of(weighted)) == {"replicate", "replicate*"}
    assert set(of(smooth)) == {"replicate", "replicate*", "shard c"}
    assert of(summed)["shard t"].result == P


def test_the_mean_over_a_dim_keeps_it_whole_and_the_sum_does_not() -> None:
    assert "shard d0" not in of(call(aten.mean.dim, real(4, 4), [0]))
    summed = of(call(aten.sum.dim_IntList, real(4, 4), [0]))["shard d0"]
    assert summed.result == P


def test_a_scalar_added_to_a_partial_sum_would_be_added_twice() -> None:
    assert not [s for s in of(call(aten.add.Tensor, real(4), 1.0)) if s.startswith("partial")]
    assert "partial 0,1" in of(call(aten.add.Tensor, real(4), real(4)))
    x = real(4)
    assert not [s for s in of(call(aten.mul.Tensor, x, x)) if s.startswith("partial")]
    assert {"partial 0", "partial 1"} <= set(of(call(aten.mul.Tensor, real(4), real(4))))


def test_groups_of_a_convolution_are_divided() -> None:
    x, w = real(2, 8, 5), real(4, 2, 3)
    found = of(call(aten.conv1d.default, x, w, None, [1], [1], [1], 4))
    strategy = found["shard g"]
    assert (strategy.operands, strategy.result) == ((S(1), S(0)), S(1))
    assert strategy.divided == ("groups",)
    assert not {"shard o", "shard c"} & set(found)
    plain = of(call(aten.conv1d.default, x, real(4, 8, 3), real(4)))
    assert (plain["shard o"].operands, plain["shard o"].result) == ((RG, S(0), S(0)), S(1))
    assert (plain["shard c"].operands, plain["shard c"].result) == ((S(1), S(1), P), P)


def test_writes_in_place_are_known_but_replicated() -> None:
    made = call(aten.relu_.default, real(4, 4))
    op, _ = op_call_of(made)
    assert rule_for(op) is not None
    assert set(of(made)) == {"replicate"}
    assert "shard d0" in of(call(aten.relu.default, real(4, 4)))


def test_random_ops_are_sharded_but_never_partial() -> None:
    found = of(call(aten.dropout.default, real(4, 4), 0.1, True))
    assert set(found) == {"replicate", "replicate*", "shard d0", "shard d1"}
    assert "partial 0" in of(call(aten.dropout.default, real(4, 4), 0.1, False))
    queries = (real(2, 4, 4, 4) for _ in "qkv")
    attention = of(call(aten.scaled_dot_product_attention.default, *queries, None, 0.1))
    assert set(attention) == {"replicate", "replicate*", "shard b", "shard g"}
    # Two results: a mark around the op would not know which one it is for.
    assert set(of(call(aten.native_dropout.default, real(4, 4), 0.1, True))) == {"replicate"}


def test_tokens_and_experts_are_sharded_together() -> None:
    count, rows = 4, real(8, 6)
    matrices = [real(count, 4, 6), real(count, 6, 4)]
    text = "v0 = tanh.default(x); v0"
    index = torch.zeros(8, 2, dtype=torch.int64)
    rest = (None, None, None, None, count, 0, 1, False, text)
    made = call(torch.ops.autopar.experts.default, rows, index, real(8, 2), *matrices, *rest)
    found = of(made)
    assert found["shard e"].operands == (RG, R, RG, S(0), S(0))
    assert found["shard e"].result == P and found["shard e"].local_op == "own_experts"
    assert found["shard i"].operands == (RG, R, RG, S(1), S(2))
    both = found["shard t,e"]
    assert set(both.operands) == {S(0)} and both.result == S(0) and both.share == 0.5
    assert both.local_op == "exchanged_experts"
    assert "shard t,e" not in of(made, 8)
