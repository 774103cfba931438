"""The memory model over the layouts of the equality tests: 4 architectures, 15 ways to split them.

The architectures are those of tests/end_to_end, in sizes at which tensors, not scalars, make up the
memory. Each stage's program runs two steps in a dry run. Writes a section of
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from autopar.api import search_program  # noqa: E402
from autopar.cluster import Cluster  # noqa: E402
from autopar.passes.capture import capture  # noqa: E402
from autopar.program import Program  # noqa: E402
from autopar.workflow.dry_memory import dry_memory  # noqa: E402
from autopar.workflow.prepare import prepare  # noqa: E402
from memory_table import HEADER, error, row, summary, terms_within  # noqa: E402
from results import write_section  # noqa: E402
from tests.end_to_end.test_equality import ARCHITECTURES, FOUR_RANKS, TWO_RANKS  # noqa: E402

BATCH, SEQUENCE, VOCABULARY = 8, 256, 4096
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "use_cache": False,
    "pad_token_id": None,
}
OWN = {
    "llama": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 32},
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gpt2": {
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None,
        "eos_token_id": None,
    },
}  # fmt: skip


def build(architecture: str) -> tuple[nn.Module, Program]:
    """The model on meta, and the program captured from it in float32."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[architecture](**{**SIZES, **OWN[architecture]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    example = {
        name: torch.empty(4, SEQUENCE, dtype=torch.int64, device="meta")
        for name in ("input_ids", "labels")
    }
    program = capture(model, example, name=architecture, dtype=torch.float32)
    return model, prepare(program, program.sizes)


def measure(architecture: str) -> tuple[list[str], list[float], list[int]]:
    """A line for every layout and stage, the errors, and the terms that are within 10 %."""
    model, program = build(architecture)
    lines, errors, terms = [], [], []
    for ranks, layouts in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        for name, pins in layouts.items():
            # One schedule in all versions of the search, so that rows can be compared.
            free = "schedule=" not in pins and "chunks=" not in pins
            pins = f"{pins},schedule=1f1b" if free else pins
            outcome = search_program(
                program, Cluster.parse(f"cpu:{ranks}"), global_batch_size=BATCH, pins=pins,
                memory_limit="1TiB", explain=False,
            )  # fmt: skip
            assert outcome.plan is not None
            for stage in range(outcome.plan.mesh.pp):
                peak = dry_memory(model, program, outcome.plan, stage)
                lines.append(row(outcome.plan, stage, peak, f"{architecture} {name}"))
                errors.append(error(outcome.plan, stage, peak))
                terms.append(terms_within(outcome.plan, stage, peak))
                print(lines[-1], flush=True)
    return lines, errors, terms


def main() -> int:
    lines: list[str] = []
    errors: list[float] = []
    terms: list[int] = []
    chosen = tuple(sys.argv[1:]) or ARCHITECTURES
    for architecture in chosen:
        found = measure(architecture)
        lines, errors, terms = lines + found[0], errors + found[1], terms + found[2]
    write_section(
        "Memory of the layouts of the equality tests",
        [
            "Made by `benchmarks/memory_of_layouts.py`, in a dry run: 4 layers of width 256, 4096",
            f"tokens in the vocabulary, batch {BATCH} x {SEQUENCE}, float32, AdamW (foreach). MiB",
            f"predicted / measured. Here: {', '.join(chosen)}.",
            summary(errors, terms),
            "",
            *HEADER,
            *lines,
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
