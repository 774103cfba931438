"""AdamW whose moments are in the memory of the host, where the update is made: a device has none.

A step takes one parameter after the other: its part on this rank and the gradient come to the host,
the new values go back. What ZeRO shards is sharded here too, and checkpoints are those of AdamW.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.torch_compat import adamw, laid_out_as

Tensor = torch.Tensor
MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.Optimizer):
    """Options as those of `torch.optim.AdamW`. `host`: the device that is taken for the host."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        host: str = "cpu",
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._host = host

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _all_cores(self._devices()):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _devices(self) -> set[str]:
        return {p.device.type for group in self.param_groups for p in group["params"]}

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        own, state = _own(parameter), self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                zeros = torch.zeros_like(own, device=self._host)
                state[name] = laid_out_as(parameter, zeros)
        values, gradient = self._fetched(own), self._fetched(_own(parameter.grad))
        if own.is_cuda:
            torch.cuda.current_stream(own.device).synchronize()
        beta1, beta2 = group["betas"]
        moments = [[self._kept(state, name)] for name in MOMENTS]
        adamw(
            *([values], [gradient], *moments, [], [state["step"]]),
            fused=self._host == "cpu",
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in ("lr", "eps", "weight_decay")},
        )
        own.copy_(values, non_blocking=True)

    def _fetched(self, own: Tensor) -> Tensor:
        """A copy on the host, on its way."""
        made = torch.empty_like(own, device=self._host, pin_memory=own.is_cuda)
        return made.copy_(own, non_blocking=True)

    def _kept(self, state: dict[str, Any], name: str) -> Tensor:
        """The rank's part of a moment; one that was loaded may be on the device."""
        own = _own(state[name])
        if own.device.type != torch.device(self._host).type:
            own = own.to(self._host)
            state[name] = laid_out_as(state[name], own)
        return own


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@contextmanager
def _all_cores(devices: set[str]) -> Iterator[None]:
    """This rank's share of the cores, where the model is not on them itself (torchrun starts ranks
    with one thread each)."""
    before = torch.get_num_threads()
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    elsewhere = not devices <= {"cpu", "meta"}
    torch.set_num_threads(max(before, share) if elsewhere else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
