"""How much work the blocks of a chain are, and how many bytes, as round numbers: what cuts are
balanced by.

Prices of two settings that share the ranks of a stage differ little in how blocks compare. So their
seconds are told in parts of those of a mean block, and settings that agree in these are cut
alike. Few micro-batches per rank are told too; of more, balance is all that counts, and what a
schedule takes differs little from one number to the next.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from autopar.cost.memory import gradient_bytes, state_bytes
from autopar.cost.setting import Setting
from autopar.cost.step import block_times
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.keyed import Keyed

# What the mean block is worth.
MEAN = 25
# Micro-batches per pp rank that more of them are taken for.
ROUNDS = 4
# Sends, and ends of a step, that are less of the whole do not count.
LITTLE = 0.05


class Work(Keyed):
    """As a key: the `microbatches`, and of each block for one of them its `forward`, its `backward`
    and what of that is for `weights`; what is added where it passes its output to another rank
    (`send`), forward or backward; and what its rank does for it once at the `end` of a step."""

    __slots__ = ("backward", "end", "forward", "microbatches", "send", "weights")

    def __init__(
        self, microbatches: int, forward: Ints, backward: Ints, weights: Ints, send: Ints, end: Ints
    ) -> None:
        self.microbatches = microbatches
        self.forward, self.backward, self.weights = forward, backward, weights
        self.send, self.end = send, end
        tables = (forward, backward, weights, send, end)
        super().__init__((microbatches, *(t.tobytes() for t in tables)))

    @property
    def alike(self) -> bool:
        """Whether all blocks between the first and the last one are worth the same."""
        tables = (self.forward, self.backward, self.weights, self.end)
        return all(len(np.unique(table[1:-1])) <= 1 for table in tables)

    @property
    def share(self) -> Floats:
        """[blocks]: of all that blocks take in a step, the share of each."""
        return _shares(self.microbatches * (self.forward + self.backward) + self.end)


class Load(Keyed):
    """As a key: how much of its rank's memory each block takes (`each`)."""

    __slots__ = ("each",)

    def __init__(self, each: Ints) -> None:
        self.each = each
        super().__init__((each.tobytes(),))

    @property
    def share(self) -> Floats:
        """[blocks]: of the bytes of all blocks, the share of each."""
        return _shares(self.each)


def _shares(values: Ints) -> Floats:
    return np.asarray(values / max(1, int(values.sum())))


def work_of(chain: Chain, setting: Setting) -> Work:
    """That of a chain on the ranks of a setting. The end of a step is that of full shards: settings
    that shard over fewer ranks are cut alike."""
    return _work(chain.like, AnyChunks(replace(setting, mesh=setting.mesh.shape)))


@lru_cache(maxsize=4096)
def _work(chain: Chain, key: AnyChunks) -> Work:
    setting = key.setting
    rows = []
    for b in chain.distinct:
        times = block_times(b, setting)
        end = times.end_dp + times.end_tp + times.end_optimizer
        rows.append((b.forward, b.seconds - b.forward, b.backward_weights, times.send, end))
    seconds: Floats = np.array(rows, np.float64).reshape(-1, 5)[chain.which]
    microbatches = min(setting.microbatches, ROUNDS * setting.mesh.pp)
    seconds[:, 4] *= microbatches / setting.microbatches
    total = float(seconds[:, :2].sum())
    for column, often in ((3, 2.0), (4, 1 / microbatches)):
        if often * seconds[:, column].sum() < LITTLE * total:
            seconds[:, column] = 0.0
    rounded = np.rint(seconds * (MEAN * len(seconds) / total if total else 0.0)).astype(np.int64)
    return Work(microbatches, *(np.ascontiguousarray(rounded[:, i]) for i in range(5)))


def load_of(chain: Chain, setting: Setting) -> Load:
    """That of a chain on the ranks of a setting, with as many micro-batches alive as it has ranks.
    Settings that shard over fewer ranks are cut alike."""
    return _load(chain.like, AnyChunks(replace(setting, mesh=setting.mesh.shape)))


@lru_cache(maxsize=4096)
def _load(chain: Chain, key: AnyChunks) -> Load:
    setting = key.setting
    alive = min(setting.microbatches, setting.mesh.pp)
    nbytes = chain.ints(lambda b: state_bytes(b, setting) + gradient_bytes(b, setting))
    nbytes = nbytes + alive * chain.ints(lambda b: b.saved_bytes - b.loose_bytes)
    mean = nbytes.mean()
    return Load(np.rint(nbytes * (MEAN / mean if mean else 0.0)).astype(np.int64))
