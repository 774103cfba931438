"""Adafactor over sharded parameters: the update that `torch.optim.Adafactor` makes on one device.

torch's own can't: it changes sums over shards in place, which DTensor refuses, and where a fused
weight is held in pieces it would take each piece for a matrix. Here every sum over a parameter
(squares of its rows and columns, of all of it, of its update) adds up the rank's own part, the
pieces on the rank, and the ranks that hold other shards, many parameters in one all-reduce.

Per matrix [..., r, c] there are the means of squared gradients of its rows, [..., r, 1], and of its
columns, [..., 1, c], sharded as the parameter is along the dim that is left; of a vector all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import PlanError
from autopar.piece_name import Piece, by_whole, parse_piece

Tensor = torch.Tensor
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


class Adafactor(torch.optim.Optimizer):
    """Options as those of `torch.optim.Adafactor` (Shazeer and Stern 2018, arXiv 1804.04235).

    `params`: `program.named_parameters()`, as pieces of a weight are known by their names; all
    ranks call `step` together.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        options = dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay)
        super().__init__(params, options)
        for group in self.param_groups:
            _wholes(group)  # raises for pieces that can't be updated

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            wholes = [w for w in _wholes(group) if any(p.value.grad is not None for p in w.parts)]
            for whole in wholes:
                for part in whole.parts:
                    part.begin(self.state[part.value])
            _measure(wholes)
            for whole in wholes:
                whole.average(group)
            _total_rows(wholes)
            _measure_updates(wholes, group)
            for whole in wholes:
                whole.apply(group)
        return loss


@dataclass
class _Part:
    """A parameter, or a piece of one, on this rank, with what a step finds out about it."""

    value: nn.Parameter
    piece: Piece | None
    state: dict[str, Any] = field(init=False)
    own: Tensor = field(init=False)
    gradient: Tensor = field(init=False)
    # Sums of squares, of the whole parameter after `_Whole.summed`.
    size: Tensor = field(init=False)
    rows: Tensor = field(init=False)
    columns: Tensor = field(init=False)
    change: Tensor = field(init=False)
    row_mean: Tensor = field(init=False)

    @property
    def is_matrix(self) -> bool:
        return self.value.dim() > 1

    def begin(self, state: dict[str, Any]) -> None:
        """`own`, `gradient`: the rank's part of both; makes the state in the first step."""
        self.state = state
        given = self.value.grad if self.value.grad is not None else torch.zeros_like(self.value)
        self.own, self.gradient = _local(self.value).detach(), _local(given)
        if not state:
            state["step"] = torch.tensor(0.0)
            if self.is_matrix:
                state["row_var"], state["col_var"] = self._means(-1), self._means(-2)
            else:
                state["variance"] = torch.zeros_like(self.value)
        state["step"] += 1

    def _means(self, dim: int) -> Tensor:
        """Zeros, laid out as the parameter, with one entry along `dim` (from the end)."""
        shape, whole = list(self.own.shape), list(self.value.shape)
        shape[dim] = whole[dim] = 1
        local = self.own.new_zeros(shape)
        if not isinstance(self.value, DTensor):
            return local
        gone = self.sharding_axes(dim)
        placements = [
            Replicate() if axis in gone else placement
            for axis, placement in enumerate(self.value.placements)
        ]
        return DTensor.from_local(
            local,
            self.value.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(whole),
            stride=torch.empty(whole, device="meta").stride(),
        )

    def sharding_axes(self, dim: int | None) -> list[int]:
        """Mesh axes that split `dim` (from the end; None: any dim)."""
        if not isinstance(self.value, DTensor):
            return []
        wanted = None if dim is None else self.value.dim() + dim
        split = [getattr(p, "dim", None) for p in self.value.placements]
        return [i for i, d in enumerate(split) if d is not None and wanted in (None, d)]

    def divides(self, dim: int) -> bool:
        """Whether the pieces of the parameter lie along `dim` (from the end)."""
        return self.piece is not None and self.piece.dim == self.value.dim() + dim

    def update(self, eps1: float) -> Tensor:
        """The gradient over the root of the estimated second moment: one copy of the part."""
        if self.is_matrix:
            estimate = _local(self.state["row_var"]) @ _local(self.state["col_var"])
            estimate.div_(self.row_mean.clamp(min=eps1).to(estimate.dtype))
        else:
            estimate = _local(self.state["variance"]).clone()
        return estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(self.gradient)


