"""Vision, speech and diffusion backbones of transformers and diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo.architecture import (
    BATCH,
    LANGUAGE,
    Architecture,
    Toy,
    configuration,
    from_config,
    noise,
    stirred,
    tokens,
)

CLASSES, SIZE = 8, 32

_TRANSFORMER = {
    "image_size": SIZE,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": _TRANSFORMER,
    "dinov2": {**_TRANSFORMER, "mlp_ratio": 2},
    "swin": {"image_size": SIZE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
             "num_heads": [2, 4], "window_size": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
               "layer_type": "basic"},
}  # fmt: skip


def classifier(kind: str) -> Toy:
    config = configuration(kind, num_labels=CLASSES, **CLASSIFIERS[kind])
    model = from_config("AutoModelForImageClassification", config)
    return Toy(model, {"pixel_values": noise(BATCH, 3, SIZE, SIZE), "labels": _classes()})


def _classes() -> torch.Tensor:
    return torch.arange(BATCH) % CLASSES


def clip() -> Toy:
    text = {**LANGUAGE, "projection_dim": 16, "eos_token_id": 2}
    config = configuration(
        "clip",
        text_config={k: v for k, v in text.items() if v is not None},
        vision_config={**_TRANSFORMER, "projection_dim": 16},
        projection_dim=16,
    )
    inputs = {"input_ids": tokens(), "pixel_values": noise(BATCH, 3, SIZE, SIZE)}
    return Toy(from_config("AutoModel", config), {**inputs, "return_loss": True})


def segformer() -> Toy:
    config = configuration(
        "segformer", num_labels=CLASSES, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4],
        mlp_ratios=[2, 2], decoder_hidden_size=32,
    )  # fmt: skip
    model = from_config("AutoModelForSemanticSegmentation", config)
    labels = torch.arange(BATCH * SIZE * SIZE).view(BATCH, SIZE, SIZE) % CLASSES
    return Toy(model, {"pixel_values": noise(BATCH, 3, SIZE, SIZE), "labels": labels})


def detr() -> Toy:
    """Its own loss matches boxes with scipy on the host; here each query has a class."""
    backbone = configuration(
        "resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = configuration(
        "detr", backbone_config=backbone, use_timm_backbone=False, backbone=None,
        use_pretrained_backbone=False, num_queries=6, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_labels=CLASSES,
    )  # fmt: skip
    model = from_config("AutoModelForObjectDetection", config)
    inputs = {"pixel_values": noise(BATCH, 3, SIZE, SIZE), "classes": _queries(), "boxes": _boxes()}
    return Toy(model, inputs, detection_loss)


def _queries() -> torch.Tensor:
    return torch.arange(BATCH * 6).view(BATCH, 6) % CLASSES


def _boxes() -> torch.Tensor:
    return noise(BATCH, 6, 4).sigmoid()


def detection_loss(outputs: Any, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, classes.flatten())
    return loss + torch.nn.functional.l1_loss(outputs.pred_boxes, boxes)


def wav2vec2() -> Toy:
    config = configuration(
        "wav2vec2", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=CLASSES,
        num_attention_heads=4, conv_dim=[16, 16], conv_kernel=[10, 3], conv_stride=[5, 2],
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        classifier_proj_size=32, apply_spec_augment=False,
    )  # fmt: skip
    model = from_config("AutoModelForAudioClassification", config)
    return Toy(model, {"input_values": noise(BATCH, 400), "labels": _classes()})


def unet() -> Toy:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, dropout=0.0,
    )  # fmt: skip
    inputs = _denoising(3, 8)
    return Toy(stirred(model), {"sample": inputs.pop("image"), **inputs}, denoising_loss)


def dit() -> Toy:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, patch_size=2, num_layers=2,
        num_attention_heads=4, attention_head_dim=8, norm_num_groups=4, num_embeds_ada_norm=16,
    )  # fmt: skip
    # Its label embedding drops labels at random, for guidance; off for a comparison.
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    inputs = {**_denoising(4, 8), "class_labels": _classes()}
    return Toy(stirred(model), {"hidden_states": inputs.pop("image"), **inputs}, dit_loss)


def _denoising(channels: int, size: int) -> dict[str, torch.Tensor]:
    inputs = {key: noise(BATCH, channels, size, size) for key in ("image", "noise")}
    return {"timestep": torch.arange(BATCH) * 10, **inputs}


def denoising_loss(outputs: Any, noise: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs.sample, noise)


def dit_loss(outputs: Any, noise: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs.sample[:, : noise.shape[1]], noise)


def _classifier(kind: str) -> Callable[[], Toy]:
    return lambda: classifier(kind)


VISION = (
    *(Architecture(kind, "vision", _classifier(kind)) for kind in CLASSIFIERS),
    Architecture("clip", "vision", clip),
    Architecture("segformer", "vision", segformer),
    Architecture("detr", "vision", detr),
    Architecture("wav2vec2", "speech", wav2vec2),
    Architecture("unet", "diffusion", unet),
    Architecture("dit", "diffusion", dit),
)
