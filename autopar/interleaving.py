"""Which parts of the chain a pipeline rank holds, and which micro-batches can be interleaved.

Where a rank has several chunks, a part of the chain follows the one before it on the next rank.
Looped schedules begin again with the first rank behind the last one: chunk c of rank r is part
c * pp + r. V-shaped ones turn there and come back, so that the first rank has the first and the
last part: its chunks are the parts r and 2 pp - 1 - r.

Of looped schedules a round of micro-batches passes through the first chunk of all ranks, then
through the second, and so on. The rules are those of
`torch.distributed.pipelining.ScheduleInterleaved1F1B` (torch 2.11 to 2.13), which relaxes Narayanan
et al. (SC21), where a round is as many micro-batches as there are ranks.
"""

from __future__ import annotations

# Schedules in which every pp rank may have several chunks.
LOOPED = ("interleaved", "zero-bubble")
V_SHAPED = ("zbv",)
CHUNKED = (*LOOPED, *V_SHAPED)
# Of these, those that are also schedules of one chunk.
ONE_CHUNK = ("zero-bubble",)
# Those whose backwards are divided.
DIVIDED = ("zero-bubble", "zbv")
SCHEDULES = ("gpipe", "1f1b", *CHUNKED)


def refused(pp: int, microbatches: int, schedule: str = "interleaved") -> str:
    """Why so many micro-batches can't be interleaved over `pp` ranks; empty when they can."""
    if schedule in V_SHAPED:
        return ""
    rounds = max(1, microbatches // pp)
    if microbatches % rounds:
        return (
            f"{microbatches} micro-batches do not divide into {rounds} rounds of at least {pp} "
            "(torch ScheduleInterleaved1F1B)"
        )
    return ""


def chunks_refused(schedule: str, chunks: int, pp: int) -> str:
    """Why ranks can't have so many chunks under a schedule; empty when they can."""
    if schedule in CHUNKED and pp == 1:
        return "one stage has nothing to interleave with"
    if schedule in V_SHAPED and chunks != 2:
        return f"{schedule} has 2 chunks: one on the way there and one on the way back"
    if schedule in CHUNKED and chunks < 2 and schedule not in ONE_CHUNK:
        return f"{schedule} has 2 chunks or more"
    if schedule not in CHUNKED and chunks > 1:
        return f"{schedule} has 1 chunk, several have {', '.join(CHUNKED)}"
    return ""


def round_size(pp: int, microbatches: int) -> int:
    """Micro-batches of a round; `pp` where torch refuses (Megatron's last round is shorter)."""
    if refused(pp, microbatches):
        return pp
    return microbatches // max(1, microbatches // pp)


def waiting(schedule: str, pp: int, microbatches: int) -> int:
    """Micro-batches that lie received before a part that a larger round keeps waiting."""
    if schedule in V_SHAPED:
        return 0
    return max(0, round_size(pp, microbatches) - pp)


def parts_of(schedule: str, rank: int, pp: int, chunks: int) -> tuple[int, ...]:
    """The parts of the chain that a rank holds, by its chunks."""
    if schedule in V_SHAPED:
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * chunks, pp))


def rank_of(schedule: str, part: int, pp: int) -> int:
    """The rank that holds a part."""
    if schedule in V_SHAPED and part >= pp:
        return 2 * pp - 1 - part
    return part % pp
