"""The chain of blocks: what pipeline stages are cut from, and which blocks are of one kind.

Blocks come from the module tree: the outermost numbered modules (`model.layers.3`), what needs
parameters before the first of them, and what comes after the last. Values that need no parameter
(rotary tables, masks) are `shared`: cheap, and computed by every stage that reads them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.marks import REPLICATE
from autopar.passes.analysis.aliases import memory_roots, written
from autopar.program import (
    Program,
    is_differentiable,
    module_path,
    module_paths,
    outputs_of,
    tensors_of,
    user_line,
)
from autopar.reshard import RESHARDS

_NUMBERED = re.compile(r"^(.+\.)?\d+$")
FIRST, LAST = "embed", "head"


@dataclass(slots=True)
class Block:
    """Nodes in graph order; `reads` are values from outside, `writes` values that others read."""

    name: str
    nodes: list[fx.Node] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    reads: list[fx.Node] = field(default_factory=list)
    writes: list[fx.Node] = field(default_factory=list)
    kind: str = ""

    @property
    def local_names(self) -> dict[str, str]:
        """Node name -> name that is the same in all blocks of the kind."""
        return dict(zip((n.name for n in self.nodes), local_op_names(self.nodes), strict=True))


@dataclass(slots=True)
class Blocks:
    """`chain` in execution order, `shared` nodes, `kinds`: first block -> all names of its kind."""

    chain: list[Block]
    shared: list[fx.Node]
    kinds: dict[str, tuple[str, ...]]

    def block(self, name: str) -> Block:
        return next(b for b in self.chain if b.name == name)

    def shared_keys(self) -> list[str]:
        """Of every block: the same for blocks that read the same `shared` nodes; empty if no other
        block does."""
        made = set(self.shared)
        read = [" ".join(n.name for n in b.reads if n in made) for b in self.chain]
        count = Counter(read)
        return [names if count[names] > 1 else "" for names in read]

    @property
    def crossing_any(self) -> list[fx.Node]:
        """Values that pass from one block to a later one, in graph order."""
        last = self._last_reads()
        return [n for i, b in enumerate(self.chain) for n in b.writes if last.get(n, -1) > i]

    def _last_reads(self) -> dict[fx.Node, int]:
        """The last block that reads a value of another one."""
        return {n: i for i, b in enumerate(self.chain) for n in b.reads}

    def can_end_stages(self) -> list[bool]:
        """Of each block whether a pipeline stage can end with it: what passes on has a gradient, or
        none of it has. The pipeline can't send both."""
        last = self._last_reads()
        # Values of both sorts that begin to pass, less those that end, behind each block.
        change = [[0, 0] for _ in range(len(self.chain) + 1)]
        for i, block in enumerate(self.chain):
            for node in block.writes:
                if last.get(node, -1) > i:
                    sort = _has_gradient(node)
                    change[i][sort] += 1
                    change[last[node]][sort] -= 1
        passing = [list(accumulate(c[sort] for c in change)) for sort in (0, 1)]
        return [not (without and with_) for without, with_ in zip(*passing, strict=True)][:-1]

    def crossing(self, after: int) -> list[fx.Node]:
        """Values that pass from block `after` or earlier to later blocks, in graph order."""
        late = {id(n) for b in self.chain[after + 1 :] for n in b.reads}
        return [n for b in self.chain[: after + 1] for n in b.writes if id(n) in late]


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) else value
    differentiable = isinstance(first, torch.Tensor) and is_differentiable(first)
    return differentiable and bool(node.meta.get("requires_grad", False))


def analyse_blocks(program: Program) -> Blocks:
    """Assign every node to a block or to the shared part. Linear in the size of the graph."""
    needs = needs_parameters(program)
    keys = _numbered_modules(program, needs)
    order = {key: i for i, key in enumerate(dict.fromkeys(k for k in keys.values() if k))}
    home = _homes(program, needs, keys, order)
    updates = outputs_of(program.graph)[1:]
    for node in updates:
        if home.get(node) is None:
            home[node] = len(order) + 1
    names = [_free(FIRST, order), *order, _free(LAST, order)]
    blocks = [Block(name) for name in names]
    shared: list[fx.Node] = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            index = home[node]
            (shared if index is None else blocks[index].nodes).append(node)
    chain = [b for b in blocks if b.nodes]
    _refuse_writes(program, home)
    _signatures(program, chain, shared, updates)
    holders = Counter(name for block in chain for name in block.parameters)
    tied = {name for name, count in holders.items() if count > 1}
    kinds: dict[str, list[str]] = {}
    digests: dict[str, str] = {}
    for block in chain:
        block.kind = digests.setdefault(_digest(program, block, tied), block.name)
        kinds.setdefault(block.kind, []).append(block.name)
    return Blocks(chain, shared, {k: tuple(v) for k, v in kinds.items()})


def _free(name: str, taken: dict[str, int]) -> str:
    """A name that no module has: blocks are told apart by theirs."""
    while name in taken:
        name += "_"
    return name


def _refuse_writes(program: Program, home: dict[fx.Node, int | None]) -> None:
    """Writes in place are kept among shared values only, and before any block reads that memory.

    Blocks run on slices: a write into a view of what has become a slice would be lost.
    """
    roots = memory_roots(program.graph)
    read: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        changed = written(node)
        if changed and (home[node] is not None or any(roots[c] in read for c in changed)):
            raise CaptureError(
                f"{node.target} writes in place into {changed[0].name} ({user_line(node)})",
                next_step="use the out-of-place form there (torch.where, masked_fill, cat)",
            )
        if home[node] is not None:
            read |= {roots[n] for n in node.all_input_nodes}


