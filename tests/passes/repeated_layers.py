"""Models whose layers look alike: some are, some only seem so."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS = 8, 7
X = torch.ones(4, WIDTH)


class Layer(nn.Module):
    """Two linear layers around which each test puts what it is about."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.up: Any = nn.Linear(WIDTH, WIDTH)
        self.down: Any = nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Stack(nn.Module):
    """Runs its layers in a row and returns the sum."""

    def __init__(self, make: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(make(i) for i in range(layers))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).sum()


# What can make layers of one structure differ.


class InArithmetic(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.index


class InCondition(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if self.index % 3 else torch.tanh(x)


class AsListIndex(Layer):
    scales = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scales[self.index]


class ByGetattr(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * getattr(self, "in" + "dex")


class ByVars(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * vars(self)["index"]


class ByProperty(Layer):
    @property
    def scale(self) -> float:
        return self.index + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


class ByPresence(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index > 3:
            self.late = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * 2 if hasattr(self, "late") else self.body(x)


class InConfiguration(Layer):
    class Settings:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings = self.Settings(1.0 + index // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.settings.scale


class InClosure(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scaled = lambda x: x * (index // 4 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.body(x))


class Counting(Layer):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return self.body(x) * Counting.calls


class Shared:
    calls = 0


class CountingElsewhere(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.shared = Shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.calls += 1
        return self.body(x) * self.shared.calls


class CountingItself(Layer):
    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.body(x) * self.seen


class OtherDropout(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop = nn.Dropout(0.5 if index == 3 else 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.body(x))


class PartlyInEval(OtherDropout):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop.train(index != 4)


LAYER_KINDS = [
    InArithmetic,
    InCondition,
    AsListIndex,
    ByGetattr,
    ByVars,
    ByProperty,
    ByPresence,
    InConfiguration,
    InClosure,
    Counting,
    CountingElsewhere,
    CountingItself,
    OtherDropout,
    PartlyInEval,
]


COLLECTED: list[torch.Tensor] = []
SWITCH = {"scale": 1.0}


class Collecting(Stack):
    """The layers put their results into a global list, which the model reads."""

    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            COLLECTED.append(self.body(x))
            return COLLECTED[-1]

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COLLECTED.clear()
        self.run(x)
        return torch.stack(COLLECTED).sum()


class Switching(Stack):
    """The model changes a global before each layer, which the layers read."""

    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * SWITCH["scale"]

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            SWITCH["scale"] = 1.0 + index // 4
            x = layer(x)
        return x.sum()


class ListArgument(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            seen.append(self.body(x))
            return seen[-1]

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return torch.stack(seen).sum()


class KeepsActivation(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = [torch.relu(self.up(x))]
            return x + self.down(self.kept[0])

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(x)
        return x.sum() + sum(layer.kept[0].sum() for layer in self.layers)


class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[4].up.register_forward_pre_hook(lambda _, args: (args[0] * 3,))


class HookOnAll(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _, a, out, k=index: out * k)


class ReturnsInput(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:  # type: ignore[override]
            return {"x": self.body(x) + bias, "bias": bias, "rest": (None, 3)}

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = {"x": x, "bias": x * 2}
        for layer in self.layers:
            out = layer(out["x"], bias=out["bias"])
        return (out["x"] + out["bias"]).sum()


class ReturnsView(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x), x.view(-1)

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        for layer in self.layers:
            x, flat = layer(x)
            total = total + flat.sum()
        return total + x.sum()


class WritesInPlace(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(self.down(torch.relu(self.up(x))))

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x * 1).sum()


class NoOpOnInput(Stack):
    """`.to` of what already is so returns its input under another node."""

    class Layer(Layer):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.body(x.to(torch.float32)) + other.to(torch.float32)

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x * 2
        for layer in self.layers:
            x = layer(x, other) + other
        return x.sum()


class FirstInputAgain(Stack):
    """All layers read, behind their arguments, what only the first one also gets as argument."""

    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + COLLECTED[0]

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COLLECTED[:] = [x * 2]
        return self.run(COLLECTED[0]).sum()


class SharedPart(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.up = self.layers[0].up


class TiedInOne(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[4].up.weight = self.layers[4].down.weight


class CalledTwice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.run(x)).sum()


class OneLayerOften(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            x = self.layers[0](x)
        return x.sum()


class PartlyFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:3]:
            layer.requires_grad_(False)


class WithoutGrad(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.up(x).abs().mean()
            return self.body(x) / scale

    def __init__(self) -> None:
        super().__init__(self.Layer)


class BufferInSome(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            value = torch.ones(WIDTH)
            if index % 2:
                layer.register_buffer("scale", value)
            else:
                layer.scale = nn.Parameter(value)


class OwnForward(Stack):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.forward = functools.partial(self.scaled, layer, index)

    @staticmethod
    def scaled(layer: Layer, index: int, x: torch.Tensor) -> torch.Tensor:
        return layer.body(x) * index


class Constants(Stack):
    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * torch.tensor([1.0, 2.0] * (WIDTH // 2), device=x.device)

    def __init__(self) -> None:
        super().__init__(self.Layer)


class Variadic(Stack):
    class Layer(Layer):
        def forward(self, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self.body(args[0]) * kwargs["scale"] + kwargs.get("more", 0)

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, scale=2.0 if index != 4 else 2, **({"more": 1} if index == 5 else {}))
        return x.sum()


class OnOtherLines(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x)
        x = self.layers[2](x)
        x = self.layers[3](x)
        x = self.layers[4](torch.relu(x))
        return self.layers[6](self.layers[5](x)).sum()


class BatchNorms(Stack):
    class Layer(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.body(x))

    def __init__(self) -> None:
        super().__init__(self.Layer)


class Nested(Stack):
    class Outer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.parts = nn.Sequential(*(Layer(i) for i in range(5)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts(x) * self.index

    def __init__(self) -> None:
        super().__init__(self.Outer, 4)


class OfTorch(Stack):
    def __init__(self) -> None:
        super().__init__(lambda _: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x[:, None]).sum()


MODELS = [
    Collecting, Switching, ListArgument, KeepsActivation, Hooked, HookOnAll, ReturnsInput,
    ReturnsView, WritesInPlace, NoOpOnInput, FirstInputAgain, SharedPart, TiedInOne, CalledTwice,
    OneLayerOften, PartlyFrozen, WithoutGrad, BufferInSome, OwnForward, Constants, Variadic,
    OnOtherLines, BatchNorms, Nested, OfTorch,
]  # fmt: skip
