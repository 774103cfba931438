"""Which micro-batches can be interleaved, and in rounds of how many.

Several chunks of a pp rank take turns: a round of micro-batches passes through the first chunk of
all ranks, then through the second, and so on. The rules are those of
`torch.distributed.pipelining.ScheduleInterleaved1F1B` (torch 2.11 to 2.13), which relaxes Narayanan
et al. (SC21), where a round is as many micro-batches as there are ranks.
"""

from __future__ import annotations

# Schedules in which every pp rank has several chunks.
LOOPED = ("interleaved", "zero-bubble")


def refused(pp: int, microbatches: int) -> str:
    """Why so many micro-batches can't be interleaved over `pp` ranks; empty when they can."""
    rounds = max(1, microbatches // pp)
    if microbatches % rounds:
        return (
            f"{microbatches} micro-batches do not divide into {rounds} rounds of at least {pp} "
            "(torch ScheduleInterleaved1F1B)"
        )
    return ""


def round_size(pp: int, microbatches: int) -> int:
    """Micro-batches of a round; `pp` where torch refuses (Megatron's last round is shorter)."""
    if refused(pp, microbatches):
        return pp
    return microbatches // max(1, microbatches // pp)


def waiting(pp: int, microbatches: int) -> int:
    """Micro-batches that lie received before a part that a larger round keeps waiting."""
    return max(0, round_size(pp, microbatches) - pp)
