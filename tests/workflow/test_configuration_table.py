"""A table in, the same rows with predictions out."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass

import pytest

from autopar.errors import UsageError
from autopar.workflow import configuration_table
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


def test_a_row_that_raises_costs_no_other_row(monkeypatch):
    """Where it is read, where its model is captured, and where it is priced."""
    from autopar.workflow.evaluator import Evaluator

    alone = predict_rows([row()])
    read, predict = configuration_table.read_row, Evaluator.predict

    def reading(given):
        return 1 // 0 if given["note"] == "unreadable" else read(given)

    def pricing(self, configuration, layers):
        if layers == 6:
            raise KeyError("of a rule\nthat is missing")
        return predict(self, configuration, layers)

    monkeypatch.setattr(configuration_table, "read_row", reading)
    monkeypatch.setattr(Evaluator, "predict", pricing)
    rows = [
        row(note="unreadable"),
        row(n_experts=2, topk=3),
        row(layers=6),
        row(),
        row(dp_mode="FSDP=8xDP=0", zero=3),
    ]
    found = predict_rows(rows)
    assert found[3] == alone[0] and found[3].status == "fits"
    said = [p.status for p in found]
    assert said[0] == "inexpressible: ZeroDivisionError: integer division or modulo by zero"
    assert said[2] == "inexpressible: KeyError: 'of a rule\\nthat is missing'"
    assert said[4] == "inexpressible: FSDP=8 x DP=0 of 8 data-parallel ranks"
    assert said[1].startswith("inexpressible: StandIn can't be captured as one graph: ")
    assert "\n" not in said[1]


def test_who_stops_a_table_stops_it(monkeypatch):
    def reading(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(configuration_table, "read_row", reading)
    with pytest.raises(KeyboardInterrupt):
        predict_rows([row()])


@dataclass(frozen=True)
class Deadly:
    """A row that ends the process that it is sent to."""

    model: str = "deadly"

    def __reduce__(self):
        return os._exit, (1,)


@pytest.mark.slow
def test_a_process_that_is_killed_costs_no_other_row(monkeypatch):
    read = configuration_table.read_row
    monkeypatch.setattr(
        configuration_table, "read_row", lambda r: Deadly() if r["note"] == "deadly" else read(r)
    )
    dead, *others = predict_rows([row(note="deadly"), row(), row(hidden=512)], workers=2)
    assert dead.status.startswith("inexpressible: BrokenProcessPool: ")
    assert [p.status for p in others] == ["fits", "fits"]


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
