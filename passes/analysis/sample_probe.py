"""Asks by execution whether ops treat samples alike and apart: for what no rule describes.

A few ops are run on random values. One sample's inputs are then changed: no other sample's results
may move. Then two samples change places: their results must do so too, or a value depends on the
place in the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autopar.op_call import Bindings, types_of
from autopar.passes.analysis.aliases import written
from autopar.passes.analysis.random_ops import without_drawing
from autopar.program import is_differentiable, tensors_of

# Elements of all operands together; above it nothing is run. In bf16 4 GiB.
LIMIT = 2**31
DRAWS = 3
# What is run instead: in 16 bits nearly everything is equal to what it should be, and with random
# weights a softmax makes much of how products of 32 bits were rounded.
_WIDE = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def follow(
    nodes: Sequence[fx.Node],
    batched: Mapping[fx.Node, int],
    results: Sequence[fx.Node],
    bindings: Bindings,
    samples: int,
    fewer: Bindings | None = None,
) -> dict[fx.Node, int] | None:
    """Runs `nodes`; for each of `results` the dim that then holds the batch, None if samples mix.

    `batched`: values that hold the batch and the dim of each, where it is the major part. A result
    that does not depend on them has no entry. None also where the nodes can't be run. `fewer`:
    sizes with fewer samples: the last ones alone must give what they give among all.
    """
    inside = set(nodes)
    outside = [s for n in nodes for s in n.all_input_nodes if s not in inside]
    outside = list(dict.fromkeys(outside))
    if sum(t.numel for n in outside for t in types_of(n, bindings)) > LIMIT:
        return None
    found: dict[fx.Node, int] = {}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), own_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(DRAWS):
            values = {n: drawn(n, bindings, generator) for n in outside}
            try:
                torch.manual_seed(1)  # random ops draw the same in every run
                whole = run_nodes(nodes, values, bindings)
                dims = _dims(nodes, values, batched, results, bindings, samples, whole, generator)
                if dims is not None and fewer is not None:
                    alone = _alone(nodes, values, batched, bindings, fewer)
                    if not _agree(alone, whole, results, dims, fewer.sizes["batch"], samples):
                        dims = None
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                # A kernel that is not there, or indexes that random values do not meet.
                return None
            if dims is None or any(found.get(n, d) != d for n, d in dims.items()):
                return None
            found |= dims
    return found


def alike(node: fx.Node, bindings: Bindings, dim: int, samples: int) -> bool:
    """Whether a call gives each sample the same along `dim`, as a row that is repeated does.

    A part of a table, a row for each place, does not.
    """
    if sum(t.numel for n in node.all_input_nodes for t in types_of(n, bindings)) > LIMIT:
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), own_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            values = {n: drawn(n, bindings, generator) for n in node.all_input_nodes}
            result = run_nodes([node], values, bindings)[node]
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return False
    if not isinstance(result, Tensor) or result.shape[dim] % samples:
        return False
    parts = result.chunk(samples, dim)
    return all(same(parts[0], part) for part in parts)


def _dims(
    nodes: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    batched: Mapping[fx.Node, int],
    results: Sequence[fx.Node],
    bindings: Bindings,
    samples: int,
    whole: dict[Any, Any],
    generator: torch.Generator,
) -> dict[fx.Node, int] | None:
    """The batch's dim in each result that depends on it; None when samples mix."""

    def run(change: bool, swap: bool) -> list[Tensor]:
        given = dict(values)
        for node, dim in batched.items():
            if node in given:
                given[node] = _altered(
                    given[node], dim, samples, generator if change else None, swap
                )
        torch.manual_seed(1)
        return seen(run_nodes(nodes, given, bindings))

    def seen(env: dict[Any, Any]) -> list[Tensor]:
        return [t for n in results for t in tensors_of(env[n])]

    plain, moved, swapped = seen(whole), run(True, False), run(False, True)
    owners = [n for n in results for _ in tensors_of(n.meta["val"])]
    found: dict[fx.Node, int] = {}
    for node, base, after, exchanged in zip(owners, plain, moved, swapped, strict=True):
        if base.shape != after.shape or same(base, after):
            if base.shape != exchanged.shape or not same(base, exchanged):
                return None
            continue
        fitting = [
            d
            for d in range(base.dim())
            if base.shape[d] % samples == 0
            and _apart(base, after, d, samples)
            and same(_altered(base, d, samples, None, True), exchanged)
        ]
        if len(fitting) != 1 or found.get(node, fitting[0]) != fitting[0]:
            return None
        found[node] = fitting[0]
    return found


