"""Sums of many gradients over a group in few messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's part of a (distributed) tensor."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's parts of the gradients that there are."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def sum_over(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the group; all members pass the same shapes in order."""
    if group.size() == 1:
        return
    with torch.no_grad():
        messages = [Message(bucket, group) for bucket in _buckets(list(tensors))]
        for message in messages:
            message.wait()


class Message:
    """An all-reduce in flight over tensors of one dtype."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._tensors = tensors
        one = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0] if one else torch.cat([t.reshape(-1) for t in tensors])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._flat is self._tensors[0]:
            return
        pieces = torch.split(self._flat, [t.numel() for t in self._tensors])
        for tensor, piece in zip(self._tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


class OverlappedSum:
    """Sums gradients over a group while the backward still runs.

    After `arm`, a bucket leaves as soon as all its gradients of that backward are there, always
    in the same order (the reverse of the parameters'); `finish` sends the rest and waits for all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._armed = False
        trained = [p for p in reversed(parameters) if p.requires_grad]
        sizes = [local_part(p) for p in trained]
        self._buckets: list[list[nn.Parameter]] = []
        for bucket in _buckets(sizes):
            self._buckets.append([trained.pop(0) for _ in bucket])
        self._waiting: list[set[nn.Parameter]] = []
        self._messages: list[Message] = []
        self._sent = 0
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        for parameter in self._bucket_of:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._arrived)

    def arm(self) -> None:
        """The next backward is the last of the step."""
        self._armed = True
        self._waiting = [set(bucket) for bucket in self._buckets]
        self._messages = []
        self._sent = 0

    def finish(self) -> None:
        if not self._armed:
            return
        self._armed = False
        with torch.no_grad():
            self._send(len(self._buckets))
            for message in self._messages:
                message.wait()
        self._messages = []

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._armed:
            return
        assert isinstance(parameter, nn.Parameter)
        self._waiting[self._bucket_of[parameter]].discard(parameter)
        ready = self._sent
        while ready < len(self._buckets) and not self._waiting[ready]:
            ready += 1
        with torch.no_grad():
            self._send(ready)

    def _send(self, end: int) -> None:
        for bucket in self._buckets[self._sent : end]:
            gradients = local_gradients(bucket)
            if gradients:
                self._messages.append(Message(gradients, self._group))
        self._sent = max(self._sent, end)


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Runs of tensors of one dtype of about `BUCKET_BYTES`, in order."""
    found: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        if not found or found[-1][0].dtype != tensor.dtype or size >= BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return found
