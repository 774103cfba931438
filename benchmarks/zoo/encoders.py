"""Encoders and encoder-decoders of transformers, as language models with labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo.architecture import (
    BATCH,
    LANGUAGE,
    SEQUENCE,
    Architecture,
    Toy,
    configuration,
    from_config,
    noise,
    tokens,
)

MASKED: dict[str, dict[str, Any]] = {
    # One layer applied four times, and a narrow embedding that the head shares.
    "albert": {"embedding_size": 16, "num_hidden_layers": 4, "pad_token_id": 0},
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "deberta": {"pad_token_id": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"pad_token_id": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "electra": {"embedding_size": 32, "pad_token_id": 0},
    "modernbert": {"local_attention": 8, "pad_token_id": 0},
}

_HALVES = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 32,
}
_MARKERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2,
           "num_heads": 4},
    "bart": _HALVES,
    "marian": _HALVES,
    "pegasus": _HALVES,
}  # fmt: skip


def masked_lm(kind: str) -> Toy:
    config = configuration(kind, **{**LANGUAGE, **MASKED[kind]})
    ids = tokens()
    mask = torch.ones_like(ids)
    model = from_config("AutoModelForMaskedLM", config)
    return Toy(model, {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()})


def seq2seq(kind: str) -> Toy:
    sizes = {k: LANGUAGE[k] for k in ("vocab_size", "max_position_embeddings", "use_cache")}
    config = configuration(kind, **{**sizes, **_MARKERS, **SEQ2SEQ[kind]})
    model = from_config("AutoModelForSeq2SeqLM", config)
    return Toy(model, {"input_ids": tokens(), "labels": tokens(length=SEQUENCE // 2)})


def whisper() -> Toy:
    config = configuration(
        "whisper", vocab_size=LANGUAGE["vocab_size"], use_cache=False, num_mel_bins=8,
        max_source_positions=SEQUENCE, max_target_positions=64, suppress_tokens=None,
        begin_suppress_tokens=None, **_HALVES, **_MARKERS,
    )  # fmt: skip
    model = from_config("AutoModelForSpeechSeq2Seq", config)
    features = noise(BATCH, 8, 2 * SEQUENCE)
    return Toy(model, {"input_features": features, "labels": tokens(length=SEQUENCE // 2)})


def _masked(kind: str) -> Callable[[], Toy]:
    return lambda: masked_lm(kind)


def _seq2seq(kind: str) -> Callable[[], Toy]:
    return lambda: seq2seq(kind)


ENCODERS = (
    *(Architecture(kind, "encoder", _masked(kind)) for kind in MASKED),
    *(Architecture(kind, "encoder-decoder", _seq2seq(kind)) for kind in SEQ2SEQ),
    Architecture("whisper", "encoder-decoder", whisper),
)
