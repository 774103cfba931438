"""Edited plan files: what contradicts itself is refused, and no file at all gives a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autopar.errors import PlanError
from autopar.plan_document import Plan
from autopar.report.diff import diff
from autopar.report.text import explain, show
from tests.report import sample

Document = dict[str, Any]
Way = tuple[str | int, ...]


@pytest.fixture(scope="module")
def document() -> Document:
    plan = sample.make_plan(layers=8)
    found: Document = json.loads(plan.to_json())
    return {**found, "cluster": f"h100:{plan.mesh.size // 8}x8"}


def load(folder: Path, document: Any) -> Plan:
    path = folder / "edited.json"
    path.write_text(json.dumps(document))
    return Plan.load(path)


def edited(document: Document, way: Way, value: Any) -> Document:
    made = copy.deepcopy(document)
    at: Any = made
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = value
    return made


def test_the_plan_itself_is_good(document: Document, tmp_path: Path) -> None:
    assert load(tmp_path, document).to_json() == json.dumps(document, indent=2) + "\n"


def interleaved(document: Document, pp: int, microbatches: int) -> Document:
    """The sample's four stages as two chunks of two ranks."""
    mesh = {**document["mesh"], "pp": pp, "dp": 1}
    return {
        **document,
        **{"mesh": mesh, "cluster": "", "schedule": "interleaved", "chunks": 4 // pp},
        **{"microbatches": microbatches, "global_batch": microbatches * document["microbatch"]},
        "predicted": {},
    }


def test_interleaved_plans_are_read_and_counted(document: Document, tmp_path: Path) -> None:
    plan = load(tmp_path, interleaved(document, 2, 8))
    assert [list(plan.stage_indexes(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    wrong = {
        "mesh.pp is 2 x chunks 2 = 4, but there are 3 stages": {"stages": document["stages"][:-1]},
        "entries for 2 pp ranks": {"predicted": {"memory_per_stage": [{}] * 4}},
        "stage_seconds has 2 entries for 4 stages": {"predicted": {"stage_seconds": [{}] * 2}},
    }
    for message, change in wrong.items():
        with pytest.raises(PlanError, match=message):
            load(tmp_path, {**interleaved(document, 2, 8), **change})
    with pytest.raises(PlanError, match="5 micro-batches do not divide into 2 rounds"):
        load(tmp_path, interleaved(document, 2, 5))
    with pytest.raises(PlanError, match="mesh.pp is 1"):
        load(tmp_path, interleaved(document, 1, 8))


def test_zero_bubble_plans_are_those_that_can_be_run(document: Document, tmp_path: Path) -> None:
    whole = [{"blocks": s["blocks"], "recompute": []} for s in document["stages"]]
    good = {**interleaved(document, 2, 8), "schedule": "zero-bubble", "zero": 0, "stages": whole}
    assert load(tmp_path, good).schedule == "zero-bubble"
    again = [{**whole[0], "recompute": whole[0]["blocks"]}, *whole[1:]]
    mesh = {**good["mesh"], "dp": 2, "ep": 2}
    wrong = {
        "'zero-bubble', but ZeRO-2": {"zero": 2},
        "'zero-bubble', but ZeRO-3": {"zero": 3},
        "'zero-bubble', but a recomputed block": {"stages": again},
        "'zero-bubble', but experts that ep splits": {"mesh": mesh, "global_batch": 16},
        "'zbv' with chunks 3": {"schedule": "zbv", "chunks": 3},
        "'zero-bubble', but 5 micro-batches do not divide": {"microbatches": 5, "global_batch": 5},
    }
    for message, change in wrong.items():
        made = {**good, **change}
        rows = made["microbatches"] * made["microbatch"] * made["mesh"]["dp"]
        with pytest.raises(PlanError, match=message):
            load(tmp_path, {**made, "global_batch": rows})


def test_a_block_is_recomputed_whole_or_in_part(document: Document, tmp_path: Path) -> None:
    stage = {**document["stages"][0], "recompute": [], "selective": {"embed": "set 1"}}
    stages = [stage, *document["stages"][1:]]
    good = {
        **document,
        "stages": stages,
        "reruns": {"embed": {"set 1": ["mul", "all_gather of x"]}},
    }
    plan = load(tmp_path, good)
    assert plan.stages[0].selective == {"embed": "set 1"}
    assert plan.reruns == {"embed": {"set 1": ("mul", "all_gather of x")}}
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    both = {**good, "stages": [{**stage, "recompute": ["embed"]}, *stages[1:]]}
    with pytest.raises(PlanError, match="'embed', which `recompute` names too"):
        load(tmp_path, both)


def hybrid(document: Document, zero: int, **degrees: int) -> Document:
    mesh = {**document["mesh"], "dp": 8, "pp": 1, **degrees}
    whole = [{"blocks": [b for s in document["stages"] for b in s["blocks"]], "recompute": []}]
    count = document["global_batch"] // document["microbatch"] // 8
    named = {"mesh": mesh, "zero": zero, "microbatches": count, "cluster": "made up"}
    return {**document, **named, "stages": whole, "predicted": {}}


def test_hybrid_sharding_is_read_where_there_is_something_to_shard(
    document: Document, tmp_path: Path
) -> None:
    plan = load(tmp_path, hybrid(document, 3, dp_replicate=2))
    assert plan.mesh.dp_shard == 4 and plan.to_dict()["mesh"]["dp_replicate"] == 2
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    assert "dp_replicate" not in load(tmp_path, hybrid(document, 3)).to_dict()["mesh"]
    for zero, degrees, message in (
        (0, {"dp_replicate": 2}, "dp_replicate is 2, but zero is 0"),
        (3, {"dp_replicate": 8}, "into groups of 2 or more"),
    ):
        with pytest.raises(PlanError, match=message):
            load(tmp_path, hybrid(document, zero, **degrees))


CONTRADICTIONS: list[tuple[Way, Callable[[Any], Any], str]] = [
    (("mesh", "tp"), lambda v: v * 2, "ranks, but cluster 'h100:"),
    (("mesh", "dp"), lambda v: v + 1, "but the global batch is"),
    (("microbatches",), lambda v: v + 1, "but the global batch is"),
    (("microbatch",), lambda v: v * 2, "but the global batch is"),
    (("sizes", "batch"), lambda v: v + 1, "sizes.batch is 2, the microbatch is 1"),
    (("stages",), lambda v: v[:-1], "but there are 3 stages"),
    (("stages", 0, "blocks"), lambda v: [], r"stages\[0\].blocks is empty"),
    (("stages", 0, "blocks"), lambda v: v[:-1], "is in no stage"),
    (("stages", 1, "blocks"), lambda v: [*v, "embed"], "'embed' is in them 2 times"),
    (("stages", 1, "blocks"), lambda v: [*v, "extra"], "'extra' is in 0 of the kinds"),
    (("stages", 1, "blocks"), lambda v: v[::-1], "are out of order"),
    (("stages", 1, "recompute"), lambda v: ["embed"], "'embed', which that stage does not hold"),
    (("stages", 0, "recompute"), lambda v: ["embed"] * 2, "a block twice"),
    (("stages", 0, "selective"), lambda v: {"head": "set"}, "'head', which that stage does not"),
    (
        ("stages", 0, "selective"),
        lambda v: {"embed": "a"},
        r"'a', which is no set of reruns\['embed'",
    ),
    (("reruns",), lambda v: {"tail": {}}, "reruns name 'tail', which is no kind"),
    (("reruns",), lambda v: {"embed": {"full": []}}, "a set 'full', which means whole blocks"),
    (("reruns",), lambda v: {"embed": {"set": "mul"}}, r"reruns.embed.set is 'mul'"),
    (("kinds", "embed"), lambda v: ["head"], "starts with 'head'"),
    (("kinds", "embed"), lambda v: [], "starts with nothing"),
    (("placements", "tail"), lambda v: {}, "'tail', which is no kind"),
    (("predicted", "memory_per_stage"), lambda v: v[:-1], "3 entries for 4 stages"),
    (("chunks",), lambda v: 2, "schedule is '1f1b' with chunks 2"),
    (("chunks",), lambda v: 0, "chunks is 0"),
    (("schedule",), lambda v: "interleaved", "schedule is 'interleaved' with chunks 1"),
    (("zero",), lambda v: 7, "zero is 7"),
    (("mesh", "dp_replicate"), lambda v: 0, "mesh.dp_replicate is 0"),
    (("mesh", "dp_replicate"), lambda v: 3, "dp_replicate is 3, which does not divide the"),
    (("boundary",), lambda v: "foo", "boundary is 'foo'"),
]


@pytest.mark.parametrize(("way", "change", "message"), CONTRADICTIONS)
def test_contradictions(
    document: Document, tmp_path: Path, way: Way, change: Callable[[Any], Any], message: str
) -> None:
    at: Any = document
    for key in way:
        at = at.get(key) if isinstance(at, dict) else at[key]
    with pytest.raises(PlanError, match=message) as info:
        load(tmp_path, edited(document, way, change(at)))
    assert "edited.json: " in info.value.message and info.value.next_step


def ways(value: Any, way: Way = ()) -> Iterator[Way]:
    """The way to every value of the document, leaves and nests."""
    if way:
        yield way
    if isinstance(value, dict):
        # Of many ops that are alike, the first and the last.
        keys = list(value)
        for key in keys if way != ("placements", "model.layers.0") else (keys[0], keys[-1]):
            yield from ways(value[key], (*way, key))
    if isinstance(value, list):
        for index in range(len(value))[:1]:
            yield from ways(value[index], (*way, index))


WRONG = [
    None, True, "text", "", 0, -1, 3, 10**30, 10**400, 0.5, -0.5, 1e300, float("nan"),
    float("inf"), [], [None], [[]], {}, {"a": None}, {"": {"": ""}},
]  # fmt: skip


def test_no_edit_gives_a_traceback(document: Document, tmp_path: Path) -> None:
    good = Plan.from_dict(document)
    console = Console(file=(tmp_path / "out.txt").open("w"))
    refused = accepted = 0
    for way in ways(document):
        at: Any = document
        for key in way[:-1]:
            at = at[key]
        without = copy.deepcopy(at)
        del without[way[-1]]
        edits = [edited(document, way, value) for value in WRONG]
        edits.append(edited(document, way[:-1], without) if way[:-1] else without)
        if isinstance(at, dict):
            edits.append(edited(document, (*way[:-1], "an extra one"), 1))
        for edit in edits:
            try:
                plan = load(tmp_path, edit)
            except PlanError as error:
                assert error.next_step, error
                refused += 1
                continue
            accepted += 1
            diff(plan, good)
            explain(plan)
            if accepted % 4 == 0:  # slow, and reads what the other two read
                console.print(show(plan))
    assert refused > 1000 and accepted > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero": 2}, "keep_gathered names .* zero is 2"),
        ({"mesh": {"pp": 4, "dp": 1, "tp": 8}}, "there are 1 replicas"),
        ({"named": ["nobody"]}, "keep_gathered names 'nobody', which that stage does not hold"),
        ({"named": "twice"}, "keep_gathered names a block twice"),
    ],
)
def test_kept_blocks_that_can_not_be(
    document: Document, tmp_path: Path, change: Document, message: str
) -> None:
    own = document["stages"][1]["blocks"][0]
    named = {"twice": [own, own]}.get(str(change.get("named")), change.get("named", [own]))
    edit = {k: v for k, v in change.items() if k != "named"}
    mesh = edit.get("mesh", {"pp": 4, "dp": 2, "tp": 1})
    made = {**document, "zero": 3, "mesh": mesh, "cluster": "", "predicted": {}, **edit}
    made["global_batch"] = mesh["dp"] * made["microbatch"] * made["microbatches"]
    made = edited(made, ("stages", 1, "keep_gathered"), named)
    with pytest.raises(PlanError, match=message):
        load(tmp_path, made)


def test_chunks_are_not_kept(document: Document, tmp_path: Path) -> None:
    made = {**interleaved(document, 2, 4), "zero": 3, "mesh": {"pp": 2, "dp": 2, "tp": 1}}
    made["global_batch"] = 2 * made["microbatch"] * made["microbatches"]
    made = edited(made, ("stages", 0, "keep_gathered"), made["stages"][0]["blocks"])
    with pytest.raises(PlanError, match="'interleaved' with 2 chunks"):
        load(tmp_path, made)
