"""`autopar evaluate`: one configuration, a table, and what is refused."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from autopar.cli import main

PINS = "tp=2,pp=2,zero=1,microbatch=1,recompute=full,precision=bf16-mixed"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    document = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return f"hf:{path}"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    before, sys.argv = sys.argv, ["autopar", *map(str, arguments)]
    try:
        code = main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return code, out, err


def test_a_configuration_as_json(config, capsys):
    request = ("evaluate", config, "--cluster", "h100:1x8", "--global-batch", "8", "--seq", "64")
    code, out, err = run(capsys, *request, "--pin", PINS, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["status"] == "fits" and found["mesh"]["dp"] == 2
    assert found["microbatch"] == {"size": 1, "count": 4} and found["recompute"] == "full"
    assert sum(found["time_breakdown"].values()) == pytest.approx(found["step_seconds"])
    assert found["time_breakdown"]["recompute"] > 0
    peaks = found["peak_bytes"]
    assert max(m["total"] for m in found["memory_per_stage"]) == peaks["allocated"]
    assert peaks["allocated"] < peaks["reserved"] < peaks["device"] <= found["device_memory_bytes"]
    assert [p["blocks"] for p in found["parts"]] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate",), "needs MODEL, --cluster and --global-batch"),
        (("evaluate", "--table", "x.csv"), "--table goes with --out"),
        (
            (
                "evaluate",
                "zoo:gpt2",
                "--cluster",
                "h100:1x8",
                "--global-batch",
                "8",
                "--pin",
                "tp=1",
            ),
            "not pinned: pp, zero, microbatch, recompute",
        ),
        (("evaluate", "--table", "missing.csv", "--out", "y.csv"), "can't read missing.csv"),
    ],
)
def test_refusals(arguments, message, capsys):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and message in err


def test_a_table_of_what_cannot_be_expressed_is_written_back(tmp_path, capsys):
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("layers,hidden,gpu,n_gpus\n4,,A100,8\n4,64,A100,8\n")
    code, text, _ = run(capsys, "evaluate", "--table", source, "--out", out, "--workers", "1")
    assert code == 0 and "2 rows: 0 fit, 0 do not, 2 can't be expressed" in text
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [r["predicted_status"] for r in rows] == [
        "inexpressible: hidden not stated",
        "inexpressible: ffn not stated",
    ]
