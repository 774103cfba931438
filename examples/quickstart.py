"""Train an unmodified Hugging Face Llama on several ranks; nothing below names a parallelism.

torchrun --nproc-per-node 2 examples/quickstart.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.report.text import headline
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
    parameters = list(program.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    first = torch.distributed.get_rank() == 0
    if first:
        print(headline(program.plan))
    for step, batch in enumerate(batches(BATCH, SEQUENCE, STEPS, seed=1), start=1):
        loss = program.step(batch)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if first and (step == 1 or step % 5 == 0):
            print(f"step {step:2d}  loss {float(loss):.4f}  gradient norm {float(norm):.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
