"""Eager or compile is a choice of the cluster; the search and its evaluator agree under both."""

from __future__ import annotations

from autopar.api import search_program
from autopar.cluster import Cluster
from tests.passes import toys


def step_seconds(execution: str, tp: int) -> float:
    cluster = Cluster.parse("h100:1x2").with_execution(execution)
    program = toys.captured("llama")
    # `ModelCosts` asserts for every block that the placement search's objective is the price of
    # the rewritten graph.
    found = search_program(program, cluster, global_batch_size=64, pins=f"tp={tp},microbatch=16")
    assert found.plan is not None
    return float(found.plan.predicted["step_seconds"])


def test_fused_chains_are_cheaper_on_one_rank_and_under_tensor_parallelism() -> None:
    for tp in (1, 2):
        assert step_seconds("compile", tp) < step_seconds("eager", tp)
