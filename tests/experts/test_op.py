"""The op of a layer's experts equals transformers' own experts, values and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.experts.activation import text_of
from autopar.op_call import OpCall, Operand
from autopar.passes.analysis.saved_tensors import saved_by
from autopar.program import TensorType

TOKENS, HIDDEN, INNER, EXPERTS = 13, 8, 6, 5
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}


def layer(kind: str) -> Any:
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "experts_implementation": "eager",
    }
    made: Any = (
        MixtralExperts(MixtralConfig(**sizes))
        if kind == "mixtral"
        else GptOssExperts(GptOssConfig(**sizes))
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def arguments(module: Any, split: bool) -> list[Any]:
    """From `up` on."""
    up, bias, gate, gate_bias = module.gate_up_proj, None, None, None
    if module.has_bias:
        bias = module.gate_up_proj_bias
    if split:
        gate, up = up.chunk(2, 1)
    down_bias = module.down_proj_bias if module.has_bias else None
    text = text_of(module._apply_gate, up.dtype, 2)
    tensors = [up, module.down_proj, gate, bias, gate_bias, down_bias]
    return [*tensors, EXPERTS, 0, 1, module.is_transposed, text]


def inputs(dtype: torch.dtype, choices: int, idle: bool) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    index = torch.stack([torch.randperm(EXPERTS - idle)[:choices] for _ in range(TOKENS)])
    return hidden, index, torch.rand(TOKENS, choices, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize("kind", ["mixtral", "mixtral split", "gpt_oss"])
def test_equal_to_the_models_own(kind: str, choices: int, dtype: torch.dtype) -> None:
    torch.manual_seed(choices)
    module = layer(kind.split()[0]).to(dtype)
    hidden, index, weights = inputs(dtype, choices, idle=True)
    expected = module(hidden, index, weights)
    got = torch.ops.autopar.experts(hidden, index, weights, *arguments(module, "split" in kind))
    leaves = [hidden, weights, *module.parameters()]
    seed = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, seed)
    found = torch.autograd.grad(got, leaves, seed)
    assert got.dtype == dtype
    for a, b in zip((got, *found), (expected, *wanted), strict=True):
        error = float((a - b).detach().norm() / b.detach().norm())
        assert error <= DTYPES[dtype], error
    # Nothing was sent to the last expert.
    assert not found[2][-1].any() and found[2][0].any()


def test_experts_of_several_ranks_add_up() -> None:
    torch.manual_seed(0)
    module = layer("gpt_oss").to(torch.float64)
    hidden, index, weights = inputs(torch.float64, 2, idle=False)
    *tensors, experts, first, spread, transposed, text = arguments(module, False)
    whole = torch.ops.autopar.experts(
        hidden, index, weights, *tensors, experts, first, spread, transposed, text
    )
    total = torch.zeros_like(whole)
    for start, stop in ((0, 2), (2, 5)):
        own = [t[start:stop] if t is not None else None for t in tensors]
        total += torch.ops.autopar.experts(
            hidden, index, weights, *own, experts, start, spread, transposed, text
        )
    torch.testing.assert_close(total, whole)


def test_no_token_at_all() -> None:
    module = layer("mixtral")
    hidden = torch.empty(0, HIDDEN, requires_grad=True)
    index, weights = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    got = torch.ops.autopar.experts(hidden, index, weights, *arguments(module, True))
    got.sum().backward()
    assert got.shape == (0, HIDDEN) and not module.down_proj.grad.any()


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_an_expert_that_there_is_not(wrong: int) -> None:
    module = layer("mixtral")
    index = torch.full((TOKENS, 1), wrong)
    given = (torch.randn(TOKENS, HIDDEN), index, torch.rand(TOKENS, 1))
    with pytest.raises(IndexError, match=f"expert {wrong} is chosen, there are {EXPERTS}"):
        torch.ops.autopar.experts(*given, *arguments(module, False))


def test_only_wanted_gradients_are_made() -> None:
    module = layer("gpt_oss").requires_grad_(False)
    hidden, index, weights = inputs(torch.float32, 2, idle=False)
    weights.requires_grad_(False)
    got = torch.ops.autopar.experts(hidden, index, weights, *arguments(module, False))
    got.sum().backward()
    assert hidden.grad is not None and module.down_proj.grad is None and weights.grad is None


@pytest.mark.parametrize("kind", ["mixtral split", "gpt_oss"])
def test_what_is_kept_is_what_the_analysis_says(kind: str) -> None:
    module = layer(kind.split()[0])
    hidden, index, weights = inputs(torch.float32, 2, idle=False)
    given = [hidden, index, weights, *arguments(module, "split" in kind)]
    tensors = [v for v in given if isinstance(v, Tensor)]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = torch.ops.autopar.experts(*given)
    own = {t.untyped_storage()._cdata for t in (*tensors, result)}
    extra = sum(size for key, size in kept.items() if key not in own)
    types = tuple(TensorType(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    places = iter(range(len(tensors)))
    args = tuple(Operand(next(places)) if isinstance(v, Tensor) else v for v in given)
    names = tuple(f"x{i}" for i in range(len(tensors)))
    out = (TensorType(tuple(result.shape), result.dtype, True),)
    call = OpCall("experts", torch.ops.autopar.experts.default, args, {}, names, types, out)
    saved = saved_by(call)
    assert saved.extra_bytes == extra > 0 and not saved.result
    assert saved.operands == {i for i, t in enumerate(tensors) if t is not index}
