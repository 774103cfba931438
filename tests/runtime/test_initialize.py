"""Models on the meta device get the values that their own code sets, in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import UsageError
from autopar.runtime.initialize import materialize_model, module_values

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
MODELS = {
    "LlamaConfig": {**SMALL, "num_key_value_heads": 1},
    "Qwen3Config": {**SMALL, "num_key_value_heads": 1, "head_dim": 8},
    "Gemma2Config": {**SMALL, "num_key_value_heads": 1, "head_dim": 8},
    "GPT2Config": {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}


def build(name: str, device: str) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**MODELS[name])
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models(name: str) -> None:
    made, real = materialize_model(build(name, "meta")), build(name, "cpu")
    buffers = dict(made.named_buffers())
    for key, expected in real.named_buffers():
        torch.testing.assert_close(buffers[key], expected)
    parameters = dict(made.named_parameters())
    assert parameters.keys() == dict(real.named_parameters()).keys()
    for key, expected in real.named_parameters():
        got = parameters[key]
        # The same distribution: constants are equal, random values have like spread.
        if expected.std() == 0:
            torch.testing.assert_close(got, expected)
        else:
            assert 0.6 < got.std() / expected.std() < 1.6, key
    out = made(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert not torch.isnan(out.logits).any()


def test_values_depend_on_path_and_seed_only() -> None:
    model = build("LlamaConfig", "meta")
    path = "model.layers.1.mlp.up_proj"
    alone = module_values(model, path)["weight"]
    whole = materialize_model(model)
    torch.testing.assert_close(whole.get_parameter(f"{path}.weight"), alone, rtol=0, atol=0)
    assert not torch.equal(module_values(model, path, seed=1)["weight"], alone)
    sibling = module_values(model, "model.layers.0.mlp.up_proj")["weight"]
    assert not torch.equal(sibling, alone)
    assert model.get_parameter(f"{path}.weight").is_meta
    state = torch.get_rng_state()
    module_values(model, path)
    assert torch.equal(torch.get_rng_state(), state)


def test_scaled_by_the_module_around() -> None:
    """GPT-2 scales c_proj in the initialiser of the attention that holds it."""
    model = build("GPT2Config", "meta")
    plain = module_values(model, "transformer.h.0.mlp.c_fc")["weight"]
    scaled = module_values(model, "transformer.h.0.mlp.c_proj")["weight"]
    assert scaled.std() < 0.7 * plain.std()


def test_real_values_are_kept() -> None:
    model = nn.Linear(3, 2)
    values = module_values(model, "")
    assert values["weight"].data_ptr() == model.weight.data_ptr()


def test_nothing_to_set_a_parameter() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    assert module_values(model, "0")["weight"].shape == (3, 3)
    with pytest.raises(UsageError, match=r"'1\.gain' is on the meta device"):
        module_values(model, "1")
