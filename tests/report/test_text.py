from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.text import explain, show, span_text
from tests.report import sample
from tests.report.sample import make_plan


def printed(plan: Plan, width: int = 100, **options: object) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show(plan, **options))  # type: ignore[arg-type]
    return console.export_text()


def test_show_tells_every_decision_and_prediction() -> None:
    text = printed(sample.make_plan())
    for word in (
        "zoo:llama3-70b", "h100:8x8", "optimal", "pp4 dp2 tp8", "64 ranks", "1F1B", "level 1",
        "bf16-mixed", "46.3 %", "70.0 GiB", "TP communication", "embed … model.layers.18 (20)",
        "plain data parallel", "does not fit in memory", "pp2 dp4 tp8", "more gradient traffic",
        "Proven optimal", "62 mesh shapes", "47 pruned", "note: Op histc",
    ):  # fmt: skip
        assert word in text, word


def test_show_uses_the_words_of_the_field() -> None:
    lines = printed(sample.make_plan(), pictures=sample.pictures()).splitlines()
    row = {words: line for line in lines for words in (
        "column-parallel", "row-parallel", "head-parallel", "vocab-parallel") if words in line
    }  # fmt: skip
    assert "lm_head" in row["column-parallel"]
    assert "o_proj, down_proj" in row["row-parallel"]
    assert "scaled_dot_product_attention" in row["head-parallel"]
    assert "cross_entropy_loss" in row["vocab-parallel"]
    assert any("q_proj, k_proj, v_proj, gate_proj, up_proj" in line for line in lines)


def test_show_without_pictures_uses_graph_names() -> None:
    assert "linear_3, linear_6" in printed(sample.make_plan())


def test_show_fits_eighty_columns() -> None:
    text = printed(sample.make_plan(), width=80)
    memory = next(line for line in text.splitlines() if line.startswith("  stage 0  2"))
    assert "30.7 %" in memory and "21.5 GiB" in memory


def test_markup_in_names_is_text() -> None:
    assert "[red]x[/nope]" in printed(replace(sample.make_plan(), model="[red]x[/nope]"))


@pytest.mark.parametrize("predicted", [{}, {"step_seconds": 1.5}])
def test_show_of_a_hand_written_plan(predicted: dict[str, object]) -> None:
    text = printed(replace(sample.make_plan(), predicted=predicted))
    assert "pp4 dp2 tp8" in text and ("1.50 s" in text) == bool(predicted)


def test_explain_compares_the_bubble_with_the_formula() -> None:
    plan = sample.make_plan()
    text = explain(plan)
    assert "(p-1)/(m+p-1) = 8.6 %" in text  # 3/35
    assert "Stage 1 sets the pace with 385 ms" in text
    assert "TP communication inside the layers over 8 ranks costs 15.2 %" in text
    assert "Stage 0 is the fullest: 21.5 GiB of 70.0 GiB (30.7 %)" in text
    assert "Not pp8 dp1 tp8: 14.9 s, 8.3 % slower; larger bubble." in text
    assert "Plain FSDP (ZeRO-3): 19.4 s, 41.0 % slower." in text


def test_explain_of_one_rank_speaks_of_no_pipeline_and_no_communication() -> None:
    text = explain(sample.make_plan(1, 4, 2, mesh=Mesh()))
    assert "idles" not in text and "Exposed" not in text and "A rank holds" in text


def test_explain_says_when_memory_does_not_fit() -> None:
    plan = sample.make_plan()
    plan.predicted["memory_limit_bytes"] = 20 * sample.GIB
    assert "1.5 GiB TOO MUCH" in explain(plan)


def test_explain_says_when_a_plan_is_not_proven() -> None:
    plan = sample.make_plan()
    plan.predicted["status"] = "feasible"
    plan.predicted["search"]["gap"] = 0.023
    assert "Not proven optimal" in explain(plan) and "gap 2.3 %" in explain(plan)


def test_explain_without_predictions_says_what_to_do() -> None:
    assert "autopar plan" in explain(replace(sample.make_plan(), predicted={}))


def test_span_text() -> None:
    assert span_text(()) == "-"
    assert span_text(("a", "b")) == "a, b"
    assert span_text(("a", "b", "c")) == "a … c (3)"


def test_sets_of_ops_are_told_with_what_they_free_and_cost() -> None:
    plan = in_part(sample.make_plan())
    text = " ".join(printed(plan, width=160).split())
    wanted = (
        "set 1 of 2 blocks like model.layers.0 re-runs mul ×2, silu, all_gather: frees 60.0 % of "
        "10.0 GiB for 2.0 % of its time"
    )
    assert wanted in text
    assert "set 2" not in text  # no block uses it
    assert "2 in part" in text
    assert wanted in " ".join(explain(plan).split())
    told = printed(replace(plan, predicted={}), width=160)
    assert "re-runs mul ×2, silu, all_gather" in told and "frees" not in told


def in_part(plan: Plan) -> Plan:
    """Two layers of the first stage run some of their ops again."""
    first = plan.stages[0]
    sets = {"set 1": ("mul", "mul.1", "silu", "all_gather of mul"), "set 2": ("to",)}
    chosen = dict.fromkeys(first.blocks[1:3], "set 1")
    told = {
        "seconds": 0.02,
        "block_seconds": 1.0,
        "kept_bytes": 4 * 2**30,
        "saved_bytes": 10 * 2**30,
    }
    return replace(
        plan,
        stages=(replace(first, recompute=(), selective=chosen), *plan.stages[1:]),
        reruns={"model.layers.0": sets},
        predicted={**plan.predicted, "reruns": {"model.layers.0": {"set 1": told}}},
    )


def test_a_plan_that_was_edited_says_that_its_numbers_are_of_another() -> None:
    plan = sample.make_plan().predicted_by_decisions()
    loaded = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert not loaded.is_edited and "were changed since" not in explain(loaded)
    edited = replace(loaded, microbatch=2 * loaded.microbatch)
    assert edited.is_edited and "were changed since it was made" in explain(edited)
    # Notes and predictions are no decisions.
    assert not replace(loaded, notes=("mine",)).is_edited


def test_the_proof_says_where_not_all_was_searched() -> None:
    plan = make_plan()
    searched = {**plan.predicted.get("search", {}), "bound_step_seconds": 4.0}
    plan = replace(plan, notes=(), predicted={**plan.predicted, "search": searched})
    assert "no plan is faster than 4.00 s" in explain(plan)
    noted = replace(plan, notes=("left out 3 x: hybrid sharding with ep (it can be pinned)",))
    told = "no plan that was searched is faster than 4.00 s (the notes say what was not)"
    assert told in explain(noted)
