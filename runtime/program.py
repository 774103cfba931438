"""The distributed program: one call does forward and backward of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autopar.experts.assignment import Assignment
from autopar.experts.diagnosis import Routing
from autopar.experts.history import RoutingHistory
from autopar.plan_document import Plan
from autopar.runtime.batch import BatchRules, flat_batch
from autopar.runtime.digests import batch_digest
from autopar.runtime.expert_copies import ExpertCopies
from autopar.runtime.expert_load import summed_load
from autopar.runtime.expert_slots import ExpertSlots
from autopar.runtime.faults import Faults
from autopar.runtime.gradients import local_gradients, sum_over
from autopar.runtime.loss_scale import checked_scale, unscale
from autopar.runtime.loss_terms import LossTerms
from autopar.runtime.loss_weights import count_targets, loss_weights, no_targets, uneven
from autopar.runtime.norms import OtherStages, global_norm, scale_gradients
from autopar.runtime.parameters import ParameterSource
from autopar.runtime.pipeline import PipelinedStages, SingleStage
from autopar.runtime.planned_optimizer import planned_optimizer
from autopar.runtime.random_state import RandomStream
from autopar.runtime.ranks import Ranks, batch_amounts, check_batches, together
from autopar.runtime.stage import StageModule
from autopar.runtime.state import ProgramState
from autopar.runtime.zero import DataParallel, data_parallel
from autopar.stage_program import ParameterSpec, StageProgram, ValueSpec

Tensor = torch.Tensor
StagePrograms = Sequence[StageProgram] | Callable[[int], StageProgram]


@dataclass(frozen=True)
class _Facts:
    """What all stages have to know of each other."""

    tied: frozenset[tuple[int, ...]]
    inputs: dict[str, ValueSpec]
    whole: frozenset[str]
    counts: bool
    draws: bool

    @staticmethod
    def of(program: StageProgram) -> _Facts:
        tied = {s.stages for s in program.parameters.values() if len(s.stages) > 1}
        return _Facts(
            frozenset(tied),
            dict(program.batch_inputs),
            program.whole_inputs,
            program.count is not None,
            program.draws,
        )

    @staticmethod
    def merged(programs: Sequence[StageProgram], ranks: Ranks) -> _Facts:
        by_rank: list[Any] = [None] * ranks.mesh.size
        with unset_fake_temporarily():  # as in `together`
            own = [_Facts.of(program) for program in programs]
            dist.all_gather_object(by_rank, own, group=ranks.control)
        found = [facts for rank in by_rank for facts in rank]
        inputs: dict[str, ValueSpec] = {}
        for facts in found:
            inputs |= facts.inputs
        return _Facts(
            frozenset().union(*(f.tied for f in found)),
            inputs,
            frozenset().union(*(f.whole for f in found)),
            any(f.counts for f in found),
            any(f.draws for f in found),
        )


class DistributedProgram(ProgramState):
    """This rank's part of the program. All ranks make it, and call its methods, together.

    `stage_programs` is the list of all stages, or a function that gives the stage of an index.
    Parameters start from `model`, or from its own initialisation (`seed`) where it is on meta.
    """

    def __init__(
        self,
        stage_programs: StagePrograms,
        plan: Plan,
        ranks: Ranks,
        model: nn.Module,
        *,
        seed: int = 0,
    ) -> None:
        self.plan = plan
        self.ranks = ranks
        error: Exception | None = None
        try:
            of = stage_programs if callable(stage_programs) else stage_programs.__getitem__
            programs = [of(index) for index in plan.stage_indexes(ranks.index("pp"))]
            source = ParameterSource(model, seed)
            self._build(programs, source)
            source.forget()
        except Exception as found:
            error = found
        together(ranks, error)
        facts = _Facts.merged(programs, ranks)
        ranks.make_tied_groups(facts.tied, plan.pp_rank)
        self._counts = facts.counts
        self._rules = BatchRules(
            facts.inputs, facts.whole, plan.microbatches, ranks.mesh.dp, ranks.index("dp")
        )
        self._random = RandomStream(ranks) if facts.draws else None
        for engine in self._engines:
            engine.stage.random = self._random
        layers = [layer for engine in self._engines for layer in engine.stage.layers()]
        reads = [block.parameters for program in programs for block in program.blocks]
        reads.append(tuple(n for n, spec in self._specs.items() if len(spec.stages) > 1))
        self._slots = ExpertSlots(layers, reads, ranks)
        self._copies = ExpertCopies((), {}, ranks)
        if self._slots.roomy:
            self._place_experts()
        self.history = RoutingHistory()
        self._loss_terms = LossTerms([engine.stage for engine in self._engines])
        self._training = True
        self._faults = Faults(ranks)
        self._steps = 0
        self._others: OtherStages | None = None
        if ranks.mesh.pp > 1 and self._parameters:
            self._others = OtherStages(next(iter(self._parameters.values())), ranks)

    def _build(self, programs: Sequence[StageProgram], source: ParameterSource) -> None:
        plan, ranks = self.plan, self.ranks
        # Stages of one rank share the buffers that several of them read.
        names = dict.fromkeys(name for program in programs for name in program.buffers)
        self._buffers = {name: source.buffer(name, ranks) for name in names}
        self._programs = programs
        self._engines = [self._engine_of(program, source) for program in programs]
        self._stage = (
            PipelinedStages(self._engines, plan, ranks)
            if ranks.mesh.pp > 1
            else SingleStage(self._engines[0], plan.microbatches)
        )
        self._parameters: dict[str, nn.Parameter] = {}
        self._specs: dict[str, ParameterSpec] = {}
        self._owned: list[nn.Parameter] = []
        for program, engine in zip(programs, self._engines, strict=True):
            own = engine.stage.fqn_parameters()
            self._parameters |= own
            self._specs |= program.parameters
            # A parameter tied across stages counts for its first stage.
            first = ((), (program.index,))
            self._owned += [p for n, p in own.items() if program.parameters[n].stages[:1] in first]

    def _engine_of(self, program: StageProgram, source: ParameterSource) -> DataParallel:
        plan, ranks = self.plan, self.ranks

        def make(spec: ParameterSpec) -> nn.Parameter:
            return source.parameter(spec, ranks, plan.precision)

        def make_stage(finish_block: Callable[[nn.Module], None]) -> StageModule:
            buffers = {name: self._buffers[name] for name in program.buffers}
            return StageModule(program, make, buffers, finish_block)

        kept = plan.stages[program.index].keep_gathered
        return data_parallel(make_stage, ranks, plan.zero, plan.precision, kept)

    # Training.

    def step(
        self,
        batch: Mapping[str, Tensor] | None = None,
        *,
        loss_scale: float = 1.0,
        **inputs: Tensor,
    ) -> Tensor:
        """Forward and backward of one batch; returns the mean loss over all of it, on every rank.

        The batch is a dict or keyword arguments, nested as the example inputs were: the global
        batch (each dp rank uses its rows), or this dp rank's rows only. Gradients are added to
        those there are; they are `loss_scale` times as large (see `unscale_gradients`), the
        returned loss is not. In `eval` mode there is no backward, and buffers stay as they are.
        Raises on every rank, before any work, when a rank's batch does not fit; `RuntimeFault`
        when another rank failed or is gone, after which nothing more can be run.
        """
        with self._faults.during(f"step {self._steps}"):
            loss = self._step({**(batch or {}), **inputs}, checked_scale(loss_scale))
        self._steps += 1
        return loss

    def _step(self, batch: Mapping[str, Tensor], loss_scale: float) -> Tensor:
        self._faults.at("checking the batch")
        local, weights = self._prepare(batch)
        before = self._set_gradients_aside()
        for engine in self._engines:
            engine.begin_step()
        self._faults.at("forward and backward" if self._training else "forward")
        with torch.set_grad_enabled(self._training), self._random_numbers():
            loss = self._stage.run(local, weights * loss_scale, backward=self._training)
        for engine in self._engines:
            engine.end_step()
        if self._training:
            self._faults.at("completing the gradients")
            self._complete_gradients()
            self._copies.sum_gradients()
            for engine in self._engines:
                engine.stage.update_buffers()
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if self._training and self._others is not None:
            everything = list(self._parameters.values())
            self._others.update(self._owned, everything, self._copies.counted)
        self._faults.at("adding up the loss")
        amounts = self._loss_terms.beside(loss, weights * loss_scale)
        for axis in ("dp", "pp"):
            if self.plan.mesh.degree(axis) > 1:
                dist.all_reduce(amounts, group=self.ranks.group(axis))
        amounts /= loss_scale
        self._loss_terms.keep(amounts)
        return amounts[0].clone()

    def auxiliary_losses(self) -> dict[str, float]:
        """What the last step's loss had added to it that reads no targets, as the balance of
        experts: by its expression in the model's code, signed and with its weight there; the same
        on every rank. None where the loss is no such sum (`passes/analysis/loss_terms.py`)."""
        return self._loss_terms.values()

    def _prepare(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """This rank's rows and the weights of its microbatches."""
        ranks, number = self.ranks, self.plan.microbatches
        last = self._programs[-1]  # the one that counts, if one of this rank's does
        local: dict[str, Tensor] = {}
        counts: list[float] = []
        digest = 0
        error: Exception | None = None
        try:
            local, whole = self._rules.local(flat_batch(batch, last.fixed), ranks)
            digest = batch_digest({**local, **whole})
            for engine in self._engines:
                engine.stage.whole_inputs = whole
            pieces = {name: value.chunk(number) for name, value in local.items()}
            counts = count_targets(
                last,
                [{**whole, **{n: c[i] for n, c in pieces.items()}} for i in range(number)],
            )
        except Exception as found:
            error = found
        # Each tp and cp rank of the last stage counts the same targets: one of them speaks.
        mine = sum(counts) if ranks.index("tp") == ranks.index("cp") == 0 else 0.0
        total, *digests = together(ranks, error, (mine, *batch_amounts(ranks, digest)))
        check_batches(ranks, digest, tuple(digests))
        if self._counts and total == 0:
            raise no_targets()
        if last.even and not any(isinstance(v, FakeTensor) for v in local.values()):
            together(ranks, uneven(counts, total, number, ranks.mesh.dp))
        weights = loss_weights(counts, total, number, ranks.mesh.dp, sums=last.sums)
        return local, torch.tensor(weights, dtype=torch.float64).to(ranks.device)

    def _random_numbers(self) -> Any:
        return self._random.step() if self._random is not None else nullcontext()

    def _set_gradients_aside(self) -> dict[nn.Parameter, Tensor]:
        """Reductions must see this step's gradients only, and torch's pipelines drop those of FSDP2
        where they begin, or stop, to go backward."""
        found = {p: p.grad for p in self._parameters.values() if p.grad is not None}
        for parameter in found:
            parameter.grad = None
        return found

    def _complete_gradients(self) -> None:
        """Sum over tp what is a term on every tp rank, and over stages what several stages hold."""
        specs = self._specs
        partial = [
            p for fqn, p in self._parameters.items() if specs[fqn].placement.gradient_is_partial
        ]
        sum_over(local_gradients(partial), self.ranks.group("tp"))
        for stages, group in sorted(self.ranks.tied.items()):
            # In one order on all stages, each of which may read them in another.
            names = sorted(fqn for fqn in self._parameters if specs[fqn].stages == stages)
            tied = [self._parameters[fqn] for fqn in names]
            for parameter in tied:
                # A stage may only read it without gradient: it still takes its part in the sum.
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            sum_over(local_gradients(tied), group)

    @property
    def even(self) -> bool:
        """Whether a step asks for as many targets in every micro-batch."""
        return self._programs[-1].even

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages, for an optimizer or `torch.nn.utils.clip_grad_norm_`.

        With several stages one more scalar comes last, which stands for the other stages'
        gradients in a 2-norm; its own value is unused.
        """
        yield from self._parameters.values()
        if self._others is not None:
            yield self._others.parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages by their names in the user's model."""
        yield from self._parameters.items()

    def make_optimizer(self, **options: Any) -> torch.optim.Optimizer:
        """The optimizer that the plan counts with, of all parameters: see
        `autopar.runtime.planned_optimizer`."""
        return planned_optimizer(self, **options)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over the whole model, of any type; returns that norm."""
        with self._faults.during("the norm of the gradients"):
            norm = global_norm(self._owned, norm_type, self.ranks, self._copies.counted)
        scale_gradients(list(self.parameters()), norm, max_norm)
        return norm.float()

    def unscale_gradients(self, loss_scale: float) -> bool:
        """Divide all gradients by a loss scale; whether all are finite, the same on every rank.

        If not, skip the optimizer's step and take a smaller scale.
        """
        gradients = local_gradients(self.parameters())
        with self._faults.during("unscaling the gradients"):
            return unscale(gradients, checked_scale(loss_scale), self.ranks)

    def train(self, mode: bool = True) -> DistributedProgram:
        """Whether `step` runs the backward. Dropout and the like stay as captured."""
        self._training = mode
        return self

    def eval(self) -> DistributedProgram:
        return self.train(False)

    # Mixture of experts.

    def expert_load(self) -> dict[str, list[int]]:
        """How many rows each expert got, by layer (the module of its experts), since the last
        `reset_expert_load`; the same on every rank.

        A row is a token of a step, also in `eval` mode, once for each of its choices.
        """
        return self.routing().load

    def routing(self) -> Routing:
        """The load of experts and ranks since the last `reset_expert_load`; as text, what is
        wrong with it and what helps."""
        stages = [engine.stage for engine in self._engines]
        with self._faults.during("adding up the load of experts"):
            own = {stage.program.index: stage.layers() for stage in stages}
            return Routing(summed_load(own, self.ranks))

    def record_routing(self) -> dict[str, Any]:
        """Add to `history` what routing was since the last record or `reset_expert_load`, with the
        last step's `auxiliary_losses`; all ranks together. `history.to_dict()` is JSON that
        `autopar experts` reads as a load."""
        return self.history.add(self._steps, self.routing(), self.auxiliary_losses())

    def reset_expert_load(self) -> None:
        for layer in self._slots.layers:
            layer.reset()
        self.history.counts_were_reset()

    def rebalance(
        self, assignment: Assignment, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Move experts, their gradients and their optimizer's state to the ranks that the
        assignment says, between two steps; later steps give the same numbers. The assignment of
        rank 0 counts: a solver with a time limit need not find the same one on every rank.

        `named_parameters` are then in the order of the ranks, all that is saved or gathered in the
        order of experts. Copies of an expert, and unequal counts, need the slots of a plan with
        `spare_experts`. Copies share the rows of their expert equally and get the sum of their
        gradients; the norm of `clip_grad_norm_` counts them once (torch's own function does not).
        Raises `UsageError` on every rank, before anything is moved, for an assignment of other
        ranks, layers or experts, for more experts on a rank than it has slots, and for an optimizer
        whose state can't be moved, or that is not given and has states of experts that move.
        """
        with self._faults.during("moving experts"):
            orders = self._slots.agreed_orders(assignment, optimizer, self._parameters)
            self._slots.move(orders, self._parameters, optimizer)
            self._place_experts()

    def _place_experts(self) -> None:
        """After experts got their slots."""
        self._copies = ExpertCopies(self._slots.layers, self._parameters, self.ranks)
        for engine in self._engines:
            engine.stage.place_experts(self.ranks.device)
