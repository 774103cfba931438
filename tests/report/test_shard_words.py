"""How hybrid sharding is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.diff import diff
from autopar.report.facts import mesh_text
from autopar.report.page import render
from autopar.report.shard_words import shard_sentence, zero_text
from autopar.report.text import explain
from tests.report import sample
from tests.report.test_text import printed


def hybrid(zero: int, groups: int = 4) -> Plan:
    plan = sample.make_plan(mesh=Mesh(4, 8, 1))
    return replace(plan, mesh=Mesh(4, 8, 1, dp_replicate=groups), zero=zero)


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (1, "gathered once a step and gradients scattered once a step"),
        (2, "gathered once a step and gradients scattered for every micro-batch"),
        (3, "gathered for every micro-batch and gradients scattered for every micro-batch"),
    ],
)
def test_what_travels_when(zero: int, words: str) -> None:
    told = shard_sentence(hybrid(zero))
    assert "each of 4 groups of 2 neighbours among the 8 replicas" in told and words in told
    assert told in explain(hybrid(zero)) and "shard2" in explain(hybrid(zero))
    shown = " ".join(printed(hybrid(zero), width=140).split())
    assert f"ZeRO level {zero} in 4 groups of 2 replicas" in shown
    assert "ZeRO shards over <b>2</b> replicas" in render(hybrid(zero), (), None)


def test_without_groups_nothing_is_said_of_them() -> None:
    plan = hybrid(1, groups=1)
    assert shard_sentence(plan) == "" and zero_text(plan) == "level 1"
    assert zero_text(replace(plan, mesh=Mesh(4, 1, 8))) == "level 1 (one replica)"
    assert "groups" not in explain(plan)


def test_two_plans_side_by_side() -> None:
    told = diff(hybrid(3), hybrid(3, groups=1))
    assert "level 3 in 4 groups of 2 replicas" in told and "pp4 dp8 tp1 shard2" in told


def test_the_mesh_of_another_plan() -> None:
    assert mesh_text(Mesh(2, 8, 1, 2, dp_replicate=4).to_dict()) == "pp2 dp8 tp1 cp2 shard4"
    assert mesh_text(Mesh(2, 8, 1).to_dict()) == "pp2 dp8 tp1"
