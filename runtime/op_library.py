"""Registration of the ops of the `autopar` namespace.

An op is a kernel, the shape of its result, and its conjugate: the op that turns the gradient of the
result into the gradient of the operand. Ops work on real, meta and fake tensors and in fx graphs.
The group is a string: the name of a c10d process group (graphs that come from the rewrites name
the mesh axis, and bind it later).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Any: these methods of torch are not annotated.
LIBRARY: Any = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]

Kernel = Callable[..., Any]


def define(schema: str, kernel: Kernel, fake: Kernel, gradient: Kernel) -> None:
    """An op that is linear in its first operand `x` and makes a new tensor.

    `gradient(grad, *rest)` gets the gradient of the result and the arguments after `x`.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (gradient(grad, *ctx.rest), *([None] * len(ctx.rest)))

    define_with_context(schema, kernel, fake, keep, backward)


def define_with_context(
    schema: str, kernel: Kernel, fake: Kernel, setup: Kernel, backward: Kernel
) -> None:
    """An op with a backward that needs more than the gradient; as `torch.library` defines it."""
    name = _declare(schema)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=setup, lib=LIBRARY)


def define_identity(schema: str, gradient: Kernel, effect: Kernel = lambda x, *rest: None) -> None:
    """An op whose result is its operand: a view, no copy. The schema marks the alias.

    `effect` is called with the operands when the op runs forward.
    """

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            ctx.rest = rest
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
            return (gradient(grads[0], *ctx.rest), *([None] * len(ctx.rest)))

    def differentiable(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        effect(x, *rest)
        result: torch.Tensor = Identity.apply(x, *rest)  # type: ignore[no-untyped-call]
        return result

    name = _declare(schema)
    LIBRARY.impl(name, differentiable, "Autograd")

    def plain(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        effect(x, *rest)
        return x.view_as(x)

    LIBRARY.impl(name, plain, "CompositeExplicitAutograd")


def _declare(schema: str) -> str:
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return schema.partition("(")[0]
