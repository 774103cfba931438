"""A table in, the same rows with predictions out."""

from __future__ import annotations

import csv

import pytest

from autopar.errors import UsageError
from autopar.workflow.configuration_table import (
    PREDICTED,
    peak_kind,
    predict_rows,
    predict_table,
    read_table,
)

SMALL = {
    "note": "kept, as it is", "model": "GPT", "layers": "4", "hidden": "256", "heads": "8",
    "ffn": "1024", "vocab": "1000", "seq": "128", "gpu": "A100", "gpu_mem_gb": "80",
    "n_gpus": "8", "tp": "1", "pp": "1", "dp": "8", "zero": "1", "mbs": "1", "gbs": "8",
    "precision": "bf16", "recompute": "none",
}  # fmt: skip


def row(**changes: object) -> dict[str, str]:
    return SMALL | {name: str(value) for name, value in changes.items()}


ROWS = [
    row(),
    row(n_experts=8),
    row(tp=2, dp=4, sp=1),
    row(pp=2, dp=4, gbs=64, mbs=4, vp=2),
    row(gbs=16),
    row(gbs=8, recompute="full"),
    row(layers=8),
    row(seq=65536, gbs=8192, mbs=1024),
    row(pp=8, dp=1),
    row(seq=2048),
    row(seq=2048, recompute="full"),
]


def test_rows_come_back_in_order_with_predictions_appended(tmp_path):
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        names = [*SMALL, "vp", "sp", "n_experts"]
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(ROWS)
    told = []
    predict_table(source, out, workers=1, progress=lambda done, total: told.append((done, total)))
    columns, rows = read_table(out)
    assert columns == [*names, *PREDICTED] and told[-1] == (len(ROWS), len(ROWS))
    for before, after in zip(ROWS, rows, strict=True):
        assert all(after[name] == value for name, value in before.items())
    status = [r["predicted_status"] for r in rows]
    assert status[0] == status[2] == status[3] == "fits"
    assert status[1] == "inexpressible: topk not stated"
    assert status[7] == "oom"
    assert status[8].startswith("inexpressible: pp=8 with 1 chunks, but the model has 4 layers")
    seconds = [float(r["predicted_step_seconds"] or 0) for r in rows]
    peaks = [float(r["predicted_peak_gib"] or 0) for r in rows]
    assert seconds[1] == peaks[1] == 0
    # Twice the samples, a forward more, twice the layers.
    assert 1.5 * seconds[0] < seconds[4] < 2.01 * seconds[0]
    assert seconds[0] < seconds[5] < 1.5 * seconds[0]
    # Where activations are more than the gradients that take their place.
    assert peaks[10] < peaks[9]
    assert 1.3 * seconds[0] < seconds[6] < 2 * seconds[0] and peaks[6] > 1.3 * peaks[0]
    # Predicting a table of predictions changes nothing.
    again = tmp_path / "again.csv"
    predict_table(out, again, workers=1)
    assert again.read_text() == out.read_text()


def test_captured_layers_are_repeated_exactly():
    one, two, three = predict_rows([row(layers=n, zero=0, dp=1, n_gpus=1) for n in (2, 3, 4)])
    assert three.step_seconds - two.step_seconds == pytest.approx(
        two.step_seconds - one.step_seconds
    )


@pytest.mark.slow
def test_processes_give_the_same_answers():
    rows = [row(), row(hidden=512, ffn=2048), row(gbs=16), row(n_experts=2)]
    assert predict_rows(rows, workers=2) == predict_rows(rows, workers=1)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("max of first/last pipeline node, nvidia-smi style, printed as GB", "device"),
        ("torch max_memory_allocated of the logging (last) rank, GiB", "allocated last"),
        ("rank-0 max allocated GiB", "allocated first"),
        ("torchtitan log metric = peak allocator RESERVED bytes (GiB)", "reserved"),
        ("printed GB, peak (likely max reserved/allocated)", "reserved"),
        ("", "reserved"),
    ],
)
def test_what_a_memory_column_holds(text, kind):
    assert peak_kind(text) == kind


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="can't read"):
        read_table(tmp_path / "missing.csv")
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="has no column gpu, hidden, layers, n_gpus"):
        read_table(bad)
