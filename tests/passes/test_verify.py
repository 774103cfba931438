"""`verify` refuses programs that would compute something else, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autopar.errors import PassError
from autopar.mesh import Mesh
from autopar.parts import Parts
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import back_pipeline
from autopar.passes.verify import verify
from autopar.placement import Partial, Shard
from autopar.plan_document import StagePlan
from autopar.reshard import reshard
from tests.passes import toys


def good() -> Parts:
    names = tuple(b.name for b in toys.blocks("mlp").chain)
    plan = toys.plan(
        "mlp",
        mesh=Mesh(tp=2, pp=2),
        placements={"layers.0": toys.MEGATRON},
        stages=(StagePlan(names[:2]), StagePlan(names[2:])),
    )
    return run_passes(toys.start("mlp", plan), back_pipeline(), verify=verify)[0]


def node(parts: Parts, name: str):  # type: ignore[no-untyped-def]
    return next(n for n in parts.graphs["layers.0"].graph.nodes if n.name == name)


def wrong_placement(parts: Parts) -> None:
    gelu = node(parts, "gelu")
    gelu.meta["placement"], gelu.meta["global_shape"] = Shard(1), (4, 16, 32)


def partial_read_as_whole(parts: Parts) -> None:
    node(parts, "layer_norm").meta["strategy"] = None
    node(parts, "layer_norm").meta["placement"] = Partial


def wrong_collective(parts: Parts) -> None:
    node(parts, "all_reduce_default").meta["reshard"] = reshard(Partial, Shard(1))


def skipped_collective(parts: Parts) -> None:
    reduce = next(n for n in parts.graphs["layers.0"].graph.nodes if "all_reduce" in n.name)
    reduce.replace_all_uses_with(reduce.args[0])


def partial_output(parts: Parts) -> None:
    node(parts, "add").meta["strategy"] = None
    node(parts, "add").meta["placement"] = Partial


def wrong_shape(parts: Parts) -> None:
    node(parts, "linear").meta["val"] = torch.empty(4, 8, 64, device="meta")


def lost_value(parts: Parts) -> None:
    parts.stages[1].receive = ()


def unmade_input(parts: Parts) -> None:
    parts.stages[0].blocks[1].inputs = ("nothing",)


def unheld_send(parts: Parts) -> None:
    parts.stages[0].blocks[1].outputs = ("other",)


def no_loss(parts: Parts) -> None:
    parts.stages[1].blocks[-1].outputs = ("other",)


def test_a_legal_program_passes() -> None:
    verify(good(), "mark-recompute")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_placement, r"reads gelu as S\(2\), it is S\(1\)"),
        (partial_read_as_whole, "copy_default reads layer_norm as R, it is P"),
        (wrong_collective, "all_reduce_default does not turn P into R"),
        (skipped_collective, r"add reads linear_1 as R, it is P"),
        (partial_output, "hands out add as P, not R"),
        (wrong_shape, r"linear is \(4, 8, 64\), should be \(4, 8, 32\)"),
        (lost_value, r"stage 1 receives \(\), the one before sends \('add',\)"),
        (unmade_input, "block layers.0 reads nothing, which nothing has made"),
        (unheld_send, "stage 0 sends add, which it does not have"),
        (no_loss, "the last stage does not compute the loss"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_a_broken_program_is_refused(spoil: Callable[[Parts], None], message: str) -> None:
    parts = good()
    spoil(parts)
    with pytest.raises(PassError, match="after mark-recompute: .*" + message):
        verify(parts, "mark-recompute")


def test_a_value_without_gradient_may_be_taken_as_either_whole_placement() -> None:
    parts = good()
    graph = parts.graphs["embed"]
    lookup = next(n for n in graph.graph.nodes if n.name == "embedding")
    lookup.meta["strategy"] = replace(
        lookup.meta["strategy"], operands=(lookup.args[0].meta["placement"], toys.placement("R*"))
    )
    verify(parts, "mark-recompute")
