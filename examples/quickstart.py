"""Train an unmodified Hugging Face Llama on several ranks; nothing below names a parallelism.

torchrun --nproc-per-node 4 examples/quickstart.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from text import VOCABULARY, batches

BATCH, SEQUENCE, STEPS = 8, 64, 20


def main() -> None:
    torch.manual_seed(0)  # every rank builds the same weights
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    example = next(batches(BATCH, SEQUENCE, steps=1, seed=0))

    program = autopar.compile(model, example_inputs=example, global_batch_size=BATCH)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    for step, batch in enumerate(batches(BATCH, SEQUENCE, STEPS, seed=1)):
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step:3d}  loss {float(loss):.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
