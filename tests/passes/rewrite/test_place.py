"""Placing: the plan's strategies on the nodes; what does not fit is refused."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.rewrite.cut_blocks import CutBlocks
from autopar.passes.rewrite.place import Place, place, relative
from tests.passes import toys

KIND = "layers.0"


def placed(chosen: dict[str, str], boundary: str = "R", ranks: int = 2):  # type: ignore[no-untyped-def]
    graph, slots = toys.block("mlp", KIND)
    place(KIND, graph, slots, chosen, toys.placement(boundary), ranks)
    return {n.name: n for n in graph.graph.nodes}


def test_placements_of_parameters_values_and_ops() -> None:
    nodes = placed(toys.MEGATRON)
    shown = {name: str(n.meta["placement"]) for name, n in nodes.items() if n.op != "output"}
    assert shown == {
        "p_layers_0_norm_weight": "R",
        "p_layers_0_norm_bias": "R",
        "p_layers_0_up_weight": "S(0)",
        "p_layers_0_up_bias": "S(0)",
        "p_layers_0_down_weight": "S(1)",
        "p_layers_0_down_bias": "R",
        "embedding": "R",
        "layer_norm": "R",
        "linear": "S(2)",
        "gelu": "S(2)",
        "linear_1": "P",
        "add": "R",
    }
    assert nodes["linear"].meta["strategy"].name == "shard n"
    tokens = toys.BATCH * toys.SEQUENCE
    assert nodes["linear"].meta["flops"] == 2 * tokens * toys.WIDTH * 4 * toys.WIDTH / 2


def test_values_arrive_in_the_boundary_placement() -> None:
    nodes = placed({"add": "shard d1"}, boundary="S(1)")
    assert str(nodes["embedding"].meta["placement"]) == "S(1)"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"linear": "shard q"}, r"op 'linear': strategy 'shard q' is not legal over 2 ranks"),
        ({"linear.7": "shard n"}, "block 'layers.0' has no op 'linear.7'"),
        ({"parameter up.wait": "R"}, "has no op 'parameter up.wait'"),
        (
            {"parameter up.weight": "S(2)"},
            r"'parameter up.weight' of shape \(64, 16\) can't be S\(2\)",
        ),
        ({"parameter up.weight": "P"}, "can't be P over 2 ranks"),
        ({"parameter up.weight": "X"}, "unknown placement 'X'"),
    ],
)
def test_what_does_not_fit_is_named(chosen: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message) as info:
        placed(chosen)
    assert info.value.next_step


def test_a_degree_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match="over 5 ranks"):
        placed({"parameter up.weight": "S(0)"}, ranks=5)
    with pytest.raises(PlanError, match="boundary value embedding"):
        placed({}, boundary="S(1)", ranks=3)


def test_the_legal_strategies_are_listed() -> None:
    with pytest.raises(PlanError) as info:
        placed({"gelu": "shard"})
    assert "'shard d2'" in info.value.next_step


def test_without_tensor_parallelism_the_plans_placements_are_not_read() -> None:
    plan = toys.plan("mlp", mesh=Mesh(tp=1), placements={KIND: {"nonsense": "shard x"}})
    parts = Place().run(CutBlocks().run(toys.start("mlp", plan)))
    nodes = [n for n in parts.graphs[KIND].graph.nodes if n.op == "call_function"]
    assert {n.meta["strategy"].name for n in nodes} == {"replicate"}


def test_relative_names() -> None:
    assert relative("layers.0.up.weight", "layers.0") == "up.weight"
    assert relative("embed.weight", "layers.0") == "embed.weight"
