"""Make a block's picture readable: fold ops that move no data between ranks into one node.

    before   view -> transpose -> pow -> mean -> add -> rsqrt -> mul -> linear     (75 in a layer)
    after    input_layernorm -> q_proj                                             (about 20)

Two ops become one node only if nothing is communicated between them, their results are
placed alike, and no other path leads from the first to the second (the picture stays acyclic).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from autopar.report.block_picture import BlockPicture, EdgePicture, OpPicture
from autopar.report.words import MAIN_OPS


def fold(picture: BlockPicture) -> BlockPicture:
    """The same block with trivial ops and runs of pointwise ops folded; totals are kept."""
    groups = _Groups(picture)
    for op in _in_order(picture):
        for edge in groups.incoming.get(op.name, ()):
            producer = picture.op(edge.source)
            if producer is not None and edge.is_local and _belong(producer, op, groups):
                groups.join(edge.source, op.name)
    aliases = _input_aliases(picture, groups)
    ops = tuple(
        _merged(members, picture) for members in groups.members() if members[0].name not in aliases
    )
    return BlockPicture(picture.name, picture.count, ops, _edges(picture, groups, ops, aliases))


def _belong(producer: OpPicture, op: OpPicture, groups: _Groups) -> bool:
    """A trivial op goes with its producer; pointwise ops of one module go together."""
    if op.trivial:
        # A transpose renames S(2) to S(1) and moves nothing; R to S cuts a piece out: show it.
        return _kind(producer.placement) == _kind(op.placement)
    if op.op in MAIN_OPS or producer.placement != op.placement:
        return False
    # What the producer went into counts: a norm's cast may belong to the addition before it.
    real = [member for member in groups.of(producer.name) if not member.trivial]
    return all(m.op not in MAIN_OPS and m.module == op.module for m in real)


def _kind(placement: str) -> str:
    return placement[:1] if placement.startswith("S") else placement


class _Groups:
    """Disjoint sets of op names, joined along edges, never so that a cycle appears."""

    def __init__(self, picture: BlockPicture) -> None:
        self.picture = picture
        self.home = {op.name: op.name for op in picture.ops}
        self.incoming: dict[str, list[EdgePicture]] = {}
        self.outgoing: dict[str, set[str]] = {}
        for edge in picture.edges:
            self.incoming.setdefault(edge.target, []).append(edge)
            self.outgoing.setdefault(edge.source, set()).add(edge.target)

    def of(self, name: str) -> list[OpPicture]:
        return [op for op in self.picture.ops if self.home[op.name] == self.home[name]]

    def join(self, source: str, target: str) -> None:
        a, b = self.home[source], self.home[target]
        if a == b or self._detour(a, b) or self._talks(a, b):
            return
        for name, home in self.home.items():
            if home == b:
                self.home[name] = a

    def members(self) -> list[list[OpPicture]]:
        found: dict[str, list[OpPicture]] = {}
        for op in self.picture.ops:
            found.setdefault(self.home[op.name], []).append(op)
        return list(found.values())

    def _talks(self, a: str, b: str) -> bool:
        """A collective anywhere between the two groups must stay visible."""
        return any(
            not e.is_local and {self.home.get(e.source), self.home.get(e.target)} == {a, b}
            for e in self.picture.edges
        )

    def _detour(self, a: str, b: str) -> bool:
        """A path from group a to group b through a third group."""
        inside = [n for n, home in self.home.items() if home == a]
        first = {t for n in inside for t in self.outgoing.get(n, ())}
        queue = [t for t in first if self.home.get(t) not in (a, b, None)]
        seen: set[str] = set()
        while queue:
            home = self.home[queue.pop()]
            if home == b:
                return True
            if home in seen:
                continue
            seen.add(home)
            for name in [n for n, h in self.home.items() if h == home]:
                queue += [t for t in self.outgoing.get(name, ()) if t in self.home]
        return False


def _in_order(picture: BlockPicture) -> list[OpPicture]:
    """Producers before consumers, whatever order the picture lists them in."""
    waiting = {op.name: op for op in picture.ops}
    needs: dict[str, set[str]] = {name: set() for name in waiting}
    for edge in picture.edges:
        if edge.source in waiting and edge.target in waiting:
            needs[edge.target].add(edge.source)
    done: list[OpPicture] = []
    while waiting:
        ready = [op for name, op in waiting.items() if not needs[name] & set(waiting)]
        # A cycle can't come from a graph; if one does, show it rather than hang.
        for op in ready or list(waiting.values()):
            done.append(waiting.pop(op.name))
    return done


def _input_aliases(picture: BlockPicture, groups: _Groups) -> dict[str, str]:
    """Groups of trivial ops over one value from outside: they are that value by another name."""
    aliases: dict[str, str] = {}
    for members in groups.members():
        names = {op.name for op in members}
        entering = [e for op in members for e in groups.incoming.get(op.name, ())]
        outside = {e.source for e in entering if e.source not in names}
        if (
            all(op.trivial for op in members)
            and len(outside) == 1
            and not outside & set(groups.home)
            and all(e.is_local for e in entering)
            and any(name in groups.outgoing for name in names)
        ):
            aliases.update(dict.fromkeys(names, outside.pop()))
    return aliases


def _merged(members: list[OpPicture], picture: BlockPicture) -> OpPicture:
    if len(members) == 1:
        return members[0]
    real = [op for op in members if not op.trivial] or members
    slowest, last = max(real, key=lambda op: op.seconds), real[-1]
    inside = {op.name for op in members}
    whole = len(real) > 1 and _is_whole_module(last.module, inside, picture)
    return replace(
        last,
        op=last.module.rsplit(".", 1)[-1] if whole else counted(op.op for op in real),
        flops=sum(op.flops for op in members),
        seconds=sum(op.seconds for op in members),
        bound=slowest.bound,
        saved_bytes=sum(op.saved_bytes for op in members),
        members=tuple(op.name for op in members),
        trivial=all(op.trivial for op in members),
    )


def _is_whole_module(module: str, inside: set[str], picture: BlockPicture) -> bool:
    """All ops of that module, and of no other, are in the group: its name says it best."""
    return bool(module) and all(
        (op.name in inside) == (op.module == module or op.module.startswith(module + "."))
        for op in picture.ops
        if not op.trivial
    )


def counted(names: Iterable[str]) -> str:
    """`mul, mul, add` -> `mul ×2, add`, in order of appearance."""
    return ", ".join(f"{n} ×{k}" if k > 1 else n for n, k in Counter(names).items())


def _edges(
    picture: BlockPicture, groups: _Groups, ops: tuple[OpPicture, ...], aliases: dict[str, str]
) -> tuple[EdgePicture, ...]:
    shown: dict[str, str] = {}
    for op in ops:
        shown.update(dict.fromkeys((op.name, *op.members), op.name))
    found: dict[tuple[str, str, str, str], EdgePicture] = {}
    for edge in picture.edges:
        source = aliases.get(edge.source, edge.source)
        source, target = shown.get(source, source), shown.get(edge.target, edge.target)
        if edge.target in aliases or source == target:
            continue
        key = (source, target, edge.collective, edge.backward_collective)
        known = found.get(key)
        size = max(edge.bytes, known.bytes if known else 0)
        found[key] = replace(edge, source=source, target=target, bytes=size)
    return tuple(found.values())
