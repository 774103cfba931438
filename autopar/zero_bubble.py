"""Which plans can divide their backwards in two, as the zero-bubble schedule does.

What is ruled out runs in principle, but not as it is meant: each reason is one that was seen in
torch 2.13. Which numbers of micro-batches can be interleaved, `autopar.interleaving` says.
"""

from __future__ import annotations

ZERO_LEVELS = (0, 1)


def refused(*, zero: int = 0, ep: int = 1, recomputes: bool = False) -> str:
    """Why a plan can't run zero-bubble; empty when it can."""
    if zero not in ZERO_LEVELS:
        return (
            f"ZeRO-{zero} scatters gradients in every backward, or gathers parameters for it, and "
            "here those of the weights come in another one"
        )
    if recomputes:
        return (
            "a recomputed block would run again for the gradients of values, and once more for "
            "those of each of its weights"
        )
    if ep > 1:
        return "experts that ep splits would exchange their rows in both halves of a backward"
    return ""
