"""The parameter that holds gate and up becomes two operands, where halves can be told apart."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.capture import capture
from autopar.passes.rewrite.simplify import Simplify
from autopar.passes.rewrite.split_gate_and_up import SplitGateAndUp
from autopar.program import Program
from benchmarks.zoo.architecture import Toy
from benchmarks.zoo.verify import captured_error
from tests.passes.expert_toys import library


def before_and_after(kind: str) -> tuple[Program, Program]:
    model, example = library(kind)
    program = capture(model, example, dtype=torch.float32)
    before = Simplify().run(Parts(program, sizes=dict(program.sizes)))
    return before.program, SplitGateAndUp().run(before).program


def experts_of(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if getattr(n.target, "_opname", "") == "experts"]


def test_halves_become_two_operands() -> None:
    before, after = before_and_after("mixtral")
    for node in experts_of(after):
        up, gate = node.args[3], node.args[5]
        assert isinstance(up, fx.Node) and isinstance(gate, fx.Node)
        assert up.meta["val"].shape == gate.meta["val"].shape == (4, 32, 32)
        targets = [after.input(n.name).target for n in (gate, up)]
        assert [t.partition("[")[2] for t in targets] == [":, 0:32]", ":, 32:64]"]
    assert all(n.args[5] is None for n in experts_of(before))
    assert {i.target.partition("[")[0] for i in after.inputs} == {i.target for i in before.inputs}
    after.graph.lint()


def test_the_loss_is_the_same() -> None:
    torch.manual_seed(0)
    model, example = library("mixtral")
    program = capture(model, example, dtype=torch.float32)
    after = SplitGateAndUp().run(Parts(program, sizes=dict(program.sizes))).program
    assert captured_error(after, Toy(model, example)) <= 1e-5


def test_columns_in_pairs_stay_together() -> None:
    before, after = before_and_after("gpt_oss")
    assert after is before


@pytest.mark.parametrize("change", ["read twice", "marked"])
def test_what_is_no_clean_cut_is_left(change: str) -> None:
    from autopar.marks import REPLICATE

    before, _ = before_and_after("mixtral")
    for node in experts_of(before):
        if change == "marked":
            node.meta[REPLICATE] = True
        else:
            up = node.args[3]
            assert isinstance(up, fx.Node)
            with before.graph.inserting_before(before.graph.output_node()):
                before.graph.call_function(torch.ops.aten.sin.default, (up,))
    assert SplitGateAndUp().run(Parts(before, sizes=dict(before.sizes))).program is before
