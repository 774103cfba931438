"""The state of a program under the names of the user's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.piece_name import by_whole
from autopar.runtime.expert_slots import ExpertSlots
from autopar.runtime.faults import Faults
from autopar.runtime.gather import gather_to_first
from autopar.runtime.optimizer_state import load_optimizer_state, optimizer_state
from autopar.runtime.ranks import Ranks
from autopar.stage_program import StageProgram

Tensor = torch.Tensor


class ProgramState:
    """What a distributed program saves, loads and hands out whole."""

    ranks: Ranks
    _faults: Faults
    _programs: Sequence[StageProgram]
    _parameters: dict[str, nn.Parameter]
    _buffers: dict[str, Tensor]
    _slots: ExpertSlots

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that this rank's stages read, by their names in the user's model."""
        yield from self._buffers.items()

    def updated_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those of `named_buffers` that a step changes, such as a batch norm's statistics."""
        for program in self._programs:
            for name in program.updates:
                yield name, self._buffers[name]

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's shards, DTensors by name, as torch.distributed.checkpoint takes them; and
        the buffers that a step changes, whole.

        Experts that `rebalance` moved, or that have spare slots beside them, come as copies in the
        order of their numbers, one of each: what is read into these takes `load_state_dict`.
        """
        slots = self._slots
        found = {n: slots.by_expert(n, p.detach()) for n, p in self._parameters.items()}
        return {**found, **dict(self.updated_buffers())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy shards in; the layout has to be this program's (checkpoint loading reshards)."""
        with torch.no_grad():
            for fqn, tensor in (*self._parameters.items(), *self.updated_buffers()):
                tensor.copy_(self._slots.by_slot(fqn, state[fqn]))

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's state by parameter name, as torch.distributed.checkpoint takes it.

        One checkpoint for all stages: it loads under another plan too. For an optimizer that has
        not stepped yet, the tensors to read a checkpoint into.
        """
        found = optimizer_state(optimizer, self._parameters)
        return self._slots.of_state(found, self._slots.by_expert)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Put back what `optimizer_state_dict` gave, or what a checkpoint loaded into it."""
        moved = self._slots.of_state(state, self._slots.by_slot)
        load_optimizer_state(optimizer, self._parameters, moved)

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters of the model and the buffers that a step changes, whole, on the CPU of
        rank 0 (empty on other ranks).
        """
        with self._faults.during("gathering the state"):
            return gather_to_first(self.state_dict(), self.ranks)

    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients, whole, on the CPU of rank 0 (empty on other ranks)."""
        found = {f: p.grad for f, p in self._parameters.items() if p.grad is not None}
        for pieces in by_whole(self._parameters).values():
            # A piece that the loss does not depend on is a part of zeros.
            if any(str(p) in found for p in pieces):
                for name in (str(p) for p in pieces if str(p) not in found):
                    found[name] = torch.zeros_like(self._parameters[name])
        with self._faults.during("gathering the gradients"):
            whole = {name: self._slots.by_expert(name, g) for name, g in found.items()}
            return gather_to_first(whole, self.ranks)
