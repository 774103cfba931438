from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import UsageError
from autopar.models import ModelSource, resolve_model, zoo_names

# Total parameters in billions, tied weights once, as published (GPT-3: by the formula of GPT-2).
PARAMETERS = {
    "bloom-176b": 176.247,
    "deepseek-v3": 671.026,
    "falcon-7b": 6.922,
    "gemma2-27b": 27.227,
    "gemma2-9b": 9.242,
    "gpt-oss-120b": 116.829,
    "gpt2": 0.124,
    "gpt2-xl": 1.558,
    "gpt3-13b": 12.853,
    "gpt3-175b": 174.604,
    "gpt3-7b": 6.658,
    "llama2-13b": 13.016,
    "llama2-70b": 68.977,
    "llama2-7b": 6.738,
    "llama3-405b": 405.853,
    "llama3-70b": 70.554,
    "llama3-8b": 8.030,
    "llama3.1-70b": 70.554,
    "llama3.1-8b": 8.030,
    "llama3.2-1b": 1.236,
    "mistral-7b": 7.242,
    "mixtral-8x22b": 140.621,
    "mixtral-8x7b": 46.703,
    "opt-13b": 12.853,
    "opt-66b": 65.720,
    "phi3-mini": 3.821,
    "qwen2-7b": 7.616,
    "qwen3-235b-a22b": 235.094,
    "qwen3-30b-a3b": 30.532,
    "qwen3-32b": 32.762,
    "qwen3-8b": 8.191,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def resolve(text: str, sequence: int | None = None) -> ModelSource:
    return resolve_model(text, sequence=sequence, dtype=torch.bfloat16)


def test_the_table_covers_the_zoo() -> None:
    assert set(zoo_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", zoo_names())
def test_zoo_model(name: str) -> None:
    source = resolve(f"zoo:{name}")
    total = sum(parameter.numel() for parameter in source.model.parameters())
    assert total / 1e9 == pytest.approx(PARAMETERS[name], abs=6e-4)
    assert {p.dtype for p in source.model.parameters()} == {torch.bfloat16}
    assert {t.device.type for t in source.model.state_dict().values()} == {"meta"}
    assert all(b.dtype != torch.bfloat16 for b in source.model.buffers())
    assert source.model.training
    config: Any = source.model.config
    assert config.use_cache is False
    assert set(source.example_inputs) == {"input_ids", "labels"}
    for value in source.example_inputs.values():
        assert value.dtype == torch.int64 and value.device.type == "meta" and value.shape[0] == 2


def test_rotary_settings_of_the_config_are_kept() -> None:
    config: Any = resolve("zoo:llama3-405b").model.config
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert config.rope_parameters["rope_type"] == "llama3"


def test_sequence() -> None:
    assert resolve("zoo:llama3-8b", 8192).example_inputs["input_ids"].shape == (2, 8192)
    assert resolve("zoo:llama3-8b").example_inputs["input_ids"].shape == (2, 2048)
    assert resolve("zoo:gpt2").example_inputs["labels"].shape == (2, 1024)
    # ALiBi has no limit.
    assert resolve("zoo:bloom-176b", 4096).example_inputs["labels"].shape == (2, 4096)
    with pytest.raises(UsageError, match="8193 tokens.*max_position_embeddings 8192"):
        resolve("zoo:llama3-8b", 8193)
    with pytest.raises(UsageError, match="1 tokens"):
        resolve("zoo:llama3-8b", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zoo:lama3-8b", "zoo:llama3-8b"),
        ("zoo:llama9", "zoo:llama"),
        ("zoo:zzzz", "mixtral-8x7b"),
        ("zoo:", "gpt2"),
        ("llama3-8b", "zoo:llama3-8b"),
        ("", "zoo:NAME"),
        ("hf:meta-llama/Llama-3-8B", "nothing is downloaded"),
    ],
)
def test_unknown_names_get_help(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(text)
    assert words in str(caught.value)


def test_hf_config_by_file_or_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "dtype": "float16", "use_cache": True}))
    for text in (f"hf:{path}", f"hf:{tmp_path}"):
        source = resolve(text)
        assert source.name == text
        assert source.example_inputs["input_ids"].shape == (2, 32)
        assert {p.dtype for p in source.model.parameters()} == {torch.bfloat16}
    assert source.build is not None
    real = source.build("cpu")
    assert {p.device.type for p in real.parameters()} == {"cpu"}
    assert [(k, v.shape) for k, v in real.state_dict().items()] == [
        (k, v.shape) for k, v in source.model.state_dict().items()
    ]
    loss = real(**{k: torch.ones(2, 8, dtype=torch.int64) for k in ("input_ids", "labels")}).loss
    assert 2 < loss.item() < 7
    # The rotary table is computed in float32: 1, then theta ** (-2 / head dim).
    frequencies = dict(real.named_buffers())["model.rotary_emb.inv_freq"]
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no model_type"),
        ("{}", "no model_type"),
        ('{"model_type": "lama"}', "llama"),
        (json.dumps({"model_type": "vit"}), "causal language model"),
        (json.dumps({**TINY, "hidden_size": "wide"}), "config"),
    ],
)
def test_bad_hf_configs(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        resolve(f"hf:{path}")
    assert words in str(caught.value)


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install autopar\[hf\]"):
        resolve("zoo:gpt2")


FUNCTIONS = """
import torch
from dataclasses import dataclass

@dataclass
class Size:
    width: int = 4

class Net(torch.nn.Linear):
    def forward(self, rows, scale=None):
        return super().forward(rows).sum()

def by_name():
    return Net(4, 4), {"rows": torch.ones(2, 4)}

def by_position():
    return Net(Size().width, 4), (torch.ones(2, 4), torch.ones(()))

def alone():
    return Net(4, 4)

def too_many():
    return Net(4, 4), (1, 2, 3)

def not_tensors():
    return Net(4, 4), {"rows": [1.0]}

def nothing():
    pass

def needs(argument):
    pass

def hugging_face():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=32))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "nets.py"
    path.write_text(FUNCTIONS)
    return path


def test_function_models_are_taken_as_they_are(file: Path) -> None:
    source = resolve(f"{file}:by_name")
    assert set(source.example_inputs) == {"rows"}
    assert next(source.model.parameters()).dtype == torch.float32
    assert next(source.model.parameters()).device.type == "cpu"
    assert source.build is None
    assert set(resolve(f"{file}:by_position").example_inputs) == {"rows", "scale"}


def test_a_hugging_face_factory_gets_token_inputs(file: Path) -> None:
    source = resolve(f"{file}:hugging_face", 16)
    assert source.example_inputs["labels"].shape == (2, 16)
    assert source.model(**source.example_inputs).loss.isfinite()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("by_nam", "did you mean by_name?"),
        ("alone", "without example inputs"),
        ("too_many", "3 example inputs don't fit Net.forward"),
        ("not_tensors", "not tensors by argument name"),
        ("nothing", "returned NoneType"),
        ("needs", "without arguments"),
    ],
)
def test_bad_functions(file: Path, function: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(f"{file}:{function}")
    assert words in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        resolve(f"{tmp_path}/missing.py:make")
    broken = tmp_path / "broken.py"
    broken.write_text("import nowhere_to_be_found\n")
    with pytest.raises(UsageError, match="can't be imported: ModuleNotFoundError"):
        resolve(f"{broken}:make")
