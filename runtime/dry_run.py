"""One rank of a job of any size, in this process alone: what runs is real, what it computes is not.

    with dry_run(rank=0, ranks=64) as shapes_only:
        ranks = Ranks.create(plan.mesh)
        with shapes_only:
            program = DistributedProgram(stage_programs, plan, ranks, model)
            program.step(empty_batch(program))

Tensors have shapes and no memory (torch's `FakeTensorMode`), collectives move nothing (torch's
"fake" process group). So parameters of any size are made, sharded, gathered and updated as on a
cluster, which `autopar.runtime.live_bytes` can watch. The model should be on the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from autopar.errors import UsageError
from autopar.runtime.program import DistributedProgram
from autopar.runtime.torch_compat import fake_store, without_values


@contextmanager
def dry_run(rank: int, ranks: int) -> Iterator[FakeTensorMode]:
    """Be rank `rank` of `ranks`, which do not exist; yields the mode in which tensors have no
    memory. Raises `UsageError` where there is a process group already."""
    if dist.is_initialized():
        raise UsageError(
            "a dry run makes a process group of its own, and there is one already",
            next_step="run it in a process without torchrun",
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_store())
    try:
        with without_values(), warnings.catch_warnings():
            # The group that moves nothing waits for nothing.
            warnings.filterwarnings("ignore", message="Set timeout is now only")
            # Constants of the captured graphs are real.
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


def empty_batch(program: DistributedProgram) -> dict[str, Any]:
    """This dp rank's rows of the inputs that this rank's stages read; call it with `shapes_only`
    entered."""
    rules = program._rules
    found = {}
    for name, spec in rules.inputs.items():
        rows, *rest = spec.shape
        count = 1 if name in rules.whole else rules.microbatches
        found[name] = torch.zeros((rows * count, *rest), dtype=spec.dtype)
    return {**found, **program._programs[0].fixed}
