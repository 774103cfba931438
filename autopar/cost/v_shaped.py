"""The order of actions of V-shaped pipelines (ZB-V of Qi et al., arXiv 2401.10241, section 6).

Every rank has two chunks: a micro-batch passes forward through the first chunks of all ranks, turns
on the last one, and comes back through the second chunks. So the first rank has both ends of the
chain, and all ranks hold as much at their fullest moment. Backwards are divided (`I`, then `W`).
Where a forward and both halves take the same time there is no bubble but at the start and the end.
"""

from __future__ import annotations

from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

# Kinds of actions by their number in `pipeline.KINDS`, with their chunk.
F0, F1, I0, I1, W0, W1 = (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)


def zbv_order(
    rank: int, ranks: int, microbatches: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each action of a rank its chunk, its micro-batch, and the number of its kind.

    The rank warms up with first chunks until the first micro-batch has come back to it, alternates
    those with second ones, and goes on with turns of both chunks, there and back. It keeps the
    second halves of as many backwards as ranks are before it to the end. With fewer than
    2 `ranks` - 1 micro-batches there are the actions of so many, without those of the missing ones
    (torch.distributed.pipelining.ScheduleZBVZeroBubble, 2.11 to 2.13).
    """
    most, ahead = max(2 * ranks - 1, microbatches), ranks - rank
    turns = chain(
        repeat((F0,), 2 * ahead - 1),
        repeat((F1, F0), rank),
        repeat((F1, I1, W1), ahead),
        repeat((F0, I0, W0, F1, I1, W1), most - 2 * ranks + 1 + rank),
        repeat((I0, W0, F1, I1, W1), ahead - 1),
        repeat((I0, I1), rank),
        repeat((I0, W0), ahead),
        repeat((W1,), rank),
        repeat((W0,), rank),
    )
    kind, chunk = np.array(list(chain.from_iterable(turns)), np.int64).T
    microbatch = np.zeros_like(kind)
    for some in (F0, F1, I0, I1, W0, W1):
        mine = (kind == some[0]) & (chunk == some[1])
        microbatch[mine] = np.arange(np.count_nonzero(mine))
    there = microbatch < microbatches
    return chunk[there], microbatch[there], kind[there]
