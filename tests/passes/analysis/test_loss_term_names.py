"""Names of the terms of a sum, from the lines of the model's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.passes.analysis.loss_term_names import term_name

_aten: Any = torch.ops.aten


def traced(node: fx.Node, code: str, line: int = 1, file: str = "model.py") -> fx.Node:
    frame = f'  File "{file}", line {line}, in forward\n    {code}\n'
    node.meta["stack_trace"] = node.meta.get("stack_trace", "") + frame
    return node


def names(code: str, made: str, line: int, op: Any = _aten.add.Tensor) -> tuple[str, str]:
    """Of both operands of an op of line 1, the second of which was made by `line`."""
    graph = fx.Graph()
    first = traced(graph.call_function(_aten.sum.default, ()), "first = one(x)", 9)
    second = traced(graph.call_function(_aten.sum.default, ()), made, line)
    total = traced(graph.call_function(op, (first, second)), code)
    return term_name([(total, 0)], first), term_name([(total, 1)], second)


@pytest.mark.parametrize(
    "code",
    [
        "loss = first + 0.1 * norm(x)  # what is added",
        "first += 0.1 * norm(x)",
        "return first + 0.1 * norm(x)",
        "return Output(loss=first + 0.1 * norm(x), logits=logits)",
        "if train: loss = first + 0.1 * norm(x)",
        "a = 1; loss = first + 0.1 * norm(x)",
        "loss = torch.add(first, 0.1 * norm(x))",
    ],
)
def test_the_expression_of_the_line(code: str) -> None:
    assert names(code, code, 1) == ("one(x)", "0.1 * norm(x)")


def test_a_name_is_what_was_assigned_to_it() -> None:
    assert names("loss = first + aux", "aux = 0.1 * norm(x)", 2)[1] == "0.1 * norm(x)"
    line = "aux = 0.1 * norm(x); loss = first + aux"
    assert names(line, line, 1)[1] == "0.1 * norm(x)"
    assert names("loss = first - aux", "aux: Tensor = norm(x)", 2, _aten.sub.Tensor)[1] == "norm(x)"


def test_a_part_of_a_longer_statement() -> None:
    assert names("loss = (", "+ 0.1 * norm(x)", 2)[1] == "0.1 * norm(x)"
    assert names("first", "0.1 * norm(", 2)[1] == "0.1 * norm("


def test_each_step_of_a_loop_and_of_a_sum() -> None:
    for line, name in (
        ("for p in parts: total = total + norm(p)", "norm(p)"),
        ("total = sum(norm(p) for p in parts)", "norm(p)"),
        ("loss = loss + sum([norm(p) for p in parts])", "norm(p)"),
        ("total = sum(parts)", "sum(parts)"),
    ):
        graph = fx.Graph()
        terms = [traced(graph.call_function(_aten.sum.default, ()), line) for _ in range(2)]
        zero = traced(graph.call_function(_aten.add.Tensor, (terms[0], 0)), line)
        total = traced(graph.call_function(_aten.add.Tensor, (zero, terms[1])), line)
        path = [(total, 0), (zero, 0)]
        if line.startswith("loss"):
            loss = traced(graph.call_function(_aten.sum.default, ()), "loss = one(x)", 9)
            whole = traced(graph.call_function(_aten.add.Tensor, (loss, total)), line)
            path.insert(0, (whole, 1))
        assert term_name(path, terms[0]) == name
        assert term_name([*path[:-2], (total, 1)], terms[1]) == name


def test_calls_of_other_modules_are_of_the_line_that_called() -> None:
    graph = fx.Graph()
    loss = traced(graph.call_function(_aten.sum.default, ()), "loss = one(x)", 9)
    inner = traced(graph.call_function(_aten.sum.default, ()), "aux = self.balance(x)", 8)
    traced(inner, "return x.mean()", 30, "balance.py")
    total = traced(graph.call_function(_aten.add.Tensor, (loss, inner)), "loss = loss + aux")
    assert term_name([(total, 1)], inner) == "self.balance(x)"


def test_without_lines_the_op_itself() -> None:
    graph = fx.Graph()
    assert term_name([], graph.call_function(_aten.sum.default, (), name="mine")) == "mine"
