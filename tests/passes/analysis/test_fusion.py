"""Which ops torch.compile would run as one kernel: checked against Inductor's own count."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autopar.op_call import Bindings, Fusion
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.analysis.fusion import annotate_fusion, fusions
from autopar.passes.analysis.roofline import roofline
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import cut_block
from tests.passes import toys


class Chain(nn.Module):
    """`between` is computed between two products."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.between(self.first(x)))
        return result.sum()


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def around_a_product(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y * ((y @ y.transpose(-1, -2)) @ y)


BETWEEN = {
    "gelu": F.gelu,
    "norm": norm,
    "two norms": lambda x: norm(norm(x) * 2 + x),
    "through a view": lambda x: F.silu(x.view(-1, 4, 8).transpose(1, 2).exp()).reshape(-1, 32),
    "product between": around_a_product,
    "softmax": lambda x: (x * 3).softmax(-1) + 1,
}


def graph_of(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    program = capture(model, {"x": x})
    chain = analyse_blocks(program).chain
    block = next(b for b in chain if any("linear" in n.name for n in b.nodes))
    return cut_block(program, block, Bindings(program.symbols, program.sizes))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BETWEEN)
def test_as_many_kernels_as_inductor_makes(name: str) -> None:
    """Inductor's code for the forward calls as many fused functions (its final sum left out here
    and there). On a CPU it joins neighbours without an edge too; there are none here."""
    from torch._inductor.utils import run_and_get_code

    model, x = Chain(BETWEEN[name]), torch.randn(16, 32)
    found = fusions(graph_of(model, x))
    own = [f for node, f in found.items() if "sum" not in node.name]
    torch.compiler.reset()
    compiled = torch.compile(lambda x: model.last(model.between(model.first(x))))
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(compiled, x)
    assert sum(f.starts for f in own) == len(set(re.findall(r"(cpp_fused_\w+) = ", code)))


def test_a_norm_reads_its_input_once_and_writes_once() -> None:
    graph, _ = toys.block("llama", "model.layers.0")
    found = {node.name: fusion for node, fusion in fusions(graph).items()}
    assert found["pow_1"] == Fusion(reads=(0,), writes=False, starts=True)
    assert found["mean"] == found["rsqrt"] == found["mul_3"] == Fusion((), False, False)
    assert found["mul_4"].writes and len(found["mul_4"].reads) == 1  # the weight
    # The residual sum goes on to the norm after it and to the next sum.
    assert found["add_6"] == Fusion(reads=(0, 1), writes=True, starts=True)
    assert found["pow_2"] == Fusion((), False, False)
    assert "linear" not in found and "view" not in found


def test_a_value_between_levels_is_kept() -> None:
    graph = graph_of(Chain(around_a_product), torch.randn(16, 32))
    kernels = {n.name: f for n, f in fusions(graph).items()}
    assert kernels["exp"].writes and kernels["exp"].starts
    # The last step waits for the products: it reads both.
    assert kernels["mul"] == Fusion(reads=(0, 1), writes=True, starts=True)


def test_annotated_graphs_are_cheaper_under_compile_only() -> None:
    plain, marked = (
        toys.block("llama", "model.layers.0")[0],
        toys.block("llama", "model.layers.0")[0],
    )
    text = marked.code
    annotate_fusion(marked)
    assert marked.code == text
    axis = toys.axis()
    compiled = type(axis)(axis.ranks, axis.stride, axis.cluster.with_execution("compile"))

    def seconds(graph: fx.GraphModule, on: Any) -> float:
        return sum(p.cost.forward_seconds + p.cost.backward_seconds for p in roofline(graph, on))

    assert seconds(marked, axis) == seconds(plain, axis) == seconds(plain, compiled)
    assert seconds(marked, compiled) < 0.7 * seconds(plain, compiled)
