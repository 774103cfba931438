"""Both halves of a backward together give the gradients of a whole one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.runtime.divided_backward import input_backward

Tensor = torch.Tensor
WIDTH = 6


class Model(nn.Module):
    """`body(self, x)`: two layers and a norm, put together in one way or another."""

    def __init__(self, body: Callable[[Model, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH).double()
        self.one = nn.Linear(WIDTH, WIDTH).double()
        self.two = nn.Linear(WIDTH, WIDTH).double()
        self.body = body

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.body(self, x)


def plain(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    return (x + m.two(functional.gelu(m.one(m.norm(x)))),)


def tied(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    """One weight read three times, once behind itself and once behind another weight."""
    h = m.one(torch.tanh(m.one(m.norm(x))))
    return (m.two(h) + functional.linear(torch.sin(h), m.one.weight),)


def shared_in_part(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    """One weight read by three ops, each with another weight of its own."""
    h = functional.linear(x, m.two.weight, m.one.bias)
    h = functional.linear(torch.tanh(h), m.two.weight, m.two.bias)
    return (functional.linear(torch.tanh(h), m.two.weight, m.norm.bias),)


def products_of_weights(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    """Made of weights alone, read on the way of the input, and passed on."""
    scale = m.one.bias * m.norm.weight
    h = torch.tanh(torch.tanh(x * scale) + scale * m.two.bias)
    return h * (m.norm.bias * m.two.bias), scale * 2


def transformed(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    """What is read is made of weights alone first; one of them is used in both branches."""
    mixed = (m.one.weight * 0.5 + m.two.weight).t()
    return (functional.linear(m.norm(x), mixed, m.one.bias) * m.two.bias,)


def a_view_comes_out(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    y = m.one(x)
    return y.view(-1), m.two(m.norm(y))[:, :2]


def some_unused(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    return m.one(x), torch.ones(3).double(), x * 2


def no_weights(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    return (torch.sin(x),)


BODIES = (
    *(plain, tied, shared_in_part, products_of_weights, transformed),
    *(a_view_comes_out, some_unused, no_weights),
)


def gradients(model: Model, x: Tensor, *, divide: bool, into: int = 2) -> list[Tensor | None]:
    """Of the input and all parameters, after `into` backwards that add up; the second halves come
    in the order of the first ones, after all of them."""
    later, of_input = [], None
    for turn in range(into):
        generator = torch.Generator().manual_seed(turn)
        given = x.detach() + turn
        given.requires_grad_(x.requires_grad)
        outputs = model(given)
        found = [
            torch.randn(o.shape, generator=generator, dtype=o.dtype) if o.requires_grad else None
            for o in outputs
        ]
        if divide:
            (of_input,), second = input_backward(outputs, found, [given], model.parameters())
            assert all(p.grad is None for p in model.parameters()) or turn == 0 or later
            later.append(second)
        else:
            pairs = [(o, g) for o, g in zip(outputs, found, strict=True) if g is not None]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            of_input = given.grad
    for second in later:
        second.run(lambda weights: None)
    return [of_input, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("received", [True, False])
def test_gradients_are_those_of_a_whole_backward(
    body: Callable[[Model, Tensor], tuple[Tensor, ...]], received: bool
) -> None:
    if body is no_weights and not received:
        pytest.skip("there is no gradient at all")
    x = torch.randn(4, WIDTH, dtype=torch.float64).requires_grad_(received)
    whole = gradients(Model(body), x, divide=False)
    halves = gradients(Model(body), x, divide=True)
    for expected, found in zip(whole, halves, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_first_half_leaves_weights_alone_and_the_second_tells_of_each_once() -> None:
    model = Model(plain)
    model.two.bias.requires_grad_(False)
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    (found,), second = input_backward(
        model(x), [torch.ones(4, WIDTH).double()], [x], model.parameters()
    )
    assert found is not None and x.grad is None
    assert all(p.grad is None for p in model.parameters())
    order: list[str] = []
    names = {p: n for n, p in model.named_parameters()}

    def arrived(weights: list[nn.Parameter]) -> None:
        assert all(w.grad is not None for w in weights)
        order.extend(names[w] for w in weights)

    second.run(arrived)  # type: ignore[arg-type]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(order) == sorted(trained)
    assert order.index("two.weight") < order.index("one.weight") < order.index("norm.weight")


def test_hooks_of_weights_see_the_second_half() -> None:
    """What sums gradients over ranks waits for these."""
    model, seen = Model(plain), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    _, second = input_backward(model(x), [torch.ones(4, WIDTH).double()], [x], model.parameters())
    assert not seen
    second.run(lambda weights: None)
    assert sorted(seen) == sorted(n for n, _ in model.named_parameters())


def test_what_was_saved_goes_layer_by_layer() -> None:
    """In the second half, from the last layer on; behind the last weight already before it."""
    import gc
    import weakref

    model = Model(plain)
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    kept: dict[str, weakref.ref[Tensor]] = {}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):  # type: ignore[no-untyped-def]
            value = x.detach().clone()
            ctx.value = value
            kept[name] = weakref.ref(value)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
            return gradient, None

    def run(x: Tensor) -> tuple[Tensor, ...]:
        first = Watched.apply(model.one(x), "one")
        last = Watched.apply(model.two(Watched.apply(first, "middle")), "behind")
        return (last,)

    outputs = run(x)
    gc.disable()
    try:
        _, second = input_backward(outputs, [torch.ones_like(outputs[0])], [x], model.parameters())
        del outputs
        assert kept["behind"]() is None and kept["middle"]() is not None
        there: list[bool] = []
        second.run(lambda weights: there.append(kept["middle"]() is not None))
    finally:
        gc.enable()
    # Of two groups, each a weight and its bias: first the last layer's, which holds what is before.
    assert there == [True, False]
    assert kept["one"]() is None


def test_outputs_that_are_made_of_weights_alone_count_too() -> None:
    """As T5's bias of positions, which its first block hands to all others."""
    torch.manual_seed(0)
    weights = {n: nn.Parameter(torch.randn(4, 4)) for n in ("layer", "bias", "only", "unused")}
    x = torch.randn(3, 4, requires_grad=True)

    def outputs() -> list[torch.Tensor]:
        bias = weights["bias"].exp().sum(0)
        return [(x @ weights["layer"]).tanh() + bias, bias, weights["only"].sin().sum(0)]

    gradients = [torch.randn_like(o) for o in outputs()]
    torch.autograd.backward(outputs(), gradients)
    wanted = {n: w.grad for n, w in weights.items()}
    wanted_input, x.grad = x.grad, None
    for weight in weights.values():
        weight.grad = None

    found, second = input_backward(outputs(), gradients, [x], weights.values())
    assert found[0] is not None and wanted_input is not None
    torch.testing.assert_close(found[0], wanted_input)
    arrived: list[nn.Parameter] = []
    second.run(arrived.extend)
    names = {id(w): n for n, w in weights.items()}
    assert sorted(names[id(w)] for w in arrived) == ["bias", "layer", "only"]
    for name, gradient in wanted.items():
        if gradient is None:
            assert weights[name].grad is None
        else:
            torch.testing.assert_close(weights[name].grad, gradient)


