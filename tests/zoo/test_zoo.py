"""A representative dozen of the zoo, each on one process and under TP, PP and ZeRO on two ranks.

In processes of their own: ranks are forked, which a test process with threads should not be. The
command runs one group, planners that start warm the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.zoo.__main__ import quiet
from benchmarks.zoo.all_architectures import ARCHITECTURES
from benchmarks.zoo.table import table
from benchmarks.zoo.verify import PLANS, Row, verify_architecture
from tests.warm_ranks import run_planner

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "plain": ("mlp", "cnn", "two-towers", "lstm"),
    "vision": ("vit", "convnext", "resnet"),
    "language": ("gpt2", "falcon", "bert"),
    "pairs": ("t5", "mistral"),
}


def _run(names: tuple[str, ...], folder: Path) -> dict[str, dict[str, Any]]:
    rows = folder / "rows.json"
    command = [sys.executable, "-m", "benchmarks.zoo", *names, "--rows", str(rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert rows.exists(), done.stderr
    found = {row["name"]: row for row in json.loads(rows.read_text())}
    assert done.returncode == 0, done.stdout
    return found


def _rows(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    quiet()
    return {name: asdict(verify_architecture(ARCHITECTURES[name])) for name in names}


@pytest.mark.parametrize("group", GROUPS)
def test_equal_to_one_device(group: str, tmp_path: Path) -> None:
    names = GROUPS[group]
    rows = _run(names, tmp_path) if group == "plain" else run_planner(_rows, names)
    assert set(rows) == set(GROUPS[group])
    for name, row in rows.items():
        assert row["capture"] == "equal", row
        for column in PLANS:
            assert row["cells"][column].startswith("equal"), (name, column, row["cells"][column])
        assert "weights split" in row["cells"]["TP"] or name == "lstm", row["cells"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in sum(GROUPS.values(), ())])
def test_the_rest(name: str, tmp_path: Path) -> None:
    if name in ("unet", "dit"):
        pytest.importorskip("diffusers")
    if "LoRA" in name:
        pytest.importorskip("peft")
    assert _run((name,), tmp_path)[name]["capture"] == "equal"


def test_the_zoo_is_as_wide_as_it_says() -> None:
    families = [a.family for a in ARCHITECTURES.values()]
    assert families.count("causal language model") >= 40
    assert len(ARCHITECTURES) >= 60


def test_a_fault_is_counted_and_shown() -> None:
    good = Row("a", "vision", "equal", {"TP": "equal", "PP": "equal", "ZeRO": "none: why"})
    bad = Row("b", "vision", "equal", {"TP": "FAILED: loss | 0.1"})
    assert bad.failed and not good.failed
    text = table([good, bad])
    assert "1 of 2 architectures run." in text
    assert "| a | equal | equal | equal | none: why |" in text and "loss \\| 0.1" in text
