"""Devices and process groups are bound last."""

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
    over_dp = graph.call_function(torch.ops.autopar.batch_mean.default, (total, [0], 2, "dp"))
    added = graph.call_function(torch.ops.aten.add.Tensor, (over_dp, steps))
    graph.output(
        (graph.call_function(torch.ops.aten.mul.Tensor, (added, graph.get_attr("table"))),)
    )
    module = fx.GraphModule(root, graph)
    block = BlockProgram("b", module, (), (), ("x",), ("y",))
    stage = StageProgram(0, 1, [block, block], {}, (), (), ())
    place_on_device(stage, torch.device("cpu"), {"tp": "17", "dp": "3"})
    assert steps.kwargs["device"] == torch.device("cpu") and moved.args[1] == torch.device("cpu")
    assert total.args[1] == "17" and over_dp.args[3] == "3"
    assert "'tp'" not in module.code and "'17'" in module.code
