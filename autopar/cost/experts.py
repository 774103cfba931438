"""Seconds of a layer's experts on one rank: two grouped products, and rows that are moved.

Rows are taken to be routed uniformly and independently. n of a layer's rows then fall on each of r
ranks on average, and on the busiest, for which the others wait, about

    n + sqrt(2 n (1 - 1/r) ln r)

(the bound on the mean of the greatest of r sub-Gaussian numbers; Boucheron, Lugosi, Massart,
Concentration Inequalities, theorem 2.5); none where routers are made to be even
(`Device.even_experts`). Where a load is known (`autopar.expect_load`) it is the busiest rank's
share of that. Within a rank each expert gets its even share. Sorting the rows, a few bytes of each,
is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, sqrt
from statistics import mean
from typing import NamedTuple

from autopar.cluster import Cluster, Device
from autopar.cost.collective import collective_time
from autopar.cost.compute import OpTime, op_time
from autopar.cost.matmul_efficiency import matmul_seconds
from autopar.experts import EXCHANGED
from autopar.experts.expected import busiest_shares
from autopar.op_call import OpCall, Operand
from autopar.program import TensorType

# Elements of a 16-bit row that starts on 16 bytes: others keep batched products off matrix units.
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class ExpertsTime:
    """`weights`: the part of `backward` for the gradients of the experts' weights."""

    forward: OpTime
    backward: float
    weights: float
    bytes_moved: float


def busiest_rows(rows: float, ranks: int) -> float:
    """Rows on the busiest of `ranks`, of `rows` on average."""
    if ranks <= 1 or rows <= 0:
        return rows
    return rows + sqrt(2 * rows * (1 - 1 / ranks) * log(ranks))


def assumed_imbalance(op: OpCall) -> float:
    """Rows that a rank has to hold, over the mean, in the layer where they are most; 1 where no
    load is assumed."""
    if not op.expert_load:
        return 1.0
    here = _operand(op, "down").shape[0]
    ranks = len(op.expert_load[0]) // here
    return ranks * max(busiest_shares(op.expert_load, ranks))


def experts_time(op: OpCall, device: Device) -> ExpertsTime:
    """Price of a call whose types are local: its experts may be a part of all."""
    sizes = _Sizes.of(op, device)
    dtype = str(sizes.up.dtype).removeprefix("torch.")

    def product(columns: int, inner: int) -> float:
        return matmul_seconds(sizes.here, ceil(sizes.each), columns, inner, dtype, device)

    # Rows are what is summed over: their number is no stride, so it need not be even.
    summed = _ALIGNED * ceil(sizes.each / _ALIGNED)

    def of_weight(left: int, right: int) -> float:
        return matmul_seconds(sizes.here, left, right, summed, dtype, device)

    w, h, i = sizes.width, sizes.hidden, sizes.inner
    # Each part is written once and read once: gathered, projected, activated, made, weighted.
    row_bytes = 2 * sizes.rows * (2 * h + w + i) * sizes.up.dtype.itemsize
    moved = float(row_bytes + sum(t.nbytes for t in op.types) + op.result.nbytes)
    forward = op_time(product(w, h) + product(h, i), moved, device)
    if not any(t.requires_grad for t in (*op.types, *op.results)):
        return ExpertsTime(forward, 0.0, 0.0, moved)
    # The activation is computed again, and every value of the forward has a gradient.
    grads = sum(t.nbytes for t in op.types if t.requires_grad)
    values = product(i, h) + (product(h, w) if op.types[0].requires_grad else 0.0)
    weights = of_weight(w, h) if sizes.up.requires_grad else 0.0
    weights += of_weight(h, i) if sizes.down.requires_grad else 0.0
    backward = op_time(values + weights, 2 * moved + grads, device).seconds
    return ExpertsTime(forward, backward, min(weights, backward), moved)


class ExchangeTime(NamedTuple):
    """Seconds of the all-to-alls of a call: on the way to the experts and back, and in the backward
    of what was sent there and back."""

    there: float = 0.0
    back: float = 0.0
    gradient_there: float = 0.0
    gradient_back: float = 0.0

    @property
    def forward(self) -> float:
        return self.there + self.back

    @property
    def backward(self) -> float:
        return self.gradient_there + self.gradient_back


def exchange_seconds(op: OpCall, stride: int, cluster: Cluster, parts: int = 1) -> ExchangeTime:
    """Seconds of the all-to-alls of a call whose tokens are spread over ranks; zero for others.
    There: counts, rows and their weights; back: rows.

    `parts`: of so many neighbours that have the same tokens each sends a part of the rows; they
    gather what comes, and before rows go back they sum them up and keep a part each.
    """
    ranks = _spread(op)
    if ranks <= 1:
        return ExchangeTime()
    sizes = _Sizes.of(op, cluster.device)
    row = sizes.hidden * sizes.up.dtype.itemsize

    def seconds(nbytes: float) -> float:
        sent = collective_time("all_to_all", nbytes / parts, ranks, stride, cluster)
        if parts == 1:
            return sent
        # The way back sums them up and scatters them, which takes as long.
        return sent + collective_time("all_gather", nbytes / ranks, parts, 1, cluster)

    rows = ranks * sizes.rows
    weight = _operand(op, "weights")
    there, weights = seconds(rows * row), seconds(rows * weight.dtype.itemsize)
    counts = seconds(8.0 * ranks * int(op.named("experts")))
    if not any(t.requires_grad for t in op.types):
        return ExchangeTime(counts + there + weights, there)
    return ExchangeTime(counts + there + weights, there, there + weights, there)


def _spread(op: OpCall) -> int:
    """Over how many ranks the tokens are spread whose rows come to this one."""
    return int(op.named("ranks") if op.op_name == EXCHANGED else op.named("spread", 1))


def backward_flops(op: OpCall, flops: float) -> float:
    """FLOPs of the backward, from those of the forward: each product again for each factor that
    needs a gradient. What goes into the second product always needs one."""
    up, down, inner, width = _projections(op)
    first = flops * width / (width + inner)
    needed = first * (op.types[0].requires_grad + up.requires_grad)
    return needed + (flops - first) * (1 + down.requires_grad)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """`rows` of the busiest rank, `each` of an expert of it; `width`: columns of gate and up."""

    here: int
    rows: float
    each: float
    hidden: int
    inner: int
    width: int
    up: TensorType
    down: TensorType

    @classmethod
    def of(cls, op: OpCall, device: Device) -> _Sizes:
        up, down, inner, width = _projections(op)
        here, hidden = down.shape[0], _operand(op, "hidden").shape[-1]
        experts = int(op.named("experts"))
        rows = _operand(op, "index").numel * _spread(op) * here / experts
        if op.expert_load:
            ranks = len(op.expert_load[0]) // here
            rows *= ranks * mean(busiest_shares(op.expert_load, ranks))
        elif not device.even_experts:
            rows = busiest_rows(rows, max(1, experts // max(1, here)))
        return cls(here, rows, rows / max(1, here), hidden, inner, width, up, down)


def _projections(op: OpCall) -> tuple[TensorType, TensorType, int, int]:
    """Both weights, the inner size of an expert, and the columns of gate and up."""
    up, down = _operand(op, "up"), _operand(op, "down")
    transposed = bool(op.named("transposed"))
    parts = 2 if isinstance(op.named("gate"), Operand) else 1
    return up, down, down.shape[1 if transposed else 2], parts * up.shape[2 if transposed else 1]


def _operand(op: OpCall, name: str) -> TensorType:
    found = op.named(name)
    assert isinstance(found, Operand)
    return op.types[found.index]
