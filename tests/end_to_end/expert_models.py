"""Toy models with experts for end-to-end tests, in the form `file.py:function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.experts.capacity import limit_experts
from tests.end_to_end.models import SEQUENCE, VOCABULARY

MODELS = __file__
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Latent attention, and shared experts from the second layer on.
_LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
}
Toy = tuple[nn.Module, dict[str, torch.Tensor]]


def _toy(kind: str, **changes: Any) -> Toy:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_SIZES, **changes}))
    # Random weights of order one: with the usual tiny initialisation many gradients are near zero.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    ids = torch.arange(4 * SEQUENCE).view(4, SEQUENCE) % VOCABULARY
    return model, {"input_ids": ids, "labels": ids.clone()}


def mixtral() -> Toy:
    return _toy("mixtral")


def mixtral_top1() -> Toy:
    return _toy("mixtral", num_experts_per_tok=1)


def mixtral_top4() -> Toy:
    """Of eight: each rank of four has two."""
    return _toy("mixtral", num_experts=8, num_local_experts=8, num_experts_per_tok=4)


def mixtral_auxiliary_loss() -> Toy:
    return _toy("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)


def mixtral_idle_expert() -> Toy:
    """Expert 1 gets no token: its router row is zero where every other's can't all be negative."""
    model, inputs = _toy("mixtral", num_experts_per_tok=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                # Two rows that are each other's opposite: one of them is above zero.
                parameter[1] = 0
                parameter[2] = -parameter[0]
    return model, inputs


def qwen3_moe() -> Toy:
    return _toy("qwen3_moe", decoder_sparse_step=1)


def qwen3_moe_auxiliary_loss() -> Toy:
    """With an attention mask: padding does not count as load."""
    auxiliary = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    model, inputs = _toy("qwen3_moe", decoder_sparse_step=1, **auxiliary)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -3:] = mask[2, -5:] = 0
    return model, {**inputs, "attention_mask": mask}


def qwen2_moe() -> Toy:
    """With shared experts, behind a gate of their own."""
    return _toy("qwen2_moe", decoder_sparse_step=1, shared_expert_intermediate_size=16)


def olmoe() -> Toy:
    return _toy("olmoe")


def gpt_oss() -> Toy:
    return _toy("gpt_oss", sliding_window=8)


def deepseek_v3() -> Toy:
    return _toy("deepseek_v3", **_LATENT, n_group=2, topk_group=1)


def deepseek_v2() -> Toy:
    return _toy("deepseek_v2", **_LATENT)


def ernie4_5_moe() -> Toy:
    return _toy("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1)


def glm4_moe() -> Toy:
    return _toy("glm4_moe", n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1)


def granitemoe() -> Toy:
    return _toy("granitemoe")


def minimax() -> Toy:
    """Linear attention in the first layer."""
    return _toy("minimax")


def jamba() -> Toy:
    """A state-space layer, then one of attention; experts in every second layer."""
    kinds = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    return _toy("jamba", **kinds)


def phimoe() -> Toy:
    """Its routers draw random numbers in training: they choose as they do in evaluation."""
    model, inputs = _toy("phimoe")
    for layer in model.model.layers:
        router = layer.mlp.router.eval()
        router.train = lambda mode=True: None
    return model, inputs


def llama4_text(choices: int = 1) -> Toy:
    """Scores of chosen experts scale what goes into them; experts in every second layer, and
    attention without positions in the last."""
    sizes = {"intermediate_size_mlp": 32, "interleave_moe_layer_step": 2, "num_hidden_layers": 4}
    return _toy("llama4_text", **sizes, num_experts_per_tok=choices, attention_chunk_size=8)


def llama4_text_top2() -> Toy:
    return llama4_text(2)


def mixtral_limited() -> Toy:
    """With a limit that no expert can reach: each token has two different ones of four."""
    model, inputs = mixtral()
    limit_experts(model, 2.0)
    return model, inputs


def mixtral_dropping() -> Toy:
    model, inputs = mixtral()
    limit_experts(model, 0.75)
    return model, inputs
