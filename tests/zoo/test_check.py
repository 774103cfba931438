"""`autopar check`: the verdict alone, in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.commands.check import check_command
from autopar.errors import CaptureError

MODELS = Path(__file__).parent / "input_models.py"

REFUSED = """
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.inner(x).sum()

def model():
    return nn.Sequential(Branching()), {"input": torch.ones(4, 4)}
"""


def test_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command(f"{MODELS}:batch_norm", None, as_json=True) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["captured"] and verdict["blocks"] == 5
    assert verdict["distinct_blocks"] == {"layers.0": 1, "layers.1": 3, "head": 1}
    assert len(verdict["updated_buffers"]) == 12
    assert verdict["batch_stays_whole"] == ""
    assert "'layers.0.1' takes statistics of the whole batch" in verdict["one_micro_batch"]
    assert verdict["inputs"] == ["x", "labels"]
    assert check_command(f"{MODELS}:nested", None, as_json=False) == 0
    text = capsys.readouterr().out
    assert text.startswith("OK") and "scale=2.0" in text and "features_codes_1" in text


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REFUSED)
    code = check_command(f"{file}:model", None, as_json=False)
    assert code == CaptureError.exit_code
    text = capsys.readouterr().out
    assert text.startswith("NOT CAPTURED")
    assert "module '0'" in text and f"{file}:11" in text and "torch.where" in text
    assert check_command(f"{file}:model", None, as_json=True) == code
    assert json.loads(capsys.readouterr().out)["captured"] is False
