"""Plain torch models, and a Llama with LoRA adapters on a frozen base."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.architecture import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    Architecture,
    Toy,
    class_loss,
    noise,
    stirred,
    tokens,
)
from benchmarks.zoo.causal_lms import causal_lm

CLASSES, WIDTH = 8, 32


class Translator(nn.Module):
    """nn.Transformer between two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length = target.shape[1]
        mask = torch.triu(
            torch.full((length, length), float("-inf"), device=target.device), diagonal=1
        )
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.head(hidden)


class LstmLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return self.head(hidden)


class TwoTowers(nn.Module):
    """A recommender: almost all of its parameters are two embedding tables."""

    def __init__(self, users: int = 4096, items: int = 8192) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, WIDTH), nn.Embedding(items, WIDTH)
        self.user_tower = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.item_tower = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        scores = (self.user_tower(self.users(user)) * self.item_tower(self.items(item))).sum(-1)
        return F.binary_cross_entropy_with_logits(scores, clicked)


def token_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def _classes() -> torch.Tensor:
    return torch.arange(BATCH) % CLASSES


def mlp() -> Toy:
    layers: list[nn.Module] = [nn.Linear(16, WIDTH)]
    for _ in range(3):
        layers += [nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    return Toy(stirred(model), {"input": noise(BATCH, 16), "labels": _classes()}, class_loss)


def cnn() -> Toy:
    """With a batch norm, whose running statistics move."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip
    images = noise(BATCH, 3, 16, 16)
    return Toy(stirred(model), {"input": images, "labels": _classes()}, class_loss)


def transformer() -> Toy:
    target = tokens(length=SEQUENCE // 2)
    inputs = {"source": tokens(), "target": target, "labels": target.clone()}
    return Toy(stirred(Translator()), inputs, token_loss)


def lstm() -> Toy:
    ids = tokens()
    return Toy(stirred(LstmLanguageModel()), {"ids": ids, "labels": ids.clone()}, token_loss)


def two_towers() -> Toy:
    rows = torch.arange(BATCH)
    inputs = {"user": rows * 1000, "item": rows * 2000, "clicked": (rows % 2).float()}
    return Toy(stirred(TwoTowers()), inputs)


def lora_llama() -> Toy:
    from peft import LoraConfig, get_peft_model

    toy = causal_lm("llama")
    names = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, lora_dropout=0.0)
    return Toy(stirred(get_peft_model(toy.model, config)), toy.inputs)


PLAIN = (
    Architecture("mlp", "plain torch", mlp),
    Architecture("cnn", "plain torch", cnn),
    Architecture("transformer", "plain torch", transformer),
    Architecture("lstm", "plain torch", lstm),
    Architecture("two-towers", "plain torch", two_towers),
    Architecture("llama with LoRA", "PEFT", lora_llama),
)
