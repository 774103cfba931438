"""Bind a stage's graphs to a device and to the process groups of the axes tp, cp and dp.

arange(8192, device=meta)             ->   arange(8192, device=cuda:0)
autopar.all_reduce(h, 'tp')           ->   autopar.all_reduce(h, '5')
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.stage_program import StageProgram


def place_on_device(stage: StageProgram, device: torch.device, groups: Mapping[str, str]) -> None:
    """Edit the graphs of a stage in place. `groups`: axis -> name of its process group."""
    graphs = [b.graph for b in stage.blocks] + [stage.shared, stage.count]
    for graph in {id(g): g for g in graphs if g is not None}.values():
        for node in _calls(graph):
            if isinstance(node.kwargs.get("device"), torch.device):
                node.update_kwarg("device", device)
            for index, argument in enumerate(node.args):
                if isinstance(argument, torch.device):
                    node.update_arg(index, device)
                elif isinstance(argument, str) and argument in groups:
                    node.update_arg(index, groups[argument])
        graph.recompile()
        graph.to(device)


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "call_function"]
