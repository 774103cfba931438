"""Rows of one layer and micro-batch between ranks that split its experts: what is on its way.

All-to-alls are started and waited for apart. On CUDA counts and the first way have a stream of
their own: they wait for what they send, and not for work that was queued after it, while the host
did not know yet how many rows there are.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autopar.experts.assumed_rows import assumed_rows
from autopar.experts.grouped_matmul import has_values

Tensor = torch.Tensor


class Journey:
    """`sent` and `received`: rows to and from each rank, known once `learn` was called; `rows`:
    those that tokens have, dropped ones included. Without values the exchange is taken to be even.
    """

    def __init__(self, rows: int, here: int, ranks: int, group: Any) -> None:
        self.rows = rows
        self.sent: list[int] = []
        self.received: list[int] = []
        self._here, self._ranks, self._group = here, ranks, group
        self._under_way: dict[str, tuple[Tensor, Any]] = {}
        self._counts: _Counts | None = None
        self._stream: Any = None
        self._packed: Any = None

    def announce(self, index: Tensor, last: int) -> Tensor:
        """Begin to tell all ranks how many rows each of their experts gets; the order in which rows
        are sent: places in `index`, read row by row, those that are dropped last.

        Choices of experts that no rank has, up to `last`, are dropped: they go nowhere. Raises
        `IndexError` on the CPU for an index above it.
        """
        flat = index.reshape(-1)
        if not has_values(index):
            return flat.new_empty(flat.shape, dtype=torch.int64)
        experts = self._here * self._ranks
        if index.device.type == "cpu" and flat.numel():
            low, high = int(flat.min()), int(flat.max())
            if low < 0 or high > last:
                wrong = low if low < 0 else high
                raise IndexError(f"expert {wrong} is chosen, there are {experts}")
        expert, order = torch.sort(flat, stable=True)
        numbers = torch.arange(experts, device=index.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, numbers, right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        self._counts = _Counts(counts, self._ranks, self._group)
        return order

    def packed(self) -> None:
        """What is sent first is made, or queued: the first way waits for that."""
        if self._counts is not None and self._counts.stream is not None:
            self._stream = self._counts.stream
            self._packed = torch.cuda.current_stream().record_event()

    def learn(self, order: Tensor) -> Tensor:
        """Wait for the counts of all ranks; which of this rank's experts each row is for that comes
        to it."""
        if self._counts is None:
            each, more = divmod(self.rows, self._ranks)
            self.sent = [each + (rank < more) for rank in range(self._ranks)]
            self.received = [assumed_rows(count) for count in self.sent]
            return order.new_empty((sum(self.received),))
        (self.sent, self.received), incoming = self._counts.known()
        self._counts = None
        mine = torch.arange(self._here, device=incoming.device).repeat(self._ranks)
        return mine.repeat_interleave(incoming, output_size=sum(self.received))

    def depart(
        self, what: str, rows: Tensor, *, there: bool, first: bool = False, room: int = 0
    ) -> Tensor:
        """Start to send rows to their experts, or back. Returns what arrives in their place, to be
        read after `arrive(what)`; with `room` it has that many rows, the last of them zero. `first`
        waits only for what was `packed`."""
        to, from_ = (self.sent, self.received) if there else (self.received, self.sent)
        count, work = sum(from_), None
        apart = self._stream if first else None
        with nullcontext() if apart is None else torch.cuda.stream(apart):
            if apart is not None:
                apart.wait_event(self._packed)
            result = rows.new_empty((max(room, count), *rows.shape[1:]))
            if room > count:
                result[count:] = 0
            if self._group is not None:
                work = dist.all_to_all_single(
                    result[:count], rows.contiguous(), from_, to, group=self._group, async_op=True
                )
        if apart is not None:
            result.record_stream(torch.cuda.current_stream())
        assert what not in self._under_way, f"{what} are under way already"
        self._under_way[what] = result, work
        return result

    def under_way(self, what: str) -> Tensor:
        """What departed, not to be read yet."""
        return self._under_way[what][0]

    def arrive(self, what: str) -> Tensor:
        """Wait for what departed: the device does on CUDA, else the host."""
        result, work = self._under_way.pop(what)
        if work is not None:
            work.wait()
        return result


class _Counts:
    """How many rows each rank sends to each expert, as ranks tell each other. `stream`: on CUDA."""

    def __init__(self, counts: Tensor, ranks: int, group: Any) -> None:
        self.stream: Any = None
        self._ranks, self._counts, self._incoming = ranks, counts, counts
        if counts.device.type != "cuda":
            self._incoming = torch.empty_like(counts)
            self._work = dist.all_to_all_single(self._incoming, counts, group=group, async_op=True)
            return
        reader = torch.cuda.current_stream()
        self.stream = _stream(counts.device)
        self.stream.wait_stream(reader)
        counts.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            self._incoming = torch.empty_like(counts)
            dist.all_to_all_single(self._incoming, counts, group=group)
            totals = self._totals()
            self._host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
            self._host.copy_(totals, non_blocking=True)
            self._event = self.stream.record_event()
        self._incoming.record_stream(reader)

    def known(self) -> tuple[list[list[int]], Tensor]:
        """Rows to each rank and from each rank, and the rows that come for each expert here."""
        if self.stream is None:
            self._work.wait()
            return self._totals().tolist(), self._incoming
        self._event.synchronize()
        return self._host.tolist(), self._incoming

    def _totals(self) -> Tensor:
        both = torch.stack([self._counts, self._incoming])
        return both.view(2, self._ranks, -1).sum(-1)


@cache
def _stream(device: torch.device) -> Any:
    kind: Any = torch.cuda.Stream
    return kind(device)
