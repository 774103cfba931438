"""No legal cut: the stage that can't be one is named, and no memory is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.search.enumerate import search
from autopar.search.illegal_cuts import most_stages, why_no_cut
from autopar.search.infeasible import explain_infeasible, infeasible_error
from autopar.search.options import SearchOptions, parse_pins
from tests.search.synthetic import Provider, cluster


class Joined(Provider):
    """No stage can end with the blocks of these numbers."""

    joined = (1, 2, 3, 4, 5)

    def blocks(self, tp, microbatch, *, split):
        found = super().blocks(tp, microbatch, split=split)
        return tuple(
            replace(b, can_end_stage=False) if i in self.joined else b for i, b in enumerate(found)
        )


def error_of(provider, pins):
    options = SearchOptions(16, pins=parse_pins(pins))
    result = search(provider, provider.on, options)
    assert result.choice is None
    explained = explain_infeasible(result, provider, provider.on, options)
    assert explained.infeasible is None
    return infeasible_error(explained)


def test_a_pinned_cut_that_the_pipeline_could_not_send_is_named():
    error = error_of(Joined(cluster(4)), "cuts=layers.2,dp=1,tp=2")
    assert "a stage can't end with block 'layers.1': values without gradient" in str(error)
    assert error.exit_code == 5 and "memory limit" not in str(error)
    assert "move these cuts" in error.next_step


def test_more_stages_than_legal_cuts():
    error = error_of(Joined(cluster(4)), "pp=4")
    # embed | layers.0 .. layers.5 | head
    assert "at most 3 stages" in str(error) and "is 4" in str(error)
    assert "'layers.0' and 4 more" in str(error) and "of at most 3" in error.next_step


@pytest.mark.parametrize("joined", [(), (0,), (1, 3), (0, 1, 2, 3, 4, 5, 6)])
def test_as_many_stages_as_it_says_are_legal_and_no_more(joined):
    provider = Joined(cluster(16, per_node=16))
    provider.joined = joined
    blocks = provider.optimistic(1, 1).blocks
    most = most_stages(blocks)
    for pp in range(2, len(blocks) + 1):
        whole = Joined(cluster(pp, per_node=pp))
        whole.joined = joined
        pins = parse_pins(f"pp={pp},schedule=gpipe,microbatches=16")
        found = search(whole, whole.on, SearchOptions(16, pins=pins), explain=False)
        assert (found.choice is not None) == (pp <= most)


def test_there_is_no_reason_where_there_is_a_cut():
    provider = Provider(cluster(4))
    options = SearchOptions(16, memory_limit=1)
    result = search(provider, provider.on, options)
    explained = explain_infeasible(result, provider, provider.on, options)
    assert explained.no_cut == ("", "") and explained.infeasible is not None
    options = SearchOptions(16, pins=parse_pins("cuts=layers.2"))
    assert why_no_cut(provider.optimistic(1, 1).blocks, [], options) == ("", "")


def test_a_parameter_at_both_ends_of_a_v_is_named():
    error = error_of(Provider(cluster(4), tied=True), "schedule=zbv")
    assert "with schedule zbv every cut gives one rank two parts that share a parameter" in str(
        error
    )
    assert "(embed and head)" in str(error) and "schedule=1f1b" in error.next_step
