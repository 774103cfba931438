"""Formulas of what a block keeps: those of the literature, and equal to the priced bytes."""

from __future__ import annotations

import re

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.workflow.activation_formula import ActivationFormula, _text, activation_formula
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare

WIDTH, HEADS, LENGTH = 64, 4, 4096


class Block(nn.Module):
    """A GPT block as Korthikanti et al. count it, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        q, k, v = (
            part(h).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def formulas(
    layers: int, tp: int, batch: int, cp: int = 1
) -> list[tuple[ActivationFormula | None, str, int]]:
    """Formula, boundary and priced bytes of a layer, for every placement of the search."""
    ids = torch.zeros(4, 16, dtype=torch.long)
    program = capture(Gpt(layers), {"ids": ids, "labels": ids}, dtype=torch.bfloat16)
    sizes = {**program.sizes, "sequence": LENGTH}
    program = prepare(program, sizes)
    costs = ModelCosts(program, Cluster.parse("h100:1x8"), sizes).over(cp, tp)
    found = []
    for known in costs.alternatives(tp, batch):
        chain = known.price()
        formula = activation_formula(
            program,
            costs.blocks,
            chain.placements,
            chain.boundary,
            tp,
            {**sizes, "batch": batch},
            cp=cp,
            cp_placements=chain.cp_placements,
        )
        block = next(b for b in chain.blocks if b.name == costs.blocks.chain[1].name)
        found.append((formula, chain.boundary, block.saved_bytes))
    return found


def test_a_whole_gpt_block_keeps_what_the_paper_counts() -> None:
    (formula, _, saved), *_ = formulas(3, 1, 2)
    assert formula is not None
    # Of 34sbh + 5as²b without dropout: no masks (2sbh, as²b), no dropped-out copy (2as²b). The
    # norms' mean and deviation are counted too: 2 norms of 2 float32 each.
    assert formula.text == f"{2 * HEADS}·b·s² + b·s·(32·h + 16)"
    assert formula.values == {"b": 2, "s": LENGTH, "h": WIDTH} and formula.count == 3
    assert formula.bytes == saved == 2 * HEADS * 2 * LENGTH**2 + 2 * LENGTH * (32 * WIDTH + 16)


def test_split_over_ranks_every_placement_has_its_formula() -> None:
    found = formulas(3, 2, 2)
    assert {boundary for _, boundary, _ in found} == {"R", "S(1)"}
    for formula, _, saved in found:
        assert formula is not None and formula.bytes == saved
        assert evaluated(formula) == pytest.approx(saved)
    texts = {formula.text for formula, _, _ in found if formula}
    # Tensor parallelism: sbh(10 + 24/t) with the masks. What is dearer in time keeps less.
    fastest, smallest = found[0][0], min((f for f, _, _ in found if f), key=lambda f: f.bytes)
    assert fastest.text == f"{2 * HEADS}·b·s²/t + b·s·(8·h + 16 + 24·h/t)"
    assert fastest.text in texts and smallest.bytes < fastest.bytes


@pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2)])
def test_split_along_the_sequence_every_placement_has_its_formula(tp: int, cp: int) -> None:
    for formula, _, saved in formulas(3, tp, 2, cp):
        assert formula is not None and formula.bytes == saved
        assert formula.values["c"] == cp and formula.values["s"] == LENGTH
        assert evaluated(formula) == pytest.approx(saved)
        # All but keys and values, which ranks may gather, is of a part of the sequence.
        assert "s/c" in formula.text or "s²/c" in formula.text


def evaluated(formula: ActivationFormula) -> float:
    """What the text gives for its values."""
    text = formula.text.replace("s²", str(formula.values["s"] ** 2)).replace("·", "*")
    for name in "bstch":
        text = re.sub(rf"\b{name}\b", str(formula.values.get(name, 0)), text)
    return float(eval(text))  # noqa: S307 - digits and operators


def test_a_model_without_a_repeated_block_has_none() -> None:
    ((formula, _, _),) = formulas(1, 1, 2)
    assert formula is None


def test_a_block_that_keeps_nothing_has_a_formula() -> None:
    """As a frozen one behind frozen ones."""
    assert _text(sympy.Integer(0), 64) == "0"
