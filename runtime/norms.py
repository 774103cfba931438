"""The norm of all gradients of a program whose parameters are spread over pp, dp and tp."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.gradients import local_gradients
from autopar.runtime.ranks import Ranks

Tensor = torch.Tensor
# Of a parameter's gradient, what a norm of this type counts on this rank.
Counted = Callable[[nn.Parameter, float], Tensor | None]


def _all_of_it(parameter: nn.Parameter, norm_type: float) -> Tensor | None:
    return parameter.grad


def stage_norm(
    parameters: Sequence[nn.Parameter],
    norm_type: float,
    ranks: Ranks,
    counted: Counted = _all_of_it,
) -> Tensor:
    """Norm of these gradients, each counted once over dp and tp; the same on dp and tp ranks."""
    found = [counted(p, norm_type) for p in parameters]
    gradients = [gradient for gradient in found if gradient is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=ranks.device)
    # Experts that ep splits lie on a mesh of their own, and torch adds up norms of one mesh.
    by_mesh: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = []
    for parts in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(parts, norm_type)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(whole.to(ranks.device, torch.float64))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def global_norm(
    owned: Sequence[nn.Parameter],
    norm_type: float,
    ranks: Ranks,
    counted: Counted = _all_of_it,
) -> Tensor:
    """Norm over all stages. `owned`: parameters of which no earlier stage holds a copy."""
    norm = stage_norm(owned, norm_type, ranks, counted)
    if ranks.mesh.pp == 1:
        return norm
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=ranks.group("pp"))
        return norm
    power = norm**norm_type
    dist.all_reduce(power, group=ranks.group("pp"))
    root: Tensor = power ** (1.0 / norm_type)
    return root


def scale_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that a norm above `max_norm` becomes `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in local_gradients(parameters):
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype))


class OtherStages:
    """One number that stands for the gradients of all other stages in a norm over this rank's.

    `torch.nn.utils.clip_grad_norm_(program.parameters(), ...)` sees only the parameters of this
    rank's stage. This parameter's value is unused; its gradient is set, after each step, to the
    2-norm of what other stages hold, so that the 2-norm of all that `parameters()` gives is the
    global one on every rank. A parameter tied across stages is in the lists of several ranks; the
    number makes up for that too.
    """

    def __init__(self, like: nn.Parameter, ranks: Ranks) -> None:
        self._ranks = ranks
        zero = torch.zeros((), device=ranks.device)
        assert isinstance(like, DTensor)
        self._mesh = like.device_mesh
        self.parameter = nn.Parameter(self._replicate(zero))

    def update(
        self,
        owned: Sequence[nn.Parameter],
        everything: Sequence[nn.Parameter],
        counted: Counted = _all_of_it,
    ) -> None:
        """Collective over all ranks. `everything`: all parameters of this rank."""
        total = global_norm(owned, 2.0, self._ranks, counted)
        here = stage_norm(everything, 2.0, self._ranks)
        others = (total.square() - here.square()).clamp(min=0).sqrt()
        self.parameter.grad = self._replicate(others.float())

    def _replicate(self, value: Tensor) -> DTensor:
        placements = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(value, self._mesh, placements, run_check=False)
