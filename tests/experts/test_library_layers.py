"""Layers of the library that send all tokens to all experts, against their own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.experts.library_layers import library_experts, library_layer
from autopar.passes.capture_experts import experts_as_one_op

HIDDEN, TOKENS = 8, 13


def layer(choices: int) -> Any:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    sizes = {"num_local_experts": 5, "num_experts_per_tok": choices}
    made: Any = Llama4TextMoe(Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=6, **sizes))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made.double()


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_equal_to_its_own_forward(choices: int) -> None:
    torch.manual_seed(choices)
    module = layer(choices)
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    leaves, seed = [hidden, *module.parameters()], torch.randn(TOKENS, HIDDEN).double()

    def run() -> tuple[Tensor, ...]:
        made, logits = module(hidden)
        return made, logits, *torch.autograd.grad((made * seed).sum() + logits.sum(), leaves)

    expected = run()
    with experts_as_one_op(module) as notes:
        got = run()
    assert len(notes) == 1 and "Llama4TextMoe" in notes[0]
    torch.testing.assert_close(got, expected)


def test_experts_that_were_not_chosen_have_no_gradient_either_way() -> None:
    module = layer(1)
    with torch.no_grad():
        module.router.weight[1] = 0
        module.router.weight[2] = -module.router.weight[0]  # one of the two is above zero
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    module(hidden)[0].sum().backward()
    assert not module.experts.down_proj.grad[1].any()


def test_other_modules_are_none_of_them() -> None:
    class Changed(type(layer(1).experts)):  # type: ignore[misc]
        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return hidden

    module = layer(1)
    assert library_experts(module) is None and library_layer(module.experts) is None
    assert library_layer(module) is not None
    module.experts = Changed.__new__(Changed)
    assert library_experts(module.experts) is None
    nn.Module.__init__(module.experts)
    assert library_layer(module) is None
