from __future__ import annotations

from dataclasses import replace

from autopar.mesh import Mesh
from autopar.report.diff import diff
from tests.report import sample
from tests.report.test_text import in_part


def rows(text: str) -> dict[str, str]:
    return {line.split("  ")[0]: line for line in text.splitlines()}


def test_equal_plans_decide_the_same() -> None:
    text = diff(sample.make_plan(), sample.make_plan())
    assert "The two plans decide the same." in text
    assert rows(text)["step"].endswith("same")


def test_differences_are_told_and_equal_decisions_left_out() -> None:
    a = sample.make_plan()
    b = replace(sample.make_plan(8, mesh=Mesh(8, 1, 8), microbatches=64), zero=0)
    told = rows(diff(a, b))
    assert "pp4 dp2 tp8" in told["mesh"] and "pp8 dp1 tp8" in told["mesh"]
    assert "20 21 21 20" in told["blocks per stage"]
    assert "precision" not in told and "cluster" not in told
    assert told["step"].endswith("+4.6 %")
    assert told["memory, fullest rank"].rstrip().endswith("%")


def test_strategies_that_differ_are_named() -> None:
    a = sample.make_plan()
    changed = {**a.placements["model.layers.0"], "linear_3": "replicate"}
    b = replace(a, placements={**a.placements, "model.layers.0": changed})
    line = next(x for x in diff(a, b).splitlines() if "linear_3" in x)
    assert "row-parallel" in line and "replicated" in line
    text = diff(a, replace(a, placements={}))
    rows = [row for row in text.splitlines() if row.startswith("model.layers.0: ")]
    assert rows and all(row.split()[-1] == "whole" for row in rows)


def test_many_strategies_are_cut_short() -> None:
    a = sample.make_plan()
    b = replace(a, placements={k: dict.fromkeys(v, "replicate") for k, v in a.placements.items()})
    assert "more ops" in diff(a, b) and len(diff(a, b).splitlines()) < 40


def test_the_same_counts_with_other_blocks_name_the_blocks() -> None:
    a = sample.make_plan(2, 4)
    swapped = tuple(replace(s, recompute=s.blocks[1:2]) for s in a.stages)
    other = tuple(replace(s, recompute=s.blocks[:1]) for s in a.stages)
    text = diff(replace(a, stages=swapped), replace(a, stages=other))
    assert "embed; model.layers.2" in text


def test_other_model_is_said_first() -> None:
    a = sample.make_plan()
    assert diff(a, replace(a, model="zoo:gpt2")).startswith(
        "These plans are for different programs"
    )


def test_sets_of_ops_that_differ_are_named() -> None:
    a = in_part(sample.make_plan())
    more = {"set 1": ("mul",), "set 2": ("to",)}
    other = rows(diff(a, replace(a, reruns={"model.layers.0": more})))
    line = other["model.layers.0: set 1 re-runs"]
    assert "mul ×2, silu, all_gather" in line and line.rstrip().endswith("mul")
    plain = diff(a, sample.make_plan())
    assert "blocks recomputed in part" in plain and "absent" in plain
