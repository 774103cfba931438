"""Products of rows that are sorted by expert with one matrix for each expert.

    multiply   rows[s, a] x matrices[e, a, b] -> [s, b]      row by row with its expert's matrix
    gather     left[s, a], right[s, b] -> [e, a, b]          summed over the rows of each expert

On CUDA torch's grouped kernels run where they can (bfloat16, rows that start on 16 bytes, compute
capability 8.0); elsewhere one product for each expert that has rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch._subclasses import FakeTensor
from torch.nn import functional

Tensor = torch.Tensor
_ALIGNMENT = 16


def has_values(tensor: Tensor) -> bool:
    """Whether it is more than a shape: neither on meta nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@dataclass(frozen=True)
class Groups:
    """`ends[i]`: the first row that is behind those of expert i (int32, on the rows' device)."""

    ends: Tensor
    _known: list[int] = field(default_factory=list)

    def bounds(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, end) of the experts that have rows; on CUDA it waits for them."""
        if not self._known:
            self._known.extend(self.ends.tolist())
        start = 0
        for expert, end in enumerate(self._known):
            if end > start:
                yield expert, start, end
            start = end


def multiply(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """rows[s, a] x matrices[e, a, b] -> [s, b]"""
    if not has_values(rows):
        return rows.new_empty((rows.shape[0], matrices.shape[-1]))
    if _fits(rows, matrices):
        return functional.grouped_mm(rows, matrices, offs=groups.ends)
    result = rows.new_empty((rows.shape[0], matrices.shape[-1]))
    for expert, start, end in groups.bounds():
        torch.mm(rows[start:end], matrices[expert], out=result[start:end])
    return result


def gather(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """left[s, a], right[s, b] -> [e, a, b]; zeros for an expert without rows."""
    count = groups.ends.shape[0]
    if not has_values(left):
        return left.new_empty((count, left.shape[1], right.shape[1]))
    if _fits(left, right):
        return functional.grouped_mm(left.t(), right, offs=groups.ends)
    result = left.new_zeros((count, left.shape[1], right.shape[1]))
    for expert, start, end in groups.bounds():
        torch.mm(left[start:end].t(), right[start:end], out=result[expert])
    return result


def _fits(*tensors: Tensor) -> bool:
    """Whether torch's grouped kernels take these operands."""
    first = tensors[0]
    if first.device.type != "cuda" or not hasattr(functional, "grouped_mm"):
        return False
    if torch.cuda.get_device_capability(first.device) < (8, 0) or not first.numel():
        return False
    return all(t.dtype is torch.bfloat16 and _is_aligned(t) for t in tensors)


def _is_aligned(tensor: Tensor) -> bool:
    size = tensor.element_size()
    strides = [s for s in tensor.stride() if s != 1]
    steps = [s * size % _ALIGNMENT for s in strides]
    return not any(steps) and tensor.data_ptr() % _ALIGNMENT == 0
