"""Whether samples of a batch depend on each other before the loss: then parts can't be run alone.

The dim that holds the batch is followed through the rules of the ops: one that contracts, reduces
or needs it whole mixes samples. Ops without a rule are run on random values instead. Where a single
op mixes, its whole block may still keep samples apart (tokens sorted by expert, and sorted back):
that is asked by running the block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._sympy.functions import ToFloat

from autopar.errors import AutoparError
from autopar.op_call import Bindings, OpCall, op_call
from autopar.passes.analysis.aliases import ancestors, written
from autopar.passes.analysis.batch_statistics import is_batch_norm, statistic_dims
from autopar.passes.analysis.blocks import Blocks, analyse_blocks
from autopar.passes.analysis.combined_values import (
    combining,
    connected,
    descendants,
    reads_size,
    until_combined,
)
from autopar.passes.analysis.loss_form import loss_tail
from autopar.passes.analysis.random_ops import draws_apart
from autopar.passes.analysis.sample_probe import alike, follow
from autopar.passes.analysis.sample_rule import batch_dim
from autopar.program import Program, outputs_of, tensors_of
from autopar.rules import rule_for

# Sizes at which ops are looked at: no other dim is likely to have them.
SAMPLES, TOKENS = 11, 14
# The last of them run alone, as a micro-batch is. 7 samples are left out: no common width, by which
# a place (roll by the size of the batch) would be the same for both.
FEWER = 4
# What these make is the same wherever it stands in the batch.
_EVEN = frozenset(
    ["full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty"]
    + ["zeros_like", "ones_like", "full_like", "empty_like"]
)
# What these read of the batch is the size of their result.
# An argument of embedding and embedding_bag.
COUNTED = "scale_grad_by_freq"
_SIZED = frozenset(["view", "reshape", "expand", "unflatten", "_unsafe_view"]) | _EVEN


def coupling_op(program: Program) -> fx.Node | None:
    """The first op before the loss that mixes samples; None when all are kept apart.

    Raises nothing: an op that can be neither described nor run counts as mixing.
    """
    return _Walk(program).first()


class Statistics(NamedTuple):
    """Names of nodes; those in `added` are the sums of what they are for parts of a batch."""

    names: frozenset[str]
    added: frozenset[str]


def batch_statistics(program: Program) -> Statistics | None:
    """Ops by which alone samples depend on each other: they take statistics of the batch, so that
    it can be spread over dp ranks as one micro-batch, and the statistics be summed.

    None where other ops mix samples, or a buffer that the step changes would differ on ranks.
    """
    walk = _Walk(program, summing=True)
    if walk.first() is not None:
        return None
    kept = outputs_of(program.graph)[1:]
    if any(n in walk.at or n in walk.placed for n in kept):
        return None
    if ancestors(program.graph, kept) & loss_tail(program):
        return None
    names, added = (frozenset(n.name for n in found) for found in (walk.summed, walk.added))
    return Statistics(names, added)


class _Walk:
    """`at`: values that hold the batch -> the dim whose major part it is. `placed`: values
    without samples whose entries differ by their place in the batch (a range over it). `summing`:
    statistics of the batch do not count as mixing, and are noted in `summed`; those in `added`
    are sums of those of parts."""

    def __init__(self, program: Program, *, summing: bool = False) -> None:
        sizes = dict(program.sizes)
        if "batch" in program.symbols:
            sizes["batch"] = SAMPLES
        if "sequence" in program.symbols:
            sizes["sequence"] = min(TOKENS, sizes["sequence"])
        self.program = program
        self.samples = sizes["batch"]
        self.bindings = Bindings(program.symbols, sizes)
        self.fewer = None
        if "batch" in program.symbols:
            self.fewer = Bindings(program.symbols, {**sizes, "batch": FEWER})
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        inputs = {i.name for i in program.of_kind("input") if i.batch_dim == 0}
        self.at = {n: 0 for n in self.nodes if n.name in inputs}
        self.constant = _made_from_nothing(self.nodes)
        # Noise for each sample is like an input of the batch.
        noise = {n: self._dim_by_shape(n) for n in self.nodes if _is_noise(n)}
        self.at |= {n: d for n, d in noise.items() if d is not None and self._multiple(n, d)}
        self.moving = descendants([n for n in self.nodes if n.name in inputs])
        self.placed: set[fx.Node] = set()
        self.summing = summing
        self.summed: set[fx.Node] = set()
        self.added: set[fx.Node] = set()
        self._answers: dict[Any, int | None] = {}

    def first(self) -> fx.Node | None:
        tail = loss_tail(self.program)
        settled: set[fx.Node] = set()
        blocks: Blocks | None = None
        for node in self.nodes:
            if node.op != "call_function" or node in settled:
                continue
            if not tensors_of(node.meta.get("val")) or (node in self.at and _is_noise(node)):
                continue
            if counts_in_backward(node) and any(n in self.at for n in node.all_input_nodes):
                return node
            if node in tail:
                if self._mixes_in_loss(node):
                    return node
                continue
            if self._passes(node):
                continue
            blocks = blocks or analyse_blocks(self.program)
            region = self._region(blocks, node, tail)
            if self._kept_apart(region):
                settled |= set(region)
            elif self.summing and (combined := self._combined(node, tail)):
                settled |= combined
            else:
                return node
        return None

    def _mixes_in_loss(self, node: fx.Node) -> bool:
        """A loss may add up samples, but not read their place, nor each against every other."""
        operands = [n for n in node.all_input_nodes if n in self.at and n.meta["val"].dim()]
        dims = {self.at[n] for n in operands}
        return len(dims) > 1 or any(n in self.placed for n in node.all_input_nodes)

    def _passes(self, node: fx.Node) -> bool:
        """Whether a single op keeps samples apart; notes where its result holds the batch."""
        sources = node.all_input_nodes
        if node in self.constant:
            return self._note_constant(node)
        if self.summing and self._sums(node):
            return True
        if self._counts_batch(node) or (self._reads_batch(node) and not self._as_fewer(node)):
            return False
        if any(n in self.at for n in sources) and not any(n in self.placed for n in sources):
            dim = self._dim_of_blank(node) if _is_blank(node) else self._dim(node)
            if dim is not None and dim >= 0:
                self.at[node] = dim
            return dim is not None
        if any(n in self.placed for n in sources):
            return False
        own = self._dim_by_shape(node)
        # A parameter that is repeated for each sample, or its rows one by one.
        if own is not None and alike(node, self.bindings, own, self.samples):
            self.at[node] = own
        elif own is not None:
            self.placed.add(node)
        return True

    def _sums(self, node: fx.Node) -> bool:
        """Whether it takes statistics over the dim that holds the batch, and nothing else of it."""
        dims, (source, *others) = statistic_dims(node), node.all_input_nodes
        if dims is None or self.at.get(source) not in dims or source in self.placed:
            return False
        if any(n in self.at or n in self.placed for n in others):
            return False
        self.summed.add(node)
        if is_batch_norm(node):
            self.at[node] = self.at[source]
        return True

    def _combined(self, node: fx.Node, tail: set[fx.Node]) -> set[fx.Node]:
        """All between a node that mixes samples and what the batch's parts add up to, by which
        alone others see of it; empty when there is more to see."""
        reached = connected(node, tail, self.at, self.moving, self._dim_by_shape)
        region = self._with_constants(reached)
        sources = {s for n in region for s in n.all_input_nodes} - set(region)
        if "batch" not in self.program.symbols or sources & self.placed:
            return set()
        if any(self._bounds_batch(n) or written(n) for n in region):
            return set()
        batched = {n: self.at[n] for n in sources if n in self.at}
        whole, half = (
            Bindings(self.program.symbols, {**self.bindings.sizes, "batch": size})
            for size in (2 * FEWER, FEWER)
        )
        kinds = combining(region, batched, whole, half)
        symbol = self.program.symbols["batch"]
        inside, ends = until_combined(reached, kinds, lambda n: reads_size(n, symbol))
        self.summed |= ends
        self.added |= {n for n in ends if kinds[n] == "sum"}
        return inside

    def _with_constants(self, wanted: set[fx.Node]) -> list[fx.Node]:
        """In order, with all that is made from nothing: its true values count."""
        wanted = set(wanted)
        for each in reversed(self.nodes):
            if each in wanted:
                wanted |= {s for s in each.all_input_nodes if s in self.constant}
        return [n for n in self.nodes if n in wanted]

    def _note_constant(self, node: fx.Node) -> bool:
        """A value made from nothing is the same for every sample, or `placed`; it never mixes."""
        sources = [n for n in node.all_input_nodes if tensors_of(n.meta.get("val"))]
        own = self._dim_by_shape(node)
        even = not sources and _is_blank(node)
        if any(n in self.placed for n in sources) or self._counts_batch(node):
            self.placed.add(node)
        elif any(n in self.at for n in sources):
            # Only what keeps the samples apart keeps them alike: no sum or scan over them.
            dim = self._dim_by_rule(node)
            if dim is None or dim < 0:
                self.placed.add(node)
            else:
                self.at[node] = dim
        elif own is not None and (even or sources):
            self.at[node] = own
        elif own is not None:
            self.placed.add(node)
        return True

    def _counts_batch(self, node: fx.Node) -> bool:
        """Whether the number of samples is an operand, not only a size of the result."""
        symbol = self.program.symbols.get("batch")
        schema = getattr(node.target, "_schema", None)
        if symbol is None or schema is None:
            return False
        given = list(zip(schema.arguments, node.args, strict=False))
        by_name = {a.name: a for a in schema.arguments}
        given += [(by_name[k], v) for k, v in node.kwargs.items() if k in by_name]
        for argument, value in given:
            number = value.meta.get("val") if isinstance(value, fx.Node) else None
            if not isinstance(number, torch.SymInt | torch.SymFloat):
                continue
            sizes = str(argument.type) in ("int", "SymInt", "Optional[int]", "Optional[SymInt]")
            if not sizes and number.node.expr.has(symbol):
                return not _is_range(node)
        return False

    def _reads_batch(self, node: fx.Node) -> bool:
        """Whether the number of samples is an argument that need not be a size: table[b - 1]."""
        symbol = self.program.symbols.get("batch")
        if symbol is None or str(getattr(node.target, "_opname", "")) in _SIZED:
            return False
        sizes = [n.meta.get("val") for n in node.all_input_nodes]
        return any(isinstance(s, torch.SymInt) and s.node.expr.has(symbol) for s in sizes)

    def _as_fewer(self, node: fx.Node) -> bool:
        """Whether a call gives the last samples the same when they are all there are."""
        batched = {n: self.at[n] for n in node.all_input_nodes if n in self.at}
        run = follow([node], batched, [node], self.bindings, self.samples, self.fewer)
        return run is not None

    def _bounds_batch(self, node: fx.Node) -> bool:
        """Whether a number that an op reads is made of the batch by steps or bounds (min(b, 5)).

        It may be the same for the sizes at which the op is run, and not for those of the user.
        """
        symbol = self.program.symbols.get("batch")
        sizes = [n.meta.get("val") for n in node.all_input_nodes]
        exprs = [s.node.expr for s in sizes if isinstance(s, torch.SymInt | torch.SymFloat)]
        exprs = [e.replace(ToFloat, lambda x: x) for e in exprs]
        return any(e.has(symbol) and not e.is_polynomial(symbol) for e in exprs)

    def _dim(self, node: fx.Node) -> int | None:
        """The batch's dim in the result, -1 where the result does not depend on it; None: mixed."""
        batched = {n: self.at[n] for n in node.all_input_nodes if n in self.at}
        found = self._dim_by_rule(node)
        if found != -1:
            return found
        call = self._call(node)
        key: Any = node.name
        if call is not None:
            key = (str(call.target), str((call.args, call.kwargs, call.types)), *batched.values())
        if key not in self._answers:
            dims = follow([node], batched, [node], self.bindings, self.samples)
            self._answers[key] = None if dims is None else dims.get(node, -1)
        return self._answers[key]

    def _dim_of_blank(self, node: fx.Node) -> int:
        """Of an operand such an op reads the size and the dtype alone."""
        own = self._dim_by_shape(node)
        return -1 if own is None else own

    def _dim_by_rule(self, node: fx.Node) -> int | None:
        """As `_dim`, by the op's rule alone; -1 also where there is none."""
        call = self._call(node)
        rule = rule_for(call) if call is not None else None
        if call is None or rule is None:
            return -1
        by_name = {n.name: self.at[n] for n in node.all_input_nodes if n in self.at}
        return batch_dim(rule, [by_name.get(name) for name in call.operands])

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

    def _multiple(self, node: fx.Node, dim: int) -> bool:
        """Whether a size is the number of samples, times what does not depend on it."""
        symbol = self.program.symbols["batch"]
        return not (node.meta["val"].shape[dim].node.expr / symbol).has(symbol)

    def _region(self, blocks: Blocks, node: fx.Node, tail: set[fx.Node]) -> list[fx.Node]:
        """The block around a node, or the shared values, with all that is made from nothing: its
        true values count (a range over the batch)."""
        home = next((b.nodes for b in blocks.chain if node in b.nodes), None)
        own = {n for n in home if n not in tail} | {node} if home else self._joined(blocks, node)
        wanted = self._with_constants(own)
        # Noise comes from outside, so that samples can change places with theirs.
        return [n for n in wanted if not (n in self.at and _is_noise(n))]

    def _joined(self, blocks: Blocks, node: fx.Node) -> set[fx.Node]:
        """Of the shared values those that are computed from each other: a mask for attention has
        nothing to do with the count of a loss."""
        home, found, stack = set(blocks.shared), {node}, [node]
        while stack:
            last = stack.pop()
            beside = {*last.users, *last.all_input_nodes} & home - self.constant - found
            found |= beside
            stack += beside
        return found

    def _kept_apart(self, region: list[fx.Node]) -> bool:
        """Whether a region does, as a whole; notes where what others read of it holds the batch."""
        if any(self._bounds_batch(n) for n in region):
            return False
        inside = set(region)
        results = [
            n
            for n in region
            if n not in self.constant
            and tensors_of(n.meta.get("val"))
            and any(u not in inside for u in n.users)
        ]
        dims = follow(region, self.at, results, self.bindings, self.samples, self.fewer)
        if dims is None:
            return False
        for node in inside - self.constant:
            self.at.pop(node, None)
        alike = {n: self._dim_by_shape(n) for n in results if n not in dims}
        self.at |= dims | {n: d for n, d in alike.items() if d is not None}
        return True


def counts_in_backward(node: fx.Node) -> bool:
    """Whether the gradient that an index gives depends on how often it occurs."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get(COUNTED))


def _is_noise(node: fx.Node) -> bool:
    """Numbers drawn apart, that depend on no other values."""
    tensors = [n for n in node.all_input_nodes if tensors_of(n.meta.get("val"))]
    return node.op == "call_function" and draws_apart(node) and all(map(_is_blank, tensors))


def _is_blank(node: fx.Node) -> bool:
    return str(getattr(node.target, "_opname", "")) in _EVEN


def _is_range(node: fx.Node) -> bool:
    return str(getattr(node.target, "_opname", "")) in ("arange", "linspace")


def _made_from_nothing(nodes: list[fx.Node]) -> set[fx.Node]:
    """Calls that no input, parameter or buffer goes into; sizes do not count."""
    found: set[fx.Node] = set()
    for node in nodes:
        tensors = [n for n in node.all_input_nodes if tensors_of(n.meta.get("val"))]
        if node.op == "call_function" and all(n in found for n in tensors):
            found.add(node)
    return found