@dataclass
class _Whole:
    """A parameter of the user's model: its part on this rank, or its pieces."""

    parts: list[_Part]

    @property
    def is_matrix(self) -> bool:
        return self.parts[0].is_matrix

    @property
    def elements(self) -> int:
        return sum(p.value.numel() for p in self.parts)

    def length(self, dim: int) -> int:
        """Entries along `dim` (from the end) of the whole."""
        if self.parts[0].divides(dim):
            return sum(int(p.value.shape[dim]) for p in self.parts)
        return int(self.parts[0].value.shape[dim])

    def summed(self, name: str, *, over: int | None) -> None:
        """Pieces along `over` (None: any dim) hold terms of the same sum."""
        first = self.parts[0]
        if first.piece is not None and (over is None or first.divides(over)):
            total = sum(getattr(p, name) for p in self.parts)
            for part in self.parts:
                setattr(part, name, total)

    def average(self, group: dict[str, Any]) -> None:
        """Move the running means towards those of this step."""
        self.summed("size", over=None)
        if self.is_matrix:
            self.summed("rows", over=-1)
            self.summed("columns", over=-2)
        for part in self.parts:
            new = float(part.state["step"].item()) ** group["beta2_decay"]
            found = (
                {"variance": part.gradient.square()}
                if not self.is_matrix
                else {
                    "row_var": part.rows / self.length(-1),
                    "col_var": part.columns / self.length(-2),
                }
            )
            for name, mean in found.items():
                kept = _local(part.state[name])
                kept.lerp_(mean.to(kept.dtype), new)

    def apply(self, group: dict[str, Any]) -> None:
        self.summed("change", over=None)
        count = self.elements**0.5
        for part in self.parts:
            step = float(part.state["step"].item())
            rate = min(group["lr"], 1 / step**0.5)
            rate = (part.size.sqrt() / count).clamp(min=group["eps"][1]) * rate
            clipped = (part.change.sqrt() / (count * group["d"])).clamp(min=1.0)
            if group["weight_decay"]:
                part.own.mul_(1 - group["lr"] * group["weight_decay"])
            update = part.update(_epsilon(part, group)).mul_((rate / clipped).to(part.own.dtype))
            part.own.sub_(update)


def _wholes(group: dict[str, Any]) -> list[_Whole]:
    """The parameters of a group, pieces together."""
    values: list[nn.Parameter] = group["params"]
    names = group.get("param_names") or [""] * len(values)
    named = dict(zip(names, values, strict=True))
    found = []
    for whole, pieces in by_whole(n for n in names if n).items():
        parts = [_Part(named[str(piece)], piece) for piece in pieces]
        _check_pieces(whole, parts)
        found.append(_Whole(parts))
    single = [v for n, v in zip(names, values, strict=True) if not n or parse_piece(n) is None]
    return found + [_Whole([_Part(value, None)]) for value in single]


def _check_pieces(whole: str, parts: list[_Part]) -> None:
    """Pieces of a matrix share the sums of rows or columns: they must be split alike there."""
    shared = [dim for dim in (-1, -2) if parts[0].is_matrix and parts[0].divides(dim)]
    for dim in shared:
        other = -3 - dim
        if len({tuple(p.sharding_axes(other)) for p in parts}) > 1:
            raise PlanError(
                f"Adafactor can't update {whole!r}: its pieces "
                f"{', '.join(str(p.piece) for p in parts)} are split over ranks in different ways",
                next_step="plan with another optimizer, or pin weights=split or tp=1",
            )


def _measure(wholes: list[_Whole]) -> None:
    """Sums of squares: of the gradient's rows and columns, and of the parameter."""
    sums = _Sums()
    for part in (p for w in wholes for p in w.parts):
        part.size = sums.add(_squares(part.own), part, None)
        if part.is_matrix:
            part.rows = sums.add(_squares(part.gradient, -1), part, -1)
            part.columns = sums.add(_squares(part.gradient, -2), part, -2)
    sums.finish()


def _total_rows(wholes: list[_Whole]) -> None:
    """`row_mean`: the mean over the rows of the running means."""
    sums = _Sums()
    matrices = [w for w in wholes if w.is_matrix]
    for part in (p for w in matrices for p in w.parts):
        rows = _local(part.state["row_var"]).sum(-2, keepdim=True, dtype=part.rows.dtype)
        part.row_mean = sums.add(rows, part, -2)
    sums.finish()
    for whole in matrices:
        whole.summed("row_mean", over=-2)
        for part in whole.parts:
            part.row_mean = part.row_mean / whole.length(-2)


def _measure_updates(wholes: list[_Whole], group: dict[str, Any]) -> None:
    """`change`: the sum of squares of an update, which is clipped by its size."""
    sums = _Sums()
    for part in (p for w in wholes for p in w.parts):
        part.change = sums.add(_squares(part.update(_epsilon(part, group))), part, None)
    sums.finish()


class _Sums:
    """Tensors to be added up over the ranks that hold other shards, in one message per axis."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[DeviceMesh, int], list[Tensor]] = {}

    def add(self, own: Tensor, part: _Part, dim: int | None) -> Tensor:
        """`own`, which `finish` makes the sum over the ranks that split `dim` of the parameter."""
        for axis in part.sharding_axes(dim):
            assert isinstance(part.value, DTensor)
            self._wanted.setdefault((part.value.device_mesh, axis), []).append(own)
        return own

    def finish(self) -> None:
        # Axis by axis: a tensor that two axes split is summed over one of them first.
        for (mesh, axis), tensors in sorted(self._wanted.items(), key=lambda item: item[0][1]):
            if mesh.size(axis) == 1:
                continue
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.all_reduce(flat, group=mesh.get_group(axis))
            totals = torch.split(flat, [t.numel() for t in tensors])
            for tensor, total in zip(tensors, totals, strict=True):
                tensor.copy_(total.view_as(tensor))


def _squares(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Sum of squares, along a dim or of all, in float32 at least."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None, dtype=dtype)
    return norm.square_()


def _epsilon(part: _Part, group: dict[str, Any]) -> float:
    given = group["eps"][0]
    return torch.finfo(part.own.dtype).eps if given is None else float(given)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
