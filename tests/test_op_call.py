"""Calls with bound sizes: what rules and prices look at."""

from __future__ import annotations

import torch

from autopar.op_call import STATIC, Bindings, Operand, copies_memory, op_call, types_of
from tests.passes import toys


def node_of(name: str, node: str):  # type: ignore[no-untyped-def]
    return next(n for n in toys.simplified(name).graph.nodes if n.name == node)


def bound(**sizes: int) -> Bindings:
    return Bindings(toys.simplified("mlp").symbols, sizes)


def test_symbolic_sizes_are_bound() -> None:
    bindings = bound(batch=3, sequence=5)
    call = op_call(node_of("mlp", "linear"), bindings)
    assert [t.shape for t in call.types] == [(3, 5, 16), (64, 16), (64,)]
    assert call.result.shape == (3, 5, 64) and call.result.requires_grad
    assert call.operands == ("layer_norm", "p_layers_0_up_weight", "p_layers_0_up_bias")
    assert call.args == (Operand(0), Operand(1), Operand(2))
    assert (call.op_name, call.path) == ("linear", "layers.0.up")
    assert bindings.size(7) == 7 and bindings.size("x") == "x"


def test_integers_need_no_gradient() -> None:
    call = op_call(node_of("mlp", "embedding"), bound(batch=2, sequence=2))
    assert [t.requires_grad for t in call.types] == [True, False]
    assert call.types[1].dtype is torch.int64


def test_arguments_by_position_or_keyword() -> None:
    call = op_call(node_of("mlp", "layer_norm"), bound(batch=2, sequence=2))
    assert call.argument(1, "normalized_shape") == [16]
    assert call.argument(9, "missing", 3) == 3
    attention = op_call(
        node_of("llama", "scaled_dot_product_attention"),
        Bindings(toys.simplified("llama").symbols, {"batch": 2, "sequence": 4}),
    )
    assert attention.argument(5, "is_causal") is True and attention.argument(6, "scale") > 0


def graph_of(target, *args):  # type: ignore[no-untyped-def]
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 6, device="meta")
    node = graph.call_function(target, tuple(x if a == "x" else a for a in args))
    node.meta["val"] = target(*[x.meta["val"] if a == "x" else a for a in args])
    return x, node


def test_an_operand_that_occurs_twice_is_one() -> None:
    _, node = graph_of(torch.ops.aten.mul.Tensor, "x", "x")
    call = op_call(node, STATIC)
    assert call.args == (Operand(0), Operand(0)) and len(call.types) == 1


def test_several_results() -> None:
    _, node = graph_of(torch.ops.aten.split.Tensor, "x", 4, 1)
    assert [t.shape for t in types_of(node, STATIC)] == [(4, 4), (4, 2)]


def test_reshape_moves_memory_only_when_it_is_strided() -> None:
    x, node = graph_of(torch.ops.aten.reshape.default, "x", [24])
    assert not copies_memory(node, STATIC)
    x.meta["val"] = torch.empty(6, 4, device="meta").t()
    assert copies_memory(node, STATIC)
    node.meta["copies"] = False  # decided before: it stays
    assert not copies_memory(node, STATIC)
    _, clone = graph_of(torch.ops.aten.clone.default, "x")
    assert copies_memory(clone, STATIC)
