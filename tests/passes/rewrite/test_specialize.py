"""Cutting with bound sizes: a static graph that computes the same."""

from __future__ import annotations

import torch
from torch.testing import FileCheck

from autopar.op_call import Bindings
from autopar.passes.rewrite.specialize import cut
from tests.passes import toys


def whole(batch: int, sequence: int = toys.SEQUENCE):  # type: ignore[no-untyped-def]
    program = toys.simplified("mlp")
    bindings = Bindings(program.symbols, {"batch": batch, "sequence": sequence})
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    inputs = program.graph.find_nodes(op="placeholder")
    outputs = [n for n in nodes if n.name in (program.loss, "view")]
    return program, cut(program, nodes, inputs, outputs, bindings)


def test_sizes_are_numbers_and_minus_one_is_written_out() -> None:
    _, graph = whole(2)
    FileCheck().check("view.default(linear_4, [16, 32])").check("view.default(labels, [16])").run(
        graph.code
    )
    assert all(
        isinstance(s, int)
        for n in graph.graph.nodes
        if n.op != "output"
        for s in n.meta["val"].shape
    )
    assert {n.meta["val"].device.type for n in graph.graph.nodes if n.op != "output"} == {"meta"}


def test_the_cut_graph_computes_the_same_for_any_batch() -> None:
    model, _ = toys.model("mlp")
    state = dict(model.named_parameters())
    for batch in (1, 3):
        program, graph = whole(batch)
        inputs = toys.batch(batch)
        values = [inputs[i.name] if i.kind == "input" else state[i.target] for i in program.inputs]
        _, loss = graph(*values)
        torch.testing.assert_close(loss, model(**inputs))


def test_names_paths_and_gradients_are_kept() -> None:
    program, graph = whole(2)
    before = {n.name: n for n in program.graph.nodes}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            assert node.meta["requires_grad"] == before[node.name].meta["requires_grad"]
            assert node.meta["nn_module_stack"] == before[node.name].meta["nn_module_stack"]


def test_moved_memory_is_noted() -> None:
    graph, _ = toys.block("llama", "model.layers.0")
    copies = {n.name: n.meta["copies"] for n in graph.graph.nodes if n.op == "call_function"}
    assert copies["contiguous"] or copies["reshape_1"]
    assert not copies["view"] and not copies["transpose"]


def test_the_program_is_not_changed() -> None:
    text = toys.simplified("mlp").graph_module.code
    whole(2)
    assert toys.simplified("mlp").graph_module.code == text
