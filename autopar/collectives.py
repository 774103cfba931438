"""The ops that rewrites insert: one mesh axis, one placement transition each, gradient included.

| op                                  | transition | forward        | backward       |
| ----------------------------------- | ---------- | -------------- | -------------- |
| copy(x, group)                      | R  -> R*   | -              | all-reduce     |
| first_rank_gradient(x, group)       | R* -> R    | -              | keep on rank 0 |
| first_rank_only(x, group)           | R  -> P    | keep on rank 0 | -              |
| all_reduce(x, group)                | P  -> R    | all-reduce     | -              |
| all_reduce_both(x, group)           | P  -> R*   | all-reduce     | all-reduce     |
| all_gather(x, dim, n, group)        | S  -> R*   | all-gather     | reduce-scatter |
| all_gather_slice(x, dim, n, group)  | S  -> R    | all-gather     | slice          |
| reduce_scatter(x, dim, n, group)    | P  -> S    | reduce-scatter | all-gather     |
| slice(x, dim, n, group)             | R  -> S    | slice          | all-gather     |
| slice_pad(x, dim, n, group)         | R* -> S    | slice          | pad with zeros |
| pad(x, dim, n, group)               | S  -> P    | pad with zeros | slice          |
| all_to_all(x, from, to, n, group)   | S  -> S    | all-to-all     | all-to-all     |

They are `torch.ops.autopar.*`, so they print and export like any op. `group` is the name of a process
group. On meta tensors they only make shapes. `vocab_embedding`, `vocab_cross_entropy` and
`token_cross_entropy` are in `autopar.sharded_ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.torch_compat import resolve_group

_C10D = torch.ops._c10d_functional
Map = Callable[[Tensor], Tensor]


class _Conjugate(torch.autograd.Function):
    """A linear map and the one that carries gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.map = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.map(gradient), None, None


def sum_over(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """All-reduce into new memory."""
    if x.is_meta:
        return torch.empty_like(x)
    result: Tensor = _C10D.wait_tensor(_C10D.all_reduce(x.contiguous(), op, group))
    return result


def gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Concatenate the ranks' pieces along `dim`."""
    shape = list(x.shape)
    shape[dim] *= ranks
    if x.is_meta:
        return x.new_empty(shape)
    pieces = _C10D.wait_tensor(_C10D.all_gather_into_tensor(x.contiguous(), ranks, group))
    return pieces.view(ranks, *x.shape).movedim(0, dim).reshape(shape)


def scatter_sum(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Sum over the ranks; each keeps its piece along `dim`."""
    shape = list(x.shape)
    shape[dim] //= ranks
    if x.is_meta:
        return x.new_empty(shape)
    pieces = x.unflatten(dim, (ranks, shape[dim])).movedim(dim, 0).contiguous()
    flat = pieces.view(ranks * shape[0], *shape[1:]) if shape else pieces
    result: Tensor = _C10D.wait_tensor(_C10D.reduce_scatter_tensor(flat, "sum", ranks, group))
    return result.view(shape)


def own_piece(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    size = x.shape[dim] // ranks
    if x.is_meta:
        return x.new_empty([size if i == dim else s for i, s in enumerate(x.shape)])
    return x.narrow(dim, group_rank(x, group) * size, size).contiguous()


def zero_padded(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Own piece in its place, zeros elsewhere."""
    shape = list(x.shape)
    shape[dim] *= ranks
    if x.is_meta:
        return x.new_empty(shape)
    whole = x.new_zeros(shape)
    whole.narrow(dim, group_rank(x, group) * x.shape[dim], x.shape[dim]).copy_(x)
    return whole


def exchange(x: Tensor, source: int, target: int, ranks: int, group: str) -> Tensor:
    """Sharded along `source` -> sharded along `target`."""
    size = x.shape[target] // ranks
    shape = list(x.shape)
    shape[source], shape[target] = shape[source] * ranks, size
    if x.is_meta:
        return x.new_empty(shape)
    pieces = x.unflatten(target, (ranks, size)).movedim(target, 0).contiguous()
    split = [pieces.shape[1]] * ranks
    flat = pieces.view(-1, *pieces.shape[2:])
    received = _C10D.wait_tensor(_C10D.all_to_all_single(flat, split, split, group))
    return received.view(pieces.shape).movedim(0, source).reshape(shape)


def on_first_rank(x: Tensor, group: str) -> Tensor:
    """The value on the first rank, zeros elsewhere: one term of a sum."""
    if x.is_meta:
        return torch.empty_like(x)
    return x.clone() if group_rank(x, group) == 0 else torch.zeros_like(x)


def group_rank(x: Tensor, group: str) -> int:
    """This process's rank in the group (0 on meta tensors, where there may be no group)."""
    return 0 if x.is_meta else int(resolve_group(group).rank())


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _conjugate(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An op whose forward and backward take the same arguments after the tensor."""

    def op(x: Tensor, *args: Any) -> Tensor:
        def there(value: Tensor) -> Tensor:
            return forward(value, *args)

        def back(gradient: Tensor) -> Tensor:
            return backward(gradient, *args)

        return _Conjugate.apply(x, there, back)  # type: ignore[no-untyped-call,no-any-return]

    return op


def _all_to_all(x: Tensor, source: int, target: int, ranks: int, group: str) -> Tensor:
    def there(value: Tensor) -> Tensor:
        return exchange(value, source, target, ranks, group)

    def back(gradient: Tensor) -> Tensor:
        return exchange(gradient, target, source, ranks, group)

    return _Conjugate.apply(x, there, back)  # type: ignore[no-untyped-call,no-any-return]


def _identity(x: Tensor, *_: Any) -> Tensor:
    return _same(x)


_AXIS = "(Tensor x, str group) -> Tensor"
_DIM = "(Tensor x, int dim, int ranks, str group) -> Tensor"
_OPS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "copy": (_AXIS, _conjugate(_identity, sum_over)),
    "first_rank_gradient": (_AXIS, _conjugate(_identity, on_first_rank)),
    "first_rank_only": (_AXIS, _conjugate(on_first_rank, _identity)),
    "all_reduce": (_AXIS, _conjugate(sum_over, _identity)),
    "all_reduce_both": (_AXIS, _conjugate(sum_over, sum_over)),
    "all_gather": (_DIM, _conjugate(gather, scatter_sum)),
    "all_gather_slice": (_DIM, _conjugate(gather, own_piece)),
    "reduce_scatter": (_DIM, _conjugate(scatter_sum, gather)),
    "slice": (_DIM, _conjugate(own_piece, gather)),
    "slice_pad": (_DIM, _conjugate(own_piece, zero_padded)),
    "pad": (_DIM, _conjugate(zero_padded, own_piece)),
    "all_to_all": (
        "(Tensor x, int source, int target, int ranks, str group) -> Tensor", _all_to_all,
    ),
}

_library = torch.library.Library("autopar", "FRAGMENT")
for _name, (_schema, _function) in _OPS.items():
    _library.define(f"{_name}{_schema}")
    _library.impl(_name, _function, "CompositeImplicitAutograd")