def test_gradients_of_inputs_are_laid_out_as_they_are_sent() -> None:
    """Behind a permuted value autograd makes a gradient that no rank could send."""
    weight = nn.Parameter(torch.randn(3).double())
    x = torch.randn(2, 3, 4, 5).double().requires_grad_()
    given = torch.randn(2, 4, 5, 3).double()
    (found,), _ = input_backward((x.permute(0, 2, 3, 1) * weight,), (given,), [x], [weight])
    assert found is not None and found.is_contiguous()
    assert torch.equal(found, (given * weight).permute(0, 3, 1, 2))


def test_a_loss_that_no_input_goes_into_is_of_its_weights() -> None:
    """A stage that stops the gradient of what it received has one for its weights all the same."""
    layer = nn.Linear(WIDTH, 1).double()
    x = torch.randn(3, WIDTH).double().requires_grad_()
    loss = layer(x.detach()).sum()
    (found,), later = input_backward((loss,), None, [x], list(layer.parameters()))
    loss.detach_()  # as the pipeline does, so that nothing of the graph is held by it
    later.run(lambda weights: None)
    assert found is None
    assert torch.equal(layer.weight.grad, x.detach().sum(0, keepdim=True))
    assert torch.equal(layer.bias.grad, torch.tensor([3.0]).double())
