"""Parts of a mean add up to the mean over all targets, also where a rank has none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from autopar.runtime import collectives  # noqa: F401 - registers the ops
from tests.warm_ranks import run_on_ranks

ops = torch.ops.autopar
IGNORED = -100


def check() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    name = dist.group.WORLD.group_name
    for ignored in (0, 3, 6, 12):  # of 12 targets: 6 are all of the first rank's
        torch.manual_seed(1)
        logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
        target = torch.randint(5, (12,))
        target[:ignored] = IGNORED
        whole = cross_entropy(logits, target)
        mine = logits.detach().chunk(ranks)[rank].requires_grad_()
        own = target.chunk(ranks)[rank]
        part = ops.loss_share(cross_entropy(mine, own), own, IGNORED, ranks, name)
        total = part.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, whole.detach(), equal_nan=True)
        if ignored < 12:
            part.backward()
            (expected,) = torch.autograd.grad(whole, logits)
            torch.testing.assert_close(mine.grad, expected.chunk(ranks)[rank])


def test_parts_add_up_to_the_mean() -> None:
    run_on_ranks(check, 2)
