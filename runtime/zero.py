"""How a stage's parameters, gradients and optimizer state are spread over dp (with cp, over both
as one group, `replica`): ZeRO levels 0 to 3.

| level | parameters in a step                 | gradients                                  |
| ----- | ------------------------------------ | ------------------------------------------ |
| 0     | whole on every rank                  | one all-reduce, in the last backward       |
| 1     | gathered once, kept to the end       | whole, one reduce-scatter at the end       |
| 2     | gathered once, kept to the end       | reduce-scattered after every microbatch    |
| 3     | gathered and dropped block by block  | reduce-scattered after every microbatch    |

With level 3 the parameters of some blocks may be kept gathered, as those of level 2 are.

Hybrid sharding (`dp_replicate` above 1) takes parameters and states apart over groups of
neighbours only; gradients are then reduce-scattered in a group, and the shards all-reduced over the
groups once, in the last backward.

Levels 1 to 3 are FSDP2. Level 0, and dp 1, need no second copy of the parameters and so do
without: there gradients are summed in buckets while the last backward runs. Gradients are sums
over dp, because each loss is weighted by its share of the whole batch
(`autopar.runtime.loss_weights`).

Experts that ep splits are spread in the same way over the ranks that hold the same ones, by experts
where there are enough of them for all, else by the rows of their matrices. Hybrid sharding leaves
them as they are: they are gathered over a part of the replicas already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autopar.runtime.expert_shards import ExpertShards
from autopar.runtime.gradients import OverlappedSum
from autopar.runtime.ranks import Ranks
from autopar.runtime.stage import BlockModule, StageModule
from autopar.runtime.torch_compat import (
    finish_reductions,
    fsdp_group_of,
    release_reductions,
)

MakeStage = Callable[[Callable[[nn.Module], None]], StageModule]


class DataParallel(Protocol):
    """What a step tells the data-parallel engine."""

    stage: StageModule

    def begin_step(self) -> None: ...

    def before_backward(self, last: bool) -> None:
        """`last`: of the step, so gradients are to be complete over dp after it."""

    def gradients_arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """In a backward for the weights alone: those of `parameters` are complete."""

    def after_weights(self, last: bool) -> None:
        """Such a backward has ended; `last` as before it."""

    def release(self) -> None:
        """Let go of what the last backward's reduction read."""

    def end_step(self) -> None: ...


def data_parallel(
    make_stage: MakeStage, ranks: Ranks, zero: int, precision: str, kept: Sequence[str] = ()
) -> DataParallel:
    """Build the stage with its parameters spread as the level says.

    `make_stage(finish_block)` makes the module and calls `finish_block` on each block as soon as
    its parameters exist. `kept`: blocks whose parameters level 3 keeps gathered.
    """
    if ranks.mesh.replicas == 1 or zero == 0:
        return Replicated(make_stage(lambda block: None), ranks)
    return Sharded(make_stage, ranks, zero, precision, kept)


class Replicated:
    """Whole parameters on every dp rank."""

    def __init__(self, stage: StageModule, ranks: Ranks) -> None:
        self.stage = stage
        parameters: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for fqn, parameter in stage.fqn_parameters().items():
            group = ranks.replicas_of(stage.program.parameters[fqn]).get_group()
            parameters.setdefault(group, []).append(parameter)
        self._sums = [
            OverlappedSum(p, group) for group, p in parameters.items() if group.size() > 1
        ]

    def begin_step(self) -> None:
        self.stage.keep_parameters()

    def before_backward(self, last: bool) -> None:
        for total in self._sums if last else ():
            total.arm()

    def gradients_arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing: the sums see each gradient arrive."""

    def after_weights(self, last: bool) -> None:
        pass

    def release(self) -> None:
        pass

    def end_step(self) -> None:
        for total in self._sums:
            total.finish()
        self.stage.release_parameters()


class Sharded:
    """FSDP2 over dp, one unit per block; tied parameters belong to the stage's own unit."""

    def __init__(
        self,
        make_stage: MakeStage,
        ranks: Ranks,
        zero: int,
        precision: str,
        kept: Sequence[str] = (),
    ) -> None:
        self._zero = zero
        # Trained parameters whose gradients a backward for the weights alone has still to make, by
        # FSDP2's groups.
        self._awaited: dict[int, set[nn.Parameter]] = {}
        self._group_of: dict[nn.Parameter, Any] = {}
        mesh = ranks.shards
        # Inputs keep their dtype: the graphs were captured in the compute dtype.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if precision == "bf16-mixed":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

        over = ExpertShards(ranks) if ranks.mesh.ep > 1 else None

        def shard(module: nn.Module, *, keep: bool) -> None:
            options: dict[str, Any] = {}
            if over is not None and (placed := over.placements(module)):
                options["shard_placement_fn"] = placed.get
            fully_shard(
                module, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy, **options
            )
            assert isinstance(module, FSDPModule)
            if keep:
                self._kept.append(module)

        # Units that are resharded after the last backward alone.
        self._kept: list[FSDPModule] = []

        # A block that hands a view on is fine here: graphs change no tensor of another block.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view")

        def shard_block(block: nn.Module) -> None:
            assert isinstance(block, BlockModule)
            shard(block, keep=zero < 3 or block.block.name in kept)

        self.stage = make_stage(shard_block)
        reads = {f for b in self.stage.program.blocks if b.name in kept for f in b.parameters}
        # A block that is kept keeps what it reads of the stage's own unit too.
        tied = any(spec.fqn in reads for spec in self.stage.specs.values())
        shard(self.stage, keep=zero < 3 or tied)
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._set_prefetch()

    def _set_prefetch(self) -> None:
        """In the backward, gather the block before while this one works.

        FSDP's own guess follows the order of past forwards, which is another microbatch's where a
        pipeline interleaves them.
        """
        blocks = [b for b in self.stage.blocks if isinstance(b, FSDPModule)]
        # The first block names itself: nothing is before it, and no list means the guess.
        for before, block in zip([blocks[0], *blocks], [*blocks, self.stage], strict=True):
            assert isinstance(block, FSDPModule)
            block.set_modules_to_backward_prefetch([before])

    def begin_step(self) -> None:
        pass

    def before_backward(self, last: bool) -> None:
        root = self.stage
        assert isinstance(root, FSDPModule)
        self.release()
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or self._zero >= 2)
        # Over copies of a shard once is enough: what it got of each microbatch is added up first.
        root.set_requires_all_reduce(last)
        for module in self._kept:
            module.set_reshard_after_backward(last, recurse=False)

    def gradients_arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """FSDP2 looks at a block's gradients where the block's inputs get theirs; here they come
        later, so it is told."""
        if not self._awaited:
            groups = fsdp_group_of(self.stage)
            self._group_of = groups
            for parameter in groups:
                self._awaited.setdefault(id(groups[parameter]), set()).add(parameter)
        for parameter in parameters:
            group = self._group_of[parameter]
            awaited = self._awaited[id(group)]
            awaited.discard(parameter)
            if not awaited:
                group.post_backward()

    def after_weights(self, last: bool) -> None:
        self._awaited, self._group_of = {}, {}
        if last:
            finish_reductions(self.stage)

    def release(self) -> None:
        release_reductions(self.stage)

    def end_step(self) -> None:
        # After a step without backward, gathered parameters would outlive the next update.
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
