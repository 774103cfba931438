"""Devices and the process group are bound last."""

from __future__ import annotations

import torch
from torch import fx

import autopar.runtime.collectives  # noqa: F401 - registers the ops
from autopar.passes.rewrite.place_on_device import place_on_device
from autopar.stage_program import BlockProgram, StageProgram


def test_devices_groups_and_constants_are_bound() -> None:
    root = torch.nn.Module()
    root.register_buffer("table", torch.ones(4, device="cpu"), persistent=False)
    graph = fx.Graph()
    x = graph.placeholder("x")
    steps = graph.call_function(
        torch.ops.aten.arange.default, (4,), {"device": torch.device("meta")}
    )
    moved = graph.call_function(torch.ops.aten.to.device, (x, torch.device("meta"), torch.float32))
    total = graph.call_function(torch.ops.autopar.all_reduce.default, (moved, "tp"))
    added = graph.call_function(torch.ops.aten.add.Tensor, (total, steps))
    graph.output(
        (graph.call_function(torch.ops.aten.mul.Tensor, (added, graph.get_attr("table"))),)
    )
    module = fx.GraphModule(root, graph)
    block = BlockProgram("b", module, (), (), ("x",), ("y",))
    stage = StageProgram(0, 1, [block, block], {}, (), (), ())
    place_on_device(stage, torch.device("cpu"), "17")
    assert steps.kwargs["device"] == torch.device("cpu") and moved.args[1] == torch.device("cpu")
    assert total.args[1] == "17"
    assert "'tp'" not in module.code and "'17'" in module.code
