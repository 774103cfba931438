"""The batch's dim in a result, by rules as ops have them."""

from __future__ import annotations

import pytest

from autopar.passes.analysis.sample_rule import batch_dim
from autopar.rules.language import Rule

SIZES = {"b": 4, "m": 3, "n": 5}
PRODUCT = Rule(((("b",), ("m",)), (("n",), ("m",))), ((("b",), ("n",)),), SIZES)
FLATTENED = Rule(((("b",), ("m",), ("n",)),), ((("b", "m"), ("n",)),), SIZES)
SUM = Rule(((("b",), ("m",)),), ((("m",),),), SIZES)
SOFTMAX = Rule(((("b",), ("m",)),), ((("b",), ("m",)),), SIZES, frozenset({"m"}))


@pytest.mark.parametrize(
    ("rule", "dims", "expected"),
    [
        (PRODUCT, [0, None], 0),
        (PRODUCT, [None, 0], 1),
        (PRODUCT, [0, 0], None),  # every sample of one meets every sample of the other
        (PRODUCT, [1, None], None),  # summed over
        (PRODUCT, [None, None], -1),
        (FLATTENED, [0], 0),
        (FLATTENED, [1], -1),  # no longer the major part of a dim
        (SUM, [0], None),
        (SUM, [1], 0),
        (SOFTMAX, [0], 0),
        (SOFTMAX, [1], None),
    ],
)
def test_where_samples_go(rule: Rule, dims: list[int | None], expected: int | None) -> None:
    assert batch_dim(rule, dims) == expected
