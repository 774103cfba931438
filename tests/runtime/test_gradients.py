"""Many gradients in few messages, sent while the backward runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime import gradients
from autopar.runtime.ranks import Ranks
from tests.warm_ranks import run_on_ranks


def test_buckets_hold_one_dtype_and_about_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 16)
    dtypes = [torch.float32] * 5 + [torch.bfloat16] * 2
    buckets = gradients._buckets([torch.zeros(2, dtype=dtype) for dtype in dtypes])
    assert [len(bucket) for bucket in buckets] == [2, 2, 1, 2]


def test_sum_over_one_rank_changes_nothing(one_rank: Ranks) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    gradients.sum_over([tensor], one_rank.group("dp"))
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).T)


def sums() -> tuple[list[float], list[float], list[int]]:
    """Two backwards with gradient rank + 1, the second armed; small buckets, an idle parameter."""
    group, factor = dist.group.WORLD, dist.get_rank() + 1
    gradients.BUCKET_BYTES = 16
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    overlapped = gradients.OverlappedSum(parameters, group)
    in_flight = []
    for last in (False, True):
        if last:
            overlapped.arm()
        torch.stack([(p * factor).sum() for p in parameters[:-1]]).sum().backward()
        in_flight.append(len(overlapped._messages))
        overlapped.finish()
    assert parameters[-1].grad is None
    # Strided, of several dtypes, more than one message.
    strided = [torch.full((3, 2), float(factor)).T, torch.full((4,), factor, dtype=torch.float64)]
    gradients.sum_over(strided, group)
    values = [float(v) for p in parameters[:-1] for v in gradients.local_gradients([p])[0]]
    return values, [float(t.mean()) for t in strided], in_flight


def test_sums_of_two_ranks() -> None:
    # Per backward 1 + 2 over the ranks, two backwards. The bucket that holds the idle parameter
    # (the last one, so in the first bucket) keeps all from leaving before `finish`.
    expected = ([6.0] * 8, [3.0, 3.0], [0, 0])
    assert run_on_ranks(sums, 2, timeout_seconds=60) == [expected, expected]
