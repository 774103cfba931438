"""Whether samples of a batch depend on each other before the loss: then parts can't be run alone.

The dim that holds the batch is followed through the rules of the ops: one that contracts, reduces
or needs it whole mixes samples. Ops without a rule are run on random values instead. Where a single
op mixes, its whole block may still keep samples apart (tokens sorted by expert, and sorted back):
that is asked by running the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.op_call import Bindings, OpCall, op_call
from autopar.passes.analysis.blocks import Blocks, analyse_blocks
from autopar.passes.analysis.loss_form import loss_tail
from autopar.passes.analysis.sample_probe import follow
from autopar.program import Program, tensors_of
from autopar.rules import rule_for
from autopar.rules.language import Rule

# Sizes at which ops are looked at: no other dim is likely to have them.
SAMPLES, TOKENS = 11, 14
# What these make is the same wherever it stands in the batch.
_EVEN = frozenset(
    ["full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty"]
    + ["zeros_like", "ones_like", "full_like", "empty_like"]
)


def coupling_op(program: Program) -> fx.Node | None:
    """The first op before the loss that mixes samples; None when all are kept apart.

    Raises nothing: an op that can be neither described nor run counts as mixing.
    """
    return _Walk(program).first()


class _Walk:
    """`at`: values that hold the batch -> the dim whose major part it is. `placed`: values made
    from nothing whose entries differ by their place in the batch (a range over it)."""

    def __init__(self, program: Program) -> None:
        sizes = dict(program.sizes)
        if "batch" in program.symbols:
            sizes["batch"] = SAMPLES
        if "sequence" in program.symbols:
            sizes["sequence"] = min(TOKENS, sizes["sequence"])
        self.program = program
        self.samples = sizes["batch"]
        self.bindings = Bindings(program.symbols, sizes)
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        inputs = {i.name for i in program.of_kind("input") if i.batch_dim == 0}
        self.at = {n: 0 for n in self.nodes if n.name in inputs}
        self.constant = _made_from_nothing(self.nodes)
        self.placed: set[fx.Node] = set()
        self._answers: dict[Any, int | None] = {}

    def first(self) -> fx.Node | None:
        tail = loss_tail(self.program)
        settled: set[fx.Node] = set()
        blocks: Blocks | None = None
        for node in self.nodes:
            if node.op != "call_function" or node in tail or node in settled:
                continue
            if not tensors_of(node.meta.get("val")):
                continue
            if self._passes(node):
                continue
            blocks = blocks or analyse_blocks(self.program)
            region = self._region(blocks, node, tail)
            if not self._kept_apart(region):
                return node
            settled |= set(region)
        return None

    def _passes(self, node: fx.Node) -> bool:
        """Whether a single op keeps samples apart; notes where its result holds the batch."""
        sources = node.all_input_nodes
        if any(n in self.at for n in sources) and not any(n in self.placed for n in sources):
            dim = self._dim(node)
            if dim is not None and dim >= 0:
                self.at[node] = dim
            return dim is not None
        own = self._dim_by_shape(node)
        if node not in self.constant:
            # A parameter that is repeated for each sample, or a value without samples.
            if own is not None:
                self.at[node] = own
            return not any(n in self.placed for n in sources)
        if own is None:
            return True
        even = str(getattr(node.target, "_opname", "")) in _EVEN
        unplaced = [n for n in sources if tensors_of(n.meta.get("val"))]
        if even or (unplaced and all(self._dim_by_shape(n) is None for n in unplaced)):
            self.at[node] = own
        else:
            self.placed.add(node)
        return True

    def _dim(self, node: fx.Node) -> int | None:
        """The batch's dim in the result, -1 where the result does not depend on it; None: mixed."""
        batched = {n: self.at[n] for n in node.all_input_nodes if n in self.at}
        call = self._call(node)
        rule = rule_for(call) if call is not None else None
        if call is not None and rule is not None:
            by_name = {n.name: d for n, d in batched.items()}
            found = _by_rule(rule, [by_name.get(name) for name in call.operands])
            if found != -1:
                return found
        key: Any = node.name
        if call is not None:
            key = (str(call.target), str((call.args, call.kwargs, call.types)), *batched.values())
        if key not in self._answers:
            dims = follow([node], batched, [node], self.bindings, self.samples)
            self._answers[key] = None if dims is None else dims.get(node, -1)
        return self._answers[key]

    def _call(self, node: fx.Node) -> OpCall | None:
        try:
            return op_call(node, self.bindings)
        except (AutoparError, IndexError):
            return None

    def _dim_by_shape(self, node: fx.Node) -> int | None:
        """The dim whose size is a multiple of the number of samples, by the symbol for it."""
        symbol = self.program.symbols.get("batch")
        for value in tensors_of(node.meta.get("val")) if symbol is not None else []:
            for dim, size in enumerate(value.shape):
                expr = size.node.expr if isinstance(size, torch.SymInt) else None
                if expr is not None and expr.has(symbol):
                    return dim
        return None

    def _region(self, blocks: Blocks, node: fx.Node, tail: set[fx.Node]) -> list[fx.Node]:
        """The block around a node, or the shared values, with all that is made from nothing: its
        true values count (a range over the batch)."""
        home = next((b.nodes for b in blocks.chain if node in b.nodes), blocks.shared)
        wanted = {n for n in home if n not in tail} | {node}
        for each in reversed(self.nodes):
            if each in wanted:
                wanted |= {s for s in each.all_input_nodes if s in self.constant}
        return [n for n in self.nodes if n in wanted]

    def _kept_apart(self, region: list[fx.Node]) -> bool:
        """Whether a region does, as a whole; notes where what others read of it holds the batch."""
        inside = set(region)
        results = [
            n
            for n in region
            if n not in self.constant
            and tensors_of(n.meta.get("val"))
            and any(u not in inside for u in n.users)
        ]
        dims = follow(region, self.at, results, self.bindings, self.samples)
        if dims is None:
            return False
        for node in inside - self.constant:
            self.at.pop(node, None)
        self.at |= dims
        return True


def _made_from_nothing(nodes: list[fx.Node]) -> set[fx.Node]:
    """Calls that no input, parameter or buffer goes into; sizes do not count."""
    found: set[fx.Node] = set()
    for node in nodes:
        tensors = [n for n in node.all_input_nodes if tensors_of(n.meta.get("val"))]
        if node.op == "call_function" and all(n in found for n in tensors):
            found.add(node)
    return found


def _by_rule(rule: Rule, dims: list[int | None]) -> int | None:
    """Dim of the batch in the result; -1 when it is lost from sight, None when samples mix."""
    factors = {
        operand[dim][0]
        for operand, dim in zip(rule.operands, dims, strict=True)
        if dim is not None and dim < len(operand) and operand[dim]
    }
    if len(factors) != 1:
        # Two factors: every sample of one operand meets every sample of the other.
        return None if factors else -1
    factor = factors.pop()
    if factor in rule.whole:
        return None
    for index, dim in enumerate(rule.results[0]):
        if dim and dim[0] == factor:
            return index
    return None if not any(factor in dim for dim in rule.results[0]) else -1
