"""Causal language models of transformers: a table of what each needs beyond the common sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.zoo.architecture import (
    LANGUAGE,
    Architecture,
    Toy,
    configuration,
    from_config,
    tokens,
)

_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
# A first layer without experts, then layers with one that all tokens share.
_SHARED_EXPERT = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
# Multi-head latent attention.
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}

# model_type -> what differs from LANGUAGE.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "vaultgemma": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "mpt": {"max_seq_len": 64, "expansion_ratio": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "granite": {},
    "nemotron": {},
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "xglm": {"ffn_dim": 64, "attention_heads": 4},
    "persimmon": {},
    "biogpt": {},
    "ctrl": {"dff": 64},
    "openai-gpt": {},
    "helium": {},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "apertus": {},
    "seed_oss": {},
    "bitnet": {},
    "diffllama": {},
    "nanochat": {},
    "modernbert-decoder": {"local_attention": 8, "pad_token_id": 0, "bos_token_id": 1,
                           "eos_token_id": 2},
    "mixtral": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "sliding_window": 8},
    "glm4_moe": {**_EXPERTS, **_SHARED_EXPERT, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_EXPERTS, **_SHARED_EXPERT, **_LATENT, "n_group": 2, "topk_group": 1},
    "jamba": {**_EXPERTS, "mamba_d_state": 4, "mamba_expand": 1, "mamba_dt_rank": 4,
              "use_mamba_kernels": False, "expert_layer_period": 2, "expert_layer_offset": 1,
              "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "lfm2": {},
}  # fmt: skip


def causal_lm(kind: str) -> Toy:
    model = from_config("AutoModelForCausalLM", configuration(kind, **{**LANGUAGE, **SIZES[kind]}))
    ids = tokens()
    return Toy(model, {"input_ids": ids, "labels": ids.clone()})


def _make(kind: str) -> Callable[[], Toy]:
    return lambda: causal_lm(kind)


CAUSAL_LMS = tuple(Architecture(kind, "causal language model", _make(kind)) for kind in SIZES)
