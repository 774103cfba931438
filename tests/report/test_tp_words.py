"""Why tp stays in the node or not, in words."""

from __future__ import annotations

from dataclasses import replace

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.tp_words import tp_sentence
from tests.report.sample import make_plan

NEAR = {"name": "nvlink", "ranks": 8, "bytes_per_second": 400e9}
FAR = {"name": "network", "ranks": 64, "bytes_per_second": 50e9}


def with_tp(tp: int, *links: dict[str, object], **other: object) -> Plan:
    plan = make_plan()
    known = {**plan.predicted, "step_seconds": 4.0, "tp_links": links, "neighbours": [other]}
    known["alternatives"] = ()
    return replace(plan, mesh=Mesh(pp=2, dp=2, tp=tp), predicted=known)


def test_inside_a_node() -> None:
    text = tp_sentence(with_tp(4, NEAR, FAR, change="TP 8", fits=True, step_seconds=5.0))
    assert "stays among the 8 ranks of a node (nvlink 400 GB/s)" in text
    assert "across nodes (network 50 GB/s) large messages take 8.0× as long" in text
    assert text.endswith("TP 8: at best 5.00 s, 25.0 % slower.")


def test_over_nodes() -> None:
    text = tp_sentence(with_tp(16, NEAR, FAR, change="TP 8", fits=False))
    assert "TP spans nodes of 8 ranks" in text and "8.0× as long" in text
    assert text.endswith("TP 8 does not fit in memory.")


def test_the_fastest_plan_of_the_degree_is_told() -> None:
    plan = with_tp(4, NEAR, FAR, change="TP 8", fits=True, step_seconds=5.0)
    meshes = [{"mesh": "pp1 dp2 tp8", "step_seconds": 4.4}, {"mesh": "pp1 dp1 tp16", "fits": False}]
    plan = replace(plan, predicted={**plan.predicted, "alternatives": meshes})
    assert tp_sentence(plan).endswith("TP 8: at best 4.40 s, 10.0 % slower.")


def test_why_there_is_no_wider_one() -> None:
    why = "no matrix product of the model splits over 2 ranks"
    text = tp_sentence(with_tp(1, NEAR, FAR, change="TP 2", why=why))
    assert text == f"TP is 1: no layer is split. TP 2: {why}."


def test_without_tp_and_on_one_kind_of_links() -> None:
    text = tp_sentence(with_tp(1, NEAR, FAR, change="TP 2", fits=True, step_seconds=4.4))
    assert text == "TP is 1: no layer is split. TP 2: at best 4.40 s, 10.0 % slower."
    assert "one kind of links" in tp_sentence(with_tp(2, NEAR))


def test_where_links_are_not_known() -> None:
    assert tp_sentence(with_tp(4)) == ""
