"""Where pipeline stages are nearer to each other than replicas, a plan says so."""

from __future__ import annotations

from dataclasses import replace

from autopar.mesh import ORDERS, Mesh
from autopar.report.facts import mesh_text
from autopar.report.limits import limits
from autopar.report.order_words import order_sentence
from tests.report.sample import make_plan


def test_stages_inside_are_told_with_their_distances() -> None:
    inside = replace(make_plan(), mesh=Mesh(pp=2, dp=4, tp=2, order=ORDERS[1]))
    told = order_sentence(inside)
    assert "from a stage to the next it is 2 ranks, from a replica to the next 4" in told
    assert told in limits(inside)
    assert mesh_text(inside.mesh.to_dict()) == str(inside.mesh) == "dp4 pp2 tp2"


def test_the_usual_order_is_not_told() -> None:
    usual = replace(make_plan(), mesh=Mesh(pp=2, dp=4, tp=2))
    assert order_sentence(usual) == ""
    assert mesh_text(usual.mesh.to_dict()) == str(usual.mesh) == "pp2 dp4 tp2"
