"""Late graphs run as their graph stands at the call, however they got there."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import fx

from autopar.late_graph import LateGraphModule


def late() -> LateGraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (value, 1.0)),))
    return LateGraphModule(torch.nn.Module(), graph)


def double_the_constant(module: fx.GraphModule) -> None:
    (node,) = module.graph.find_nodes(op="call_function", target=torch.add)
    node.args = (node.args[0], 2 * node.args[1])
    module.recompile()


def test_nothing_is_written_before_the_first_call() -> None:
    module = late()
    assert "_code" not in vars(module)
    assert module(torch.zeros(1))[0] == 1
    assert "_code" in vars(module)


def test_a_change_holds_from_the_next_call_on() -> None:
    module = late()
    for constant in (2, 4):
        double_the_constant(module)
        double_the_constant(late())  # another instance has a forward of its own
        assert module(torch.zeros(1))[0] == constant
        assert module(torch.zeros(1))[0] == constant
    assert "4.0" in module.code
    double_the_constant(module)
    assert "8.0" in module.code and "8.0" in str(module)


def test_hooks_run_once_for_each_call() -> None:
    module, seen = late(), []
    module.register_forward_hook(lambda *given: seen.append(given))
    module(torch.zeros(1))
    module(torch.zeros(1))
    assert len(seen) == 2


def test_copies_and_pickles_of_a_module_never_called() -> None:
    for made in (copy.deepcopy(late()), pickle.loads(pickle.dumps(late()))):
        assert isinstance(made, LateGraphModule)
        double_the_constant(made)
        assert made(torch.zeros(1))[0] == 2
