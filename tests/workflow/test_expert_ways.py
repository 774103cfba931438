"""A plan says which ways to split experts there were not."""

from __future__ import annotations

from autopar.rules import rule_for
from autopar.rules.strategy import strategies
from autopar.workflow.expert_ways import missing_ways
from tests.cost.test_experts import call


def _missing(ranks: int, inner: int) -> dict[str, str]:
    made = call(tokens=16, inner=inner)
    names = {s.name for s in strategies(made, rule_for(made), ranks)}
    return missing_ways(made, names, ranks)


def test_none_is_missing_where_all_sizes_divide() -> None:
    assert _missing(4, 1536) == {}


def test_experts_and_columns_that_do_not_divide() -> None:
    found = _missing(3, 1537)
    assert found["expert-parallel"] == "64 experts do not divide by 3"
    assert found["tensor-parallel inside experts"] == (
        "1537 columns of an expert do not divide by 3"
    )
