"""How much work the blocks of a chain are, as round numbers: what cuts are balanced by.

Prices of two settings that share the ranks of a stage differ little in how blocks compare. So their
seconds are told in parts of those of a mean block, and settings that agree in these are cut
alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autopar.cost.setting import Setting
from autopar.cost.step import send_seconds
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.keyed import Keyed

# What the mean block is worth.
MEAN = 25


class Work(Keyed):
    """As a key: of each block its `forward`, its `backward`, what of that is for `weights`, and
    what is added where it passes its output to another rank (`send`), forward or backward."""

    __slots__ = ("backward", "forward", "send", "weights")

    def __init__(self, forward: Ints, backward: Ints, weights: Ints, send: Ints) -> None:
        self.forward, self.backward, self.weights, self.send = forward, backward, weights, send
        super().__init__(tuple(t.tobytes() for t in (forward, backward, weights, send)))

    @property
    def alike(self) -> bool:
        """Whether all blocks between the first and the last one are worth the same."""
        tables = (self.forward, self.backward, self.weights)
        return all(len(np.unique(table[1:-1])) <= 1 for table in tables)

    @property
    def whole(self) -> Ints:
        """[blocks]: forward and backward."""
        return self.forward + self.backward


def work_of(chain: Chain, setting: Setting) -> Work:
    """That of a chain on the ranks of a setting. Gradients and parameters that replicas exchange
    do not count: settings that shard over other ranks are cut alike."""
    return _work(chain.like, AnyChunks(setting))


@lru_cache(maxsize=4096)
def _work(chain: Chain, key: AnyChunks) -> Work:
    setting = key.setting
    rows = np.array(
        [
            (
                b.forward,
                b.seconds - b.forward,
                b.backward_weights,
                send_seconds(b.boundary_bytes, setting),
            )
            for b in chain.distinct
        ],
        np.float64,
    ).reshape(-1, 4)
    seconds: Floats = rows[chain.which]
    mean = float(seconds[:, :2].sum()) / len(seconds)
    rounded = np.rint(seconds * (MEAN / mean if mean else 0.0)).astype(np.int64)
    return Work(*(np.ascontiguousarray(rounded[:, i]) for i in range(4)))
