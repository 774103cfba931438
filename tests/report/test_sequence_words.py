"""How a plan with cp is told: a table of that axis, a line of decisions, names people know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.diff import diff
from autopar.report.placements import block_words
from autopar.report.sequence_words import inserted_words, on_cp_words, sequence_sentence
from autopar.report.text import explain
from tests.report import sample
from tests.report.test_text import in_part, printed

LAYER = "model.layers.0"
ATTENTION = "scaled_dot_product_attention"


def with_cp(attention: str = "shard q") -> Plan:
    chosen = {"linear": "shard b1", "mul": "shard d1", "view": "shard f0", ATTENTION: attention}
    mesh = Mesh(4, 1, 8, 2)
    return replace(sample.make_plan(mesh=Mesh(4, 2, 8)), mesh=mesh, cp_placements={LAYER: chosen})


def test_show_has_a_table_of_the_cp_axis() -> None:
    text = " ".join(printed(with_cp(), width=140).split())
    assert "on the tp axis" in text and "on the cp axis" in text
    assert "sequence-parallel linear" in text
    assert f"context-parallel: all-gather of keys and values {ATTENTION}" in text
    assert "4,096 of 8,192 positions on each cp rank; attention context-parallel" in text
    ulysses = " ".join(printed(with_cp("shard g"), width=140).split())
    assert f"head-parallel: all-to-all (Ulysses) {ATTENTION}" in ulysses


def test_without_cp_nothing_is_said_of_it() -> None:
    text = printed(sample.make_plan())
    assert "cp axis" not in text and "positions" not in text
    assert sequence_sentence(sample.make_plan()) == ""


def test_the_table_counts_blocks_and_leaves_out_renamings() -> None:
    (block,) = block_words(with_cp(), axis="cp")
    assert (block.name, block.rest) == (LAYER, "sharded along dim 1")
    assert [ops for _, ops in block.main] == ["linear", ATTENTION]
    assert block.count == len(with_cp().kinds[LAYER])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("shard q", "all-gather"),
        ("shard g", "from positions to heads"),
        ("shard h", "from positions to heads"),
        ("shard b", "from positions to samples"),
        ("replicate", "every rank computes all of it"),
        ("shard z", "as shard z"),
    ],
)
def test_explain_says_what_attention_does(strategy: str, words: str) -> None:
    told = sequence_sentence(with_cp(strategy))
    assert words in told and f"in {LAYER}" in told and told in explain(with_cp(strategy))
    assert on_cp_words(ATTENTION, strategy) != ""


def test_compare_tells_the_axis_and_how_attention_differs() -> None:
    text = diff(with_cp(), with_cp("shard g"))
    line = next(x for x in text.splitlines() if x.startswith("sequence"))
    assert "all-gather" in line and "Ulysses" in line
    row = next(x for x in text.splitlines() if ATTENTION in x)
    assert "on cp" in row and "all-gather of keys" in row and "Ulysses" in row
    other = diff(with_cp(), sample.make_plan())
    assert (
        next(x for x in other.splitlines() if x.startswith("sequence")).rstrip().endswith("whole")
    )


def test_compare_tells_products_and_attention_first() -> None:
    other = with_cp("shard g")
    chosen = {**other.cp_placements[LAYER], "linear": "replicate", "mul": "replicate"}
    lines = diff(with_cp(), replace(other, cp_placements={LAYER: chosen})).splitlines()
    at = [next(i for i, x in enumerate(lines) if f": {op} on cp" in x) for op in ("linear", "mul")]
    assert at[0] < at[1]


def test_what_the_rewrite_inserts_has_a_name_that_people_know() -> None:
    assert inserted_words("cp_slice") == inserted_words("cp_slice_pad") == "taking own positions"
    assert inserted_words("cp_all_gather") == "all-gather over cp"
    assert inserted_words("mul") == "mul"
    plan = in_part(sample.make_plan())
    sets = {"set 1": ("mul", "cp_slice", "cp_slice.1", "cp_all_gather of mul")}
    text = " ".join(printed(replace(plan, reruns={LAYER: sets}), width=160).split())
    assert "re-runs taking own positions ×2, mul, all-gather over cp" in text
    assert "cp_slice" not in text
