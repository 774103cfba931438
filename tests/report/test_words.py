from __future__ import annotations

import pytest

from autopar.report.words import op_of, placement_words, strategy_words


@pytest.mark.parametrize(
    ("op", "strategy", "placement", "dims", "words"),
    [
        ("linear", "shard n", "S(2)", 3, "column-parallel"),
        ("linear", "shard k", "P", 3, "row-parallel"),
        ("addmm", "shard n", "S(1)", 2, "column-parallel"),
        ("addmm", "shard m", "S(0)", 2, "token-parallel"),
        ("linear", "shard b1", "S(1)", 3, "sequence-parallel"),
        ("linear", "shard b1", "", 0, "sequence-parallel"),
        ("experts", "shard e", "P", 2, "expert-parallel"),
        ("experts", "shard i", "P", 2, "tensor-parallel inside experts"),
        ("experts", "shard t", "S(0)", 2, "token-parallel"),
        ("experts", "shard t,e", "S(0)", 2, "expert-parallel, all-to-all"),
        ("embedding", "shard v", "P", 3, "vocab-parallel"),
        ("embedding", "shard b1", "S(1)", 3, "sequence-parallel"),
        ("cross_entropy_loss", "shard c", "R", 0, "vocab-parallel"),
        ("cross_entropy_loss", "shard t", "P", 0, "token-parallel"),
        ("scaled_dot_product_attention", "shard g", "S(1)", 4, "head-parallel"),
        ("scaled_dot_product_attention", "shard b", "S(0)", 4, "batch-parallel"),
        ("rms_norm", "shard d1", "S(1)", 3, "sequence-parallel"),
        ("layer_norm", "shard d1", "", 0, "sequence-parallel"),
        ("mul", "shard d1", "S(1)", 4, "sharded along dim 1"),
        ("mul", "shard d0", "S(0)", 3, "batch-parallel"),
        ("mul", "shard d2", "S(2)", 3, "sharded along dim 2"),
        ("mul", "replicate*", "R*", 3, "replicated, gradients summed"),
        ("mul", "replicate", "R", 3, "replicated"),
        ("add", "partial 0,1", "P", 3, "carries partial sums"),
        ("view", "shard f0", "", 0, "sharded along dim 0"),
    ],
)
def test_strategy_words(op: str, strategy: str, placement: str, dims: int, words: str) -> None:
    assert strategy_words(op, strategy, placement, dims) == words


def test_op_of() -> None:
    assert op_of("linear_12") == op_of("linear.12") == op_of("linear") == "linear"
    assert op_of("scaled_dot_product_attention") == "scaled_dot_product_attention"


def test_placement_words() -> None:
    assert placement_words("S(1)") == "sharded along dim 1"
    assert "gradient" in placement_words("R*")
