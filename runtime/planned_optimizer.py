"""The optimizer whose states a plan counts, for the parameters of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import UsageError
from autopar.runtime.adafactor import Adafactor
from autopar.runtime.host_optimizer import HostAdamW

if TYPE_CHECKING:
    from autopar.runtime.program import DistributedProgram

Optimizer = torch.optim.Optimizer


def planned_optimizer(program: DistributedProgram, **options: Any) -> Optimizer:
    """Made with the options of `torch.optim.AdamW` (of `HostAdamW` too), `SGD` (momentum 0.9 unless
    given where the plan says sgd-momentum) or `Adafactor`, or of `torchao.optim.AdamW8bit`.

    Raises `UsageError` when the library that has it is missing.
    """
    name = program.plan.optimizer
    if name == "adafactor":
        return Adafactor(program.named_parameters(), **options)
    parameters = list(program.parameters())
    if name == "adamw-8bit":
        made: Optimizer = eight_bit_adamw()(parameters, **options)
        return made
    if name == "adamw-host":
        return HostAdamW(parameters, **options)
    if name == "adamw":
        return torch.optim.AdamW(parameters, **options)
    if name == "sgd-momentum":
        options.setdefault("momentum", 0.9)
    return torch.optim.SGD(parameters, **options)


def eight_bit_adamw() -> Any:
    """torchao's `AdamW8bit`. Raises `UsageError` where torchao is missing."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UsageError(
            "the plan counts with 8-bit states of AdamW, and torchao is not installed",
            next_step="pip install autopar[eight-bit], or plan with --optimizer adamw or adafactor",
        ) from error
    return AdamW8bit
