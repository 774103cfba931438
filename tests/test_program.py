"""The program: typed access to what nodes know, and fingerprints."""

from __future__ import annotations

from types import FunctionType

import torch

from autopar.passes.capture import capture
from autopar.program import TensorType, module_path, module_paths, tensors_of, user_line
from tests.passes import toys


def test_types() -> None:
    kind = TensorType((2, 3), torch.bfloat16)
    assert (kind.numel, kind.nbytes) == (6, 12)
    assert TensorType((), torch.float32).numel == 1


def test_inputs_by_name_and_kind() -> None:
    program = toys.captured("mlp")
    assert program.input("ids").kind == "input"
    assert [i.target for i in program.of_kind("parameter")][:2] == [
        "embed.weight",
        "layers.0.norm.weight",
    ]
    assert not program.is_static


def test_nodes_know_their_module_and_line() -> None:
    nodes = {n.name: n for n in toys.captured("mlp").graph.nodes}
    assert module_path(nodes["linear"]) == "layers.0.up"
    assert list(module_paths(nodes["linear"]))[-2:] == ["layers.0", "layers.0.up"]
    assert module_path(nodes["cross_entropy_loss"]) == "" == module_path(nodes["ids"])
    # The user's line, not the one inside torch's own module.
    assert "toys.py" in user_line(nodes["linear"]) and user_line(nodes["ids"]) == ""


def test_tensors_of_values() -> None:
    x = torch.ones(1)
    assert tensors_of(x) == [x] and tensors_of((x, 3, x)) == [x, x] and tensors_of(3) == []


def test_fingerprints_tell_changes_of_the_graph() -> None:
    program = toys.captured("mlp")
    print_ = program.fingerprint()
    assert print_ == toys.captured("mlp").fingerprint() and len(print_) == 16
    gelu = next(n for n in program.graph.nodes if n.name == "gelu")
    gelu.target = torch.ops.aten.silu.default
    assert program.fingerprint() != print_
    assert toys.captured("tied").fingerprint() != print_


def test_fingerprints_hold_no_addresses() -> None:
    def copy_of(function: FunctionType) -> FunctionType:
        """Elsewhere in memory, as in another process."""
        return FunctionType(function.__code__, function.__globals__, function.__name__)

    found = set()
    for _ in range(2):
        program = toys.captured("mlp")
        node = next(n for n in program.graph.nodes if n.op == "call_function")
        node.target = copy_of(torch.sym_float)
        found.add(program.fingerprint())
    assert len(found) == 1
    node.target = torch.sym_int
    assert program.fingerprint() not in found


def test_fingerprints_tell_what_is_trained() -> None:
    model, inputs = toys.model("mlp")
    model.embed.weight.requires_grad_(False)
    assert capture(model, inputs).fingerprint() != toys.captured("mlp").fingerprint()


def test_fingerprints_tell_arguments_given_by_keyword() -> None:
    program = toys.captured("mlp")
    before = program.fingerprint()
    gelu = next(n for n in program.graph.nodes if n.name == "gelu")
    gelu.kwargs = {"approximate": "tanh"}
    assert program.fingerprint() != before