def _alone(
    nodes: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    batched: Mapping[fx.Node, int],
    bindings: Bindings,
    fewer: Bindings,
) -> dict[Any, Any]:
    """What the last samples give when they are all there are."""
    kept, samples = fewer.sizes["batch"], bindings.sizes["batch"]
    given: dict[fx.Node, Any] = {}
    for node, value in values.items():
        if node in batched and isinstance(value, Tensor):
            rows = value.shape[batched[node]] // samples * kept
            given[node] = value.narrow(batched[node], value.shape[batched[node]] - rows, rows)
        elif isinstance(value, Tensor | list):
            given[node] = value
        else:
            given[node] = fewer.size(node.meta.get("val"))
    torch.manual_seed(1)
    return run_nodes(nodes, given, fewer)


def _agree(
    alone: dict[Any, Any],
    whole: dict[Any, Any],
    results: Sequence[fx.Node],
    dims: Mapping[fx.Node, int],
    kept: int,
    samples: int,
) -> bool:
    for node in results:
        for few, all_of_them in zip(tensors_of(alone[node]), tensors_of(whole[node]), strict=True):
            wanted = all_of_them
            dim = dims.get(node, _only_difference(few, wanted))
            if dim is not None:
                rows = wanted.shape[dim] // samples * kept
                wanted = wanted.narrow(dim, wanted.shape[dim] - rows, rows)
            if few.shape != wanted.shape or not same(few, wanted):
                return False
    return True


def _only_difference(few: Tensor, many: Tensor) -> int | None:
    """The dim that tells the number of samples of a value that is the same for all of them."""
    sizes = enumerate(zip(few.shape, many.shape, strict=False))
    found = [d for d, (a, b) in sizes if a != b]
    return found[0] if few.dim() == many.dim() and len(found) == 1 else None


def run_nodes(
    nodes: Sequence[fx.Node], given: dict[fx.Node, Any], bindings: Bindings
) -> dict[Any, Any]:
    env: dict[Any, Any] = dict(given)
    for changed in {n for node in nodes for n in written(node)}:
        if isinstance(env.get(changed), Tensor):
            env[changed] = env[changed].clone()

    def bound(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return env[arg]
        if arg == torch.device("meta"):
            return torch.device("cpu")
        if isinstance(arg, torch.dtype):
            return _WIDE.get(arg, arg)
        return bindings.size(arg)

    for node in nodes:
        args = torch.utils._pytree.tree_map(bound, without_drawing(node))
        target: Any = node.target
        env[node] = target(*args[0], **args[1])
    return env


def _altered(value: Any, dim: int, samples: int, change: torch.Generator | None, swap: bool) -> Any:
    """The value with the last sample's part drawn anew, or the first and last parts exchanged."""
    if not isinstance(value, Tensor):
        return value
    size = value.shape[dim] // samples
    made = value.clone()
    last, first = made.narrow(dim, (samples - 1) * size, size), made.narrow(dim, 0, size)
    if change is not None:
        # Far larger, so that a maximum over samples moves too.
        drawn = _random(last.shape, value.dtype, change)
        last.copy_(10 * drawn if is_differentiable(value) else drawn)
    if swap:
        kept = first.clone()
        first.copy_(last)
        last.copy_(kept)
    return made


def _apart(base: Tensor, after: Tensor, dim: int, samples: int) -> bool:
    kept = base.shape[dim] // samples * (samples - 1)
    return same(base.narrow(dim, 0, kept), after.narrow(dim, 0, kept))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of additions, which kernels choose by size."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = 100 * torch.finfo(torch.float32).eps
    # Of the largest value: what is small everywhere must be equal too.
    finite = [t[t.isfinite()].abs().max() for t in (a, b) if t.isfinite().any()]
    scale = float(max(finite)) if finite else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def drawn(node: fx.Node, bindings: Bindings, generator: torch.Generator, scale: float = 1.0) -> Any:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return [_random(bindings.shape(v), v.dtype, generator) for v in value]
    if not isinstance(value, Tensor):
        return bindings.size(value)
    made = _random(bindings.shape(value), value.dtype, generator)
    return made * scale if made.is_floating_point() and scale != 1.0 else made


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Positive and negative numbers; whole ones are 0 or 1, which index nearly everything.

    Of one generator, which only goes on: the random ops of a run start anew each time, and must
    not make two draws alike.
    """
    if dtype.is_floating_point or dtype.is_complex:
        wide = _WIDE.get(dtype, dtype)
        return torch.randn(tuple(shape), dtype=wide, generator=generator)
    return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Draws that neither depend on the caller's random state nor change it, and numbers that are
    made without a dtype as wide as all others."""
    usual = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(_WIDE.get(usual, usual))
        try:
            yield
        finally:
            torch.set_default_dtype(usual)
