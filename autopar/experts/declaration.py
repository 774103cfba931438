"""Where the experts of a module are: in a user's own class, as its author declares it.

autopar.declare_experts(
    MyExperts, gate="w1", up="w3", down="w2",
    activation=lambda module, x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError, UsageError
from autopar.experts.activation import text_of

Activation = Callable[[nn.Module, torch.Tensor], torch.Tensor]
# Of a layer's module and the arguments of its forward.
Routed = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of the attributes that hold the weights ('' for none), as the op reads them.

    Not `transposed`, `up` and `gate` are [e, w, h] and `down` [e, h, i]; transposed [e, h, w] and
    [e, i, h]. `gated`: `up` alone holds the columns of gate and up, so that w is 2 i.
    `weighs_inputs`: weights of choices are multiplied onto tokens before `up`, not onto what `down`
    makes.
    """

    up: str
    down: str
    gate: str = ""
    up_bias: str = ""
    gate_bias: str = ""
    down_bias: str = ""
    transposed: bool = False
    gated: bool = False
    weighs_inputs: bool = False

    def tensors(self, module: nn.Module) -> tuple[torch.Tensor | None, ...]:
        """up, down, gate, up_bias, gate_bias, down_bias of a module, as in the call of the op.

        Raises `CaptureError` naming the one that is missing or has another shape than the others.
        """
        names = (self.up, self.down, self.gate, self.up_bias, self.gate_bias, self.down_bias)
        found = tuple(getattr(module, n, None) if n else None for n in names)
        for name, value in zip(names, found, strict=True):
            if name and not isinstance(value, torch.Tensor):
                raise _wrong(module, f"has no tensor {name!r}")
        self._check(module, found)
        return found

    def _check(self, module: nn.Module, found: tuple[torch.Tensor | None, ...]) -> None:
        up, down, gate, *biases = found
        assert up is not None and down is not None
        if up.dim() != 3 or down.dim() != 3:
            raise _wrong(module, f"{self.up!r} and {self.down!r} are not [experts, out, in]")
        experts, inner, hidden = down.shape[0], down.shape[2], down.shape[1]
        if self.transposed:
            hidden, inner = inner, hidden
        width = inner * (2 if self.gated else 1)
        matrix = (experts, hidden, width) if self.transposed else (experts, width, hidden)
        sizes = (width, width, hidden)
        wanted: list[tuple[str, torch.Tensor | None, tuple[int, ...]]]
        wanted = [(self.up, up, matrix), (self.gate, gate, matrix)]
        wanted += [
            (name, bias, (experts, size))
            for name, bias, size in zip(
                (self.up_bias, self.gate_bias, self.down_bias), biases, sizes, strict=True
            )
        ]
        for name, value, shape in wanted:
            if value is not None and tuple(value.shape) != shape:
                raise _wrong(module, f"{name!r} is {tuple(value.shape)}, not {shape}")

    def activation_text(self, module: nn.Module, function: Activation) -> str:
        """The function between the projections; raises `NoText` for one that can't be kept."""
        dtype = getattr(module, self.down).dtype
        width = 2 if self.gated or self.gate else 1
        return text_of(lambda x: function(module, x), dtype, width)


def _wrong(module: nn.Module, what: str) -> CaptureError:
    return CaptureError(
        f"the experts of {type(module).__name__}: it {what}",
        next_step="correct the call of declare_experts for this class",
    )


_DECLARED: dict[type[nn.Module], tuple[Layout, Activation]] = {}
# By the class of the layer: that of its experts, and its forward with choices alone.
_LAYERS: dict[type[nn.Module], tuple[type[nn.Module], Routed]] = {}


