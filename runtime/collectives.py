"""Collectives of one axis, tp or cp, as graph ops, in conjugate pairs.

Each row of the tables below is one edge of `autopar.reshard`. Splits are even, `dim` counts from 0,
`ranks` is the size of the group; a rank's index comes from the group when the op runs, so the
text of a graph is the same on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.runtime import (  # noqa: F401 - they register their ops with these
    attention_rows,
    batch_averages,
    batch_norm,
    exchanged_experts,
    loss_share,
    own_experts,
    random_state,
    vocabulary,
)
from autopar.runtime.op_library import define, define_identity
from autopar.runtime.torch_compat import (
    all_gather_single,
    reduce_scatter_single,
    resolve_group,
)

Tensor = torch.Tensor
_ops = torch.ops.autopar


# Kernels.


def _wire(x: Tensor) -> Tensor:
    """What is sent: backends know no complex numbers, only their parts."""
    return torch.view_as_real(x) if x.is_complex() else x


def _all_reduce(x: Tensor, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(_wire(total), group=resolve_group(group))
    return total


def _all_gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    whole = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    all_gather_single(_wire(whole), _wire(x.contiguous()), group=resolve_group(group))
    return whole if dim == 0 else torch.cat(whole.chunk(ranks), dim)


def _reduce_scatter(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    rows = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    piece = x.new_empty(_piece_shape(x, dim, ranks))
    reduce_scatter_single(_wire(piece), _wire(rows), group=resolve_group(group))
    return piece


def _slice(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    size = x.shape[dim] // ranks
    start = resolve_group(group).rank() * size
    return x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    whole = x.new_zeros(_whole_shape(x, dim, ranks))
    start = resolve_group(group).rank() * x.shape[dim]
    whole.narrow(dim, start, x.shape[dim]).copy_(x)
    return whole


def _all_to_all(x: Tensor, dim_from: int, dim_to: int, ranks: int, group: str) -> Tensor:
    # Of channels-last parts the stack would be so too.
    outgoing = torch.stack(x.chunk(ranks, dim_to)).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(_wire(incoming), _wire(outgoing), group=resolve_group(group))
    return torch.cat(incoming.unbind(0), dim_from)


def _first_rank_only(x: Tensor, group: str) -> Tensor:
    if resolve_group(group).rank() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


# Shapes of results.


def _whole_shape(x: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
    return tuple(s * ranks if i == dim else s for i, s in enumerate(x.shape))


def _piece_shape(x: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
    return tuple(s // ranks if i == dim else s for i, s in enumerate(x.shape))


def _same(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _whole(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty(_whole_shape(x, dim, ranks))


def _piece(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty(_piece_shape(x, dim, ranks))


def _exchanged(x: Tensor, dim_from: int, dim_to: int, ranks: int, group: str) -> Tensor:
    sizes = list(x.shape)
    sizes[dim_from] *= ranks
    sizes[dim_to] //= ranks
    return x.new_empty(sizes)


# Ops: schema, kernel, shape, conjugate.

_X = "(Tensor x, str group) -> Tensor"
_D = "(Tensor x, int dim, int ranks, str group) -> Tensor"
_A = "(Tensor x, int dim_from, int dim_to, int ranks, str group) -> Tensor"
_V = "(Tensor(a) x, str group) -> Tensor(a)"
_MARK = "(Tensor(a) x, int stage) -> Tensor(a)"

# P -> R: sum; the gradient is whole already.
define("all_reduce" + _X, _all_reduce, _same, lambda g, group: g)
# P -> R*: sum; the readers' gradients are terms of a sum too.
define("all_reduce_both" + _X, _all_reduce, _same, lambda g, group: _ops.all_reduce(g, group))
# S -> R*: gather; gradient terms are summed and sliced.
define("all_gather" + _D, _all_gather, _whole, lambda g, *to: _ops.reduce_scatter(g, *to))
# S -> R: gather; every rank has the whole gradient and keeps its slice.
define("all_gather_slice" + _D, _all_gather, _whole, lambda g, *to: _ops.slice(g, *to))
# P -> S: sum and slice; gradient slices are gathered.
define("reduce_scatter" + _D, _reduce_scatter, _piece, lambda g, *to: _ops.all_gather(g, *to))
# R -> S: slice; gradient slices are gathered.
define("slice" + _D, _slice, _piece, lambda g, *to: _ops.all_gather(g, *to))
# R* -> S: slice; a gradient slice is a term of the sum, zero elsewhere.
define("slice_pad" + _D, _slice, _piece, lambda g, *to: _ops.pad(g, *to))
# S -> P: own slice in zeros; the whole gradient is sliced.
define("pad" + _D, _pad, _whole, lambda g, *to: _ops.slice(g, *to))
# S(i) -> S(j), and back for the gradient.
define(
    "all_to_all" + _A,
    _all_to_all,
    _exchanged,
    lambda g, i, j, ranks, group: _ops.all_to_all(g, j, i, ranks, group),
)
# R -> P: one rank holds the value, the others zeros; the gradient is whole.
define("first_rank_only" + _X, _first_rank_only, _same, lambda g, group: g)
# R -> R*: nothing; gradient terms are summed.
define_identity("copy" + _V, lambda g, group: _ops.all_reduce(g, group))
# R* -> R: nothing; a whole gradient becomes a sum with one nonzero term.
define_identity("first_rank_gradient" + _V, lambda g, group: _ops.first_rank_only(g, group))
# Marks of stage boundaries in printed graphs; the pipeline moves the values.
define_identity("send" + _MARK, lambda g, stage: g)
define_identity("recv" + _MARK, lambda g, stage: g)
