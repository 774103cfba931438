"""Real text that every full Python installation carries: the language's own reference topics.

`batches` turns it into byte-level training batches. No download, no tokenizer: a token is a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

VOCABULARY = 256


@cache
def corpus() -> Tensor:
    """The reference topics of `help()`: about half a megabyte of text, as one int64 vector."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(batch: int, sequence: int, steps: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """`steps` batches of windows at random offsets; the same seed gives the same batches.

    `labels` equals `input_ids`: causal language models shift them by one inside.
    """
    tokens = corpus()
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - sequence, (batch, 1), generator=random)
        ids = tokens[starts + torch.arange(sequence)]
        yield {"input_ids": ids, "labels": ids.clone()}