def declare_experts(
    kind: type[nn.Module],
    *,
    up: str,
    down: str,
    activation: Activation,
    gate: str = "",
    up_bias: str = "",
    gate_bias: str = "",
    down_bias: str = "",
    transposed: bool = False,
    gated: bool = False,
    weighs_inputs: bool = False,
    layer: type[nn.Module] | None = None,
    routed: Routed | None = None,
) -> None:
    """Tell that `forward(hidden, index, weights)` of a class computes a layer's experts.

    hidden [tokens, h], index and weights [tokens, choices] -> [tokens, h]: the sum over a token's
    choices of its weight times down(activation(up(hidden))) of that expert. `up`, `down`, `gate`
    and the biases are names of parameters: [experts, out, in], or [experts, in, out] with
    `transposed`; biases [experts, out]. `activation(module, x)` turns the projected rows [rows, w]
    into [rows, inner size]; with a gate, or `gated` (one parameter that projects to twice the inner
    size), x holds the columns of gate and then those of up. `weighs_inputs`: weights scale the
    tokens that go into an expert, instead of what it makes of them.

    Where experts get no index, as their `layer` sends all tokens to all of them with weights of
    zero, `routed(module, ...)` is the forward of that class with choices alone: it calls the
    experts with hidden, index and weights, and returns what the forward does. That is equal where
    an expert makes zero of a token that it was not chosen for.

    Subclasses are declared with a class. The forward of a class still runs outside of autopar.
    Every process that plans or runs needs the call; a later one replaces an earlier.
    Raises `UsageError` for a class that is no module, or a function that can't be called.
    """
    layout = Layout(up, down, gate, up_bias, gate_bias, down_bias, transposed, gated, weighs_inputs)
    _check_class(kind, "the experts' class")
    _check_function("activation", activation, "a function of the module and the projected rows")
    _check_layout(layout)
    if (layer is None) != (routed is None):
        raise UsageError(
            f"layer={layer!r} and routed={routed!r}",
            next_step="give the layer's class and its forward with choices alone, or neither",
        )
    if layer is not None:
        _check_layer(layout, layer, routed)
    forget_experts(kind)
    _DECLARED[kind] = layout, activation
    if layer is not None and routed is not None:
        _LAYERS[layer] = kind, routed


def _check_class(kind: Any, what: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"{kind!r} is no class of modules", next_step=f"give {what}")


def _check_function(name: str, function: Any, what: str) -> None:
    if not callable(function):
        raise UsageError(f"{name}={function!r} can't be called", next_step=f"give {what}")


def _check_layout(layout: Layout) -> None:
    gate, gate_bias, up_bias = layout.gate, layout.gate_bias, layout.up_bias
    if gate and layout.gated:
        raise UsageError(
            f"gate={gate!r} and gated=True",
            next_step="name the gate's parameter, or say that up holds it too",
        )
    if bool(gate_bias) != bool(gate and up_bias):
        raise UsageError(
            f"gate={gate!r} has gate_bias={gate_bias!r} and up_bias={up_bias!r}",
            next_step="name the biases of both projections, or of none",
        )


def _check_layer(layout: Layout, layer: Any, routed: Any) -> None:
    what = "a function of the layer's module and its forward's arguments"
    _check_class(layer, "the class whose forward calls the experts")
    _check_function("routed", routed, what)
    if layout.weighs_inputs and (layout.up_bias or layout.down_bias):
        raise UsageError(
            "with biases, experts make something of tokens that they were not chosen for, which "
            f"{layer.__name__} adds up",
            next_step="leave layer= out: these experts have to get all tokens",
        )


def forget_experts(kind: type[nn.Module]) -> None:
    """Undo `declare_experts`; nothing happens when there was none."""
    _DECLARED.pop(kind, None)
    for layer in [layer for layer, (of, _) in _LAYERS.items() if of is kind]:
        del _LAYERS[layer]


def declared(module: nn.Module) -> tuple[Layout, Activation] | None:
    """What was declared for the module's class or the nearest class that it inherits from."""
    return next((_DECLARED[k] for k in type(module).__mro__ if k in _DECLARED), None)


def declared_layer(module: nn.Module) -> Routed | None:
    """The forward with choices alone that was declared for a layer's class or the nearest class
    that it inherits from."""
    return next((_LAYERS[k][1] for k in type(module).__mro__ if k in _LAYERS), None)
