"""Random numbers under sharding: equal on ranks that hold a value whole, own ones on shards.

During a step the default generators follow a stream of the run's seed, the step, and the ranks'
places on the pp and dp axes, so all tp ranks draw the same. Around an op that is sharded over tp
the graph has

    x_1 = autopar.own_random(x, 'tp')        the generators move to a stream of this tp rank
    y = dropout(x_1, 0.1, True)
    y_1 = autopar.same_random(y, 'tp')       and back

and the same with 'cp', perhaps around both.

The seed of a rank's own stream is drawn from the common one, so recomputation, which puts the
generators back, draws the same numbers again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor

from autopar.runtime.op_library import define_identity
from autopar.runtime.ranks import Ranks
from autopar.runtime.torch_compat import resolve_group

Tensor = torch.Tensor
_LARGEST = 2**62
# The generator and its state in the common stream, while an op draws from a rank's own.
_common: list[tuple[torch.Generator, Tensor]] = []


class RandomStream:
    """The random numbers of one rank's steps. `seed` (default: torch's own, of rank 0) names the
    run; every rank has to make the stream, as they agree on the seed."""

    def __init__(self, ranks: Ranks, seed: int | None = None) -> None:
        found = [torch.initial_seed() if seed is None else seed]
        if active_fake_mode() is None:  # a dry run has no values, and nobody to agree with
            dist.broadcast_object_list(found, src=0, group=ranks.control)
        self.seed = int(found[0])
        self.steps = 0
        self._device = ranks.device
        self._pp, self._dp = ranks.index("pp"), ranks.index("dp")
        self._microbatches: Counter[int] = Counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The generators follow the stream inside, and are as they were afterwards."""
        before = _state(self._device)
        _common.clear()
        self._microbatches.clear()
        _seed(_mixed(self.seed, self.steps, self._dp, 1 + self._pp), self._device)
        try:
            yield
        finally:
            _restore(before)
            self.steps += 1

    @contextmanager
    def shared(self, stage: int) -> Iterator[None]:
        """For values that every stage computes for itself: the same numbers on all stages, of
        which this rank may have several."""
        before = _state(self._device)
        microbatch = self._microbatches[stage]
        _seed(_mixed(self.seed, self.steps, self._dp, 0, microbatch), self._device)
        self._microbatches[stage] += 1
        try:
            yield
        finally:
            _restore(before)


def shared_numbers(stream: RandomStream | None, stage: int) -> Any:
    return stream.shared(stage) if stream is not None else nullcontext()


def _mixed(*numbers: int) -> int:
    """One seed of several numbers: neighbouring ones give unrelated seeds."""
    value = 0
    for number in numbers:
        value = (value ^ (number & (2**64 - 1))) * 0x9E3779B97F4A7C15 % 2**64
        value ^= value >> 29
    return value % _LARGEST


def _state(device: torch.device) -> list[tuple[torch.device, Tensor]]:
    found = [(torch.device("cpu"), torch.get_rng_state())]
    if device.type == "cuda":
        found.append((device, torch.cuda.get_rng_state(device)))
    return found


def _restore(states: list[tuple[torch.device, Tensor]]) -> None:
    for device, state in states:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


def _seed(seed: int, device: torch.device) -> None:
    """Not `torch.manual_seed`: it seeds every device, also those of other programs."""
    _generator(device).manual_seed(seed)
    if device.type != "cpu":
        torch.default_generator.manual_seed(seed)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


# The two ops: identities that move the generator of their operand's device.


def _own(x: Tensor, group: str) -> None:
    if _is_real(x):
        # From the CPU's generator on any device: reading a number from a GPU would wait for it.
        common = int(torch.randint(_LARGEST, ()))
        generator = _generator(x.device)
        # Inside the stream of a cp rank that of a tp rank is another for every cp rank.
        around = (generator.initial_seed(),) if _common else ()
        _common.append((generator, generator.get_state()))
        generator.manual_seed(_mixed(common, *around, resolve_group(group).rank()))


def _same(x: Tensor, group: str) -> None:
    if _is_real(x):
        generator, state = _common.pop()
        generator.set_state(state)


def _is_real(x: Tensor) -> bool:
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


_MARK = "(Tensor(a) x, str group) -> Tensor(a)"
define_identity("own_random" + _MARK, lambda g, group: g, effect=_own)
define_identity("same_random" + _MARK, lambda g, group: g, effect=_same)
