"""The module of one pipeline stage, built from its `StageProgram`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from autopar.runtime.expert_block import ExpertBlock
from autopar.runtime.expert_load import LayerExperts
from autopar.runtime.local_part import local_part
from autopar.runtime.random_state import RandomStream, shared_numbers
from autopar.runtime.selective_checkpoint import SelectiveCheckpoint
from autopar.stage_program import BlockProgram, ParameterSpec, StageProgram

Tensor = torch.Tensor
# What a pipeline schedule puts before the names of batch inputs; no graph has such names.
BATCH_PREFIX = "batch."
MakeParameter = Callable[[ParameterSpec], nn.Parameter]


class ParameterSlots(nn.Module):
    """A module whose parameters are known by fully qualified name (dots can't be in attributes)."""

    def __init__(self, specs: list[ParameterSpec], make: MakeParameter) -> None:
        super().__init__()
        self.specs = {f"p{index}": spec for index, spec in enumerate(specs)}
        for name, spec in self.specs.items():
            self.register_parameter(name, make(spec))

    def slot_of(self, fqn: str) -> str:
        return next(name for name, spec in self.specs.items() if spec.fqn == fqn)


class BlockModule(ParameterSlots):
    """One block: owns the parameters that no other block of the stage reads."""

    def __init__(
        self, block: BlockProgram, specs: list[ParameterSpec], make: MakeParameter
    ) -> None:
        super().__init__(specs, make)
        self.block = block
        self._experts = ExpertBlock.of(block)
        # (owner, slot, dtype) per graph parameter; a list of tuples, so nothing is registered.
        self._reads: list[tuple[nn.Module, str, torch.dtype]] = []
        self._buffer_values: tuple[Tensor, ...] = ()
        self._kept: list[Tensor] | None = None
        self._read_graph()

    def _read_graph(self) -> None:
        graph, rerun = self._experts.graph, self._experts.rerun
        self._graph: Callable[..., tuple[Tensor, ...]] = graph.forward
        self._selective: SelectiveCheckpoint | None = None
        if rerun is not None:
            self._selective = SelectiveCheckpoint(graph, rerun, self._operands)

    @property
    def layers(self) -> tuple[LayerExperts, ...]:
        """Those with experts, in order."""
        return self._experts.layers

    def place_experts(self, device: torch.device) -> None:
        """After experts were moved: choices become their slots."""
        if self.layers:
            self._experts = self._experts.placed(self.block, device)
            self._read_graph()

    def connect(
        self,
        owners: dict[str, ParameterSlots],
        specs: dict[str, ParameterSpec],
        buffers: dict[str, Tensor],
    ) -> None:
        """Say where each parameter and buffer that the graph reads is found."""
        self._reads = [
            (owners[fqn], owners[fqn].slot_of(fqn), specs[fqn].dtype)
            for fqn in self.block.parameters
        ]
        self._buffer_values = tuple(buffers[name] for name in self.block.buffers)

    def keep_parameters(self) -> None:
        """Read (and cast) the parameters once for all microbatches, until `release_parameters`.

        Only when nothing moves the parameters' memory in between.
        """
        # Without a cast there is nothing to save, and reads that outlive a microbatch would keep
        # all its fresh gradients alive until its backward ends.
        casts = any(getattr(o, slot).dtype != dtype for o, slot, dtype in self._reads)
        self._kept = self._parameters_for_graph() if casts else None

    def release_parameters(self) -> None:
        self._kept = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.block.recompute and torch.is_grad_enabled():
            outputs: tuple[Tensor, ...] = checkpoint(self._run, *inputs, use_reentrant=False)
        else:
            outputs = self._run(*inputs)
        outputs = self._experts.count(outputs)
        return self._with_own_memory(outputs) if isinstance(self, FSDPModule) else outputs

    def _run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._selective is not None and torch.is_grad_enabled():
            return self._selective(*inputs)
        return tuple(self._graph(*self._operands(), *inputs))

    def _operands(self) -> list[Tensor]:
        parameters = self._kept if self._kept is not None else self._parameters_for_graph()
        return [*parameters, *self._buffer_values]

    def _with_own_memory(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """FSDP frees parameters after the block: a view of one that is handed on is copied."""
        theirs = {p.untyped_storage()._cdata for p in self._parameters_for_graph()}
        return tuple(o.clone() if o.untyped_storage()._cdata in theirs else o for o in outputs)

    def _parameters_for_graph(self) -> list[Tensor]:
        found = []
        for owner, slot, dtype in self._reads:
            parameter = owner._parameters[slot]
            assert parameter is not None
            local = local_part(parameter)
            found.append(local if local.dtype == dtype else local.to(dtype))
        return found


class StageModule(ParameterSlots):
    """All blocks of a stage for one microbatch: received values and batch inputs in; values to
    send, or the loss, out. Owns the parameters that several of its blocks read.

    `finish_block` is called on each block once its parameters exist (ZeRO shards them there), so
    that no more than one block is ever whole.
    """

    def __init__(
        self,
        program: StageProgram,
        make: MakeParameter,
        buffers: dict[str, Tensor],
        finish_block: Callable[[nn.Module], None] = lambda block: None,
    ) -> None:
        readers: dict[str, int] = {}
        for block in program.blocks:
            for fqn in dict.fromkeys(block.parameters):
                readers[fqn] = readers.get(fqn, 0) + 1
        tied = [program.parameters[fqn] for fqn, count in readers.items() if count > 1]
        super().__init__(tied, make)
        self.program = program
        self.buffer_values = buffers
        self.whole_inputs: dict[str, Tensor] = {}
        # New values of buffers, kept aside until the backward has read the old ones.
        self._updates: dict[str, Tensor] = {}
        self.random: RandomStream | None = None
        # Auxiliary terms of the loss, of each micro-batch.
        self.loss_terms: list[list[Tensor]] = []
        self.blocks = nn.ModuleList()
        for block in program.blocks:
            own = [
                program.parameters[f] for f in dict.fromkeys(block.parameters) if readers[f] == 1
            ]
            module = BlockModule(block, own, make)
            finish_block(module)
            self.blocks.append(module)
        owners: dict[str, ParameterSlots] = {s.fqn: self for s in tied}
        for module in self._block_modules():
            owners |= {spec.fqn: module for spec in module.specs.values()}
        self._owners = owners
        for module in self._block_modules():
            module.connect(owners, program.parameters, buffers)
        self._dead = _dead_after(program)

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        program = self.program
        env = {name.removeprefix(BATCH_PREFIX): value for name, value in batch.items()}
        env |= self.whole_inputs
        env |= self._shared_values(env)
        env |= {spec.name: value for spec, value in zip(program.receive, received, strict=True)}
        for index, module in enumerate(self._block_modules()):
            block = module.block
            outputs = module(*(env[name] for name in block.inputs))
            env |= dict(zip(block.outputs, outputs, strict=True))
            del outputs
            for name in self._dead[index]:
                env.pop(name, None)
        if torch.is_grad_enabled():
            self._updates = {b: env[name].detach() for b, name in program.updates.items()}
        if program.loss is not None:
            self.loss_terms.append([env[name] for name in program.loss_terms])
            return env[program.loss]
        return tuple(env[spec.name].contiguous() for spec in program.send)

    def _shared_values(self, env: dict[str, Tensor]) -> dict[str, Tensor]:
        program = self.program
        if program.shared is None:
            return {}
        arguments = [self.buffer_values[name] for name in program.shared_buffers]
        arguments += [env[name] for name in program.shared_inputs]
        with torch.no_grad(), shared_numbers(self.random, program.index):
            values = program.shared(*arguments)
        return dict(zip(program.shared_outputs, values, strict=True))

    def update_buffers(self) -> None:
        """After a step with backward: buffers get the values that its forward computed."""
        for name, value in self._updates.items():
            self.buffer_values[name].copy_(value)
        self._updates = {}

    def _block_modules(self) -> Iterator[BlockModule]:
        for module in self.blocks:
            assert isinstance(module, BlockModule)
            yield module

    def layers(self) -> list[LayerExperts]:
        """Those with experts, in order."""
        return [layer for module in self._block_modules() for layer in module.layers]

    def place_experts(self, device: torch.device) -> None:
        for module in self._block_modules():
            module.place_experts(device)

    def keep_parameters(self) -> None:
        for module in self._block_modules():
            module.keep_parameters()

    def release_parameters(self) -> None:
        for module in self._block_modules():
            module.release_parameters()

    def fqn_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the user's model, in the order of the program."""
        found = {}
        for fqn in self.program.parameters:
            owner = self._owners.get(fqn)
            if owner is not None:
                parameter = owner._parameters[owner.slot_of(fqn)]
                assert parameter is not None
                found[fqn] = parameter
        return found


def _dead_after(program: StageProgram) -> list[list[str]]:
    """For each block, the names that nothing after it reads: freed there."""
    last: dict[str, int] = {}
    for index, block in enumerate(program.blocks):
        for name in (*block.inputs, *block.outputs):
            last[name] = index
    leaving = {spec.name for spec in program.send} | {program.loss, *program.updates.values()}
    leaving |= set(program.loss_terms)
    dead: list[list[str]] = [[] for _ in program.blocks]
    for name, index in last.items():
        if name not in leaving:
            dead[index].append(name)
    return dead
