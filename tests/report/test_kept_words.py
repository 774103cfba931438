"""How blocks of ZeRO-3 that are kept gathered are told and compared."""

from __future__ import annotations

from dataclasses import replace

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.diff import diff
from autopar.report.shard_words import kept_sentence, zero_text
from autopar.report.text import explain, headline
from tests.report import sample


def kept(number: int) -> Plan:
    """The first `number` blocks of every stage are kept."""
    plan = replace(sample.make_plan(mesh=Mesh(4, 8, 1)), zero=3)
    stages = tuple(replace(s, keep_gathered=s.blocks[:number]) for s in plan.stages)
    told = {"kept_gathered": {"bytes": 3 * 2**30, "seconds": 0.25}, "step_seconds": 5.0}
    return replace(plan, stages=stages, predicted={**plan.predicted, **told})


def test_kept_blocks_are_told_with_what_they_take_and_save() -> None:
    plan = kept(1)
    blocks = sum(len(s.blocks) for s in plan.stages)
    assert zero_text(plan) == f"level 3 (4/{blocks} blocks kept gathered)"
    assert f"ZeRO-3 (4/{blocks} blocks kept gathered)" in headline(plan)
    told = kept_sentence(plan)
    assert plan.stages[0].blocks[0] in told and "reshard_after_forward=False" in told
    assert "takes 3.0 GiB of a rank and saves 250 ms of the step (5.0 %)" in told
    assert told in explain(plan)
    without = replace(plan, predicted={})
    assert kept_sentence(without).endswith(f"{plan.stages[3].blocks[0]}.")


def test_nothing_kept_is_not_told() -> None:
    plan = kept(0)
    assert zero_text(plan) == "level 3" and kept_sentence(plan) == ""
    assert "gathered" not in headline(plan)
    assert all("keep_gathered" not in s for s in plan.to_dict()["stages"])


def test_a_comparison_counts_them_by_stage() -> None:
    row = next(line for line in diff(kept(1), kept(2)).splitlines() if "kept gathered  " in line)
    assert row.split()[-8:] == ["1"] * 4 + ["2"] * 4