def needs_parameters(program: Program) -> dict[fx.Node, bool]:
    roots = {i.name for i in program.inputs if i.kind == "parameter"}
    needs: dict[fx.Node, bool] = {}
    for node in program.graph.nodes:
        needs[node] = node.name in roots or any(needs[n] for n in node.all_input_nodes)
    return needs


def _numbered_modules(program: Program, needs: dict[fx.Node, bool]) -> dict[fx.Node, str]:
    """For each node the outermost numbered module around it, or ''.

    Lists are only worth cutting at when they hold parameters; a list of one member counts too.
    """
    found: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        paths = (p for p in module_paths(node) if _NUMBERED.match(p))
        found[node] = next(iter(paths), "") if node.op == "call_function" else ""
    counted = Counter(k for n, k in found.items() if k and needs[n])
    if counted:
        return {n: k if counted[k] else "" for n, k in found.items()}
    # No numbered modules: the children of the root are the blocks.
    return {
        n: module_path(n).split(".")[0] if n.op == "call_function" else ""
        for n in program.graph.nodes
    }


def _homes(
    program: Program, needs: dict[fx.Node, bool], keys: dict[fx.Node, str], order: dict[str, int]
) -> dict[fx.Node, int | None]:
    """Block index of every call (None: shared). Never earlier than any of its inputs."""
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    last_keyed = max((i for i, n in enumerate(calls) if needs[n] and keys[n]), default=-1)
    home: dict[fx.Node, int | None] = {}
    for position, node in enumerate(calls):
        before = [home.get(n) for n in node.all_input_nodes if n.op == "call_function"]
        earliest = max((b for b in before if b is not None), default=0)
        if not needs[node]:
            inside = keys[node] and all(b is None for b in before)
            home[node] = order[keys[node]] + 1 if inside or (keys[node] and earliest) else None
            if not keys[node] and any(b is not None for b in before):
                home[node] = earliest
        elif keys[node]:
            home[node] = max(order[keys[node]] + 1, earliest)
        elif position > last_keyed:
            home[node] = len(order) + 1
        else:
            home[node] = earliest
    _share_across(calls, needs, home)
    return home


def _share_across(
    calls: list[fx.Node], needs: dict[fx.Node, bool], home: dict[fx.Node, int | None]
) -> None:
    """A parameter-free value that several blocks read is shared, and so is all it is made from.

    So are symbolic sizes: they belong to no block.
    """
    for node in reversed(calls):
        if needs[node]:
            continue
        users = [home[u] for u in node.users if u in home]
        if not tensors_of(node.meta.get("val")) or any(u != home[node] for u in users):
            home[node] = None


def _signatures(
    program: Program, chain: list[Block], shared: list[fx.Node], updates: list[fx.Node]
) -> None:
    kind = {i.name: i.kind for i in program.inputs}
    owner = {n: b for b in chain for n in b.nodes}
    for block in chain:
        reads: dict[fx.Node, None] = {}
        for node in block.nodes:
            for source in node.all_input_nodes:
                if owner.get(source) is block:
                    continue
                if source.op == "placeholder" and kind[source.name] != "input":
                    bucket = block.parameters if kind[source.name] == "parameter" else block.buffers
                    if source.name not in bucket:
                        bucket.append(source.name)
                elif tensors_of(source.meta.get("val")):
                    reads[source] = None
        block.reads = list(reads)
    outside = {n for b in chain for n in b.reads}
    for block in chain:
        block.writes = [
            n for n in block.nodes if n in outside or n in updates or n.name == program.loss
        ]


def _digest(program: Program, block: Block, tied: set[str]) -> str:
    """Equal for blocks that do the same on tensors of the same shapes, and share the same `tied`
    parameters: these are placed alike in all blocks."""
    digest = hashlib.sha256()
    index: dict[fx.Node, int] = {}
    for node in block.nodes:
        for source in node.all_input_nodes:
            if source not in index:
                index[source] = len(index)
                named = source.name in program.constants or source.name in tied
                name = source.name if named else ""
                label = f"in {source.op == 'placeholder'} {name} {_type(source)};"
                digest.update(label.encode())
        args = fx.map_arg((node.args, node.kwargs), lambda n: index[n])
        index[node] = len(index)
        kept = node.meta.get(REPLICATE, False)
        digest.update(f"{node.target} {args} {_type(node)} {kept};".encode())
    digest.update(" ".join(str(index[n]) for n in block.writes).encode())
    return digest.hexdigest()


def _type(node: fx.Node) -> str:
    values = tensors_of(node.meta.get("val"))
    return (
        f"{[(tuple(map(str, v.shape)), v.dtype) for v in values]} {node.meta.get('requires_grad')}"
    )


def local_op_names(nodes: Iterable[fx.Node]) -> list[str]:
    """Names by op and count in the block: `linear`, `linear.1`, `add`, … (equal across a kind)."""
    seen: Counter[str] = Counter()
    names = []
    for node in nodes:
        base = str(getattr(node.target, "_opname", getattr(node.target, "__name__", "op")))
        if getattr(node.target, "namespace", "") == "autopar" and base in RESHARDS:
            base = f"cp_{base}"  # what splits the sequence; torch has a `slice` and a `pad` too
        names.append(f"{base}.{seen[base]}" if seen[base] else base)
        seen[base] += 1
    return names
