"""The command line as a user meets it: outputs, exit codes, and errors before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autopar.cli import main
from autopar.passes.capture import capture
from autopar.program import Program, copy_graph
from tests.warm_ranks import run_on_ranks

MODELS = Path(__file__).parent / "end_to_end" / "models.py"
LLAMA = f"{MODELS}:llama"
PLAN = ["plan", LLAMA, "--cluster", "cpu:4", "--global-batch", "8"]
BREAKDOWN = {"compute", "recompute", "tp_comm", "dp_comm", "pp_comm", "bubble", "optimizer"}
TERMS = {"parameters", "gradients", "optimizer", "activations", "buffers", "total"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    return main()


@pytest.fixture(scope="module")
def captures() -> dict[str, Program]:
    return {}


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch, captures: dict[str, Program]) -> None:
    """Commands of this module share captures of equal models: what they test comes after."""

    def remembered(model: nn.Module, inputs: Any, **options: Any) -> Program:
        key = f"{model} {inputs} {options}"
        if key not in captures:
            captures[key] = capture(model, inputs, **options)
        # `passes` rewrites the graph that it gets.
        found = captures[key]
        return found.with_graph(copy_graph(found.graph_module))

    for module in ("autopar.api", "autopar.passes.capture"):
        monkeypatch.setattr(f"{module}.capture", remembered)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        pins = "tp=2,pp=2,dp=1,weights=split,microbatches=4,schedule=1f1b"
        assert run(patch, *PLAN, "--pin", pins, "--out", str(path)) == 0
    return path


def test_json_has_what_a_script_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *PLAN, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "optimal"
    assert set(found["time_breakdown"]) == BREAKDOWN
    assert sum(found["time_breakdown"].values()) == pytest.approx(found["step_seconds"])
    assert len(found["memory_per_stage"]) == found["mesh"]["pp"]
    for stage in found["memory_per_stage"]:
        assert set(stage) == TERMS
        assert stage["total"] == sum(stage[t] for t in TERMS - {"total"})
        assert stage["total"] <= found["memory_limit_bytes"]
    mesh = found["mesh"]
    assert mesh["pp"] * mesh["dp"] * mesh["tp"] == 4
    batch = found["microbatch"]
    assert batch["size"] * batch["count"] * mesh["dp"] == 8
    assert {"capture", "analyse", "search"} <= set(found["search"]["seconds"])
    assert {"shapes", "pruned", "bound_step_seconds", "gap"} <= set(found["search"])
    assert found["search"]["gap"] == 0 and 0 < found["mfu"] < 1
    assert {"schedule", "zero", "recompute", "tokens_per_second_per_gpu"} <= set(found)


def test_every_decision_pinned_is_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], captured_once: None
) -> None:
    pins = "tp=2,pp=2,dp=1,zero=1,microbatch=2,schedule=gpipe,recompute=full,precision=fp32"
    assert run(monkeypatch, *PLAN, "--pin", pins, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"pp": 2, "dp": 1, "tp": 2, "cp": 1, "ep": 1}
    assert found["microbatch"] == {"size": 2, "count": 4}
    assert (found["schedule"], found["zero"], found["recompute"]) == ("gpipe", 1, "full")


def test_infeasible_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], captured_once: None
) -> None:
    plan = [*PLAN[:3], "cpu:2", *PLAN[4:]]
    assert run(monkeypatch, *plan, "--memory-limit", "100KiB", "--json") == 5
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "infeasible"
    smallest = found["infeasible"]["smallest_bytes"]
    assert smallest > 100 * 1024
    assert run(monkeypatch, *plan, "--memory-limit", str(smallest), "--json") == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["plan", "zoo:nope", "--cluster", "cpu:2", "--global-batch", "8"], 2, "no model 'nope'"),
        (["plan", LLAMA, "--cluster", "h1000:1x8", "--global-batch", "8"], 2, "h1000"),
        ([*PLAN, "--pin", "tp=3"], 2, "tp=3 is not legal"),
        ([*PLAN, "--pin", "tpp=2"], 2, "did you mean tp?"),
        ([*PLAN, "--pin", "tp=2,pp=4"], 2, "ranks"),
        ([*PLAN, "--pin", "zero=4"], 2, "zero=4"),
        ([*PLAN, "--memory-limit", "lots"], 2, "lots"),
        ([*PLAN, "--precision", "fp8"], 2, "fp8"),
        ([*PLAN, "--price", "h100=2"], 2, "--price without --clusters"),
        ([*PLAN, "--seq", "0"], 2, "a sequence of 0"),
        (["show", "no-such-plan.json"], 4, "no plan file"),
        (["verify", LLAMA, "--nproc", "2", "--pin", "tp=4"], 2, "tp=4 is not legal"),
        (["verify", "zoo:llama3-8b", "--nproc", "4"], 2, "this machine"),
        (["verify", f"{MODELS}:nope"], 2, "no function 'nope'"),
        (["run", "no-such-script.py", "--nproc", "2"], 2, "no script"),
        (["passes", "--dump-after", "place"], 2, "needs a MODEL"),
        (["passes", LLAMA, "--dump-after", "nope"], 2, "no pass 'nope'"),
    ],
)
def test_bad_input_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    captured_once: None,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    assert run(monkeypatch, *arguments) == code
    message = capsys.readouterr().err
    assert says in message and "next step:" in message and "Traceback" not in message


def test_show_explain_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_file: Path
) -> None:
    assert run(monkeypatch, "show", str(plan_file)) == 0
    assert "pp2 dp1 tp2" in capsys.readouterr().out
    assert run(monkeypatch, "show", str(plan_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == {"pp": 2, "dp": 1, "tp": 2}
    assert run(monkeypatch, "explain", str(plan_file)) == 0
    assert "%" in capsys.readouterr().out
    assert run(monkeypatch, "compare", str(plan_file), str(plan_file)) == 0


def test_passes_lists_and_dumps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_file: Path
) -> None:
    assert run(monkeypatch, "passes") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed.index("insert-collectives") < listed.index("localize-shapes")
    dump = ["passes", LLAMA, "--plan", str(plan_file), "--dump-after", "cut-stages"]
    assert run(monkeypatch, *dump) == 0
    text = capsys.readouterr().out
    assert "autopar.send(" in text and "autopar.recv(" in text and "torch.ops.autopar." in text


def _edited(plan_file: Path, tmp_path: Path, change: object) -> Path:
    document = json.loads(plan_file.read_text())
    assert callable(change)
    change(document)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document))
    return path


def _first_kind(document: dict) -> dict:  # type: ignore[type-arg]
    return document["placements"]["model.layers.0"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["stages"][0]["blocks"].append("model.layers.9"), "model.layers.9"),
        (lambda d: d["stages"][0]["blocks"].pop(), "model.layers"),
        (lambda d: d["stages"][1]["recompute"].append("embed"), "embed"),
        (lambda d: d["mesh"].update(tp=3), "6 ranks"),
        (lambda d: d["mesh"].update(dp=2), "global batch"),
        (lambda d: d.update(microbatches=3), "global batch"),
        (lambda d: _first_kind(d).update({"linear.99": "shard n"}), "linear.99"),
        (lambda d: _first_kind(d).update({"linear": "shard q"}), "shard q"),
        (lambda d: _first_kind(d).update({"parameter nope.weight": "R"}), "nope.weight"),
        (lambda d: d.update(boundary="S(9)"), "S(9)"),
        (lambda d: d.update(boundary="X"), "boundary is 'X'"),
        (lambda d: d.update(zero=7), "zero"),
        (lambda d: d.update(fingerprint="0" * 16), "another model"),
        (lambda d: d.update(version=99), "version"),
        (lambda d: d.pop("stages"), "stages"),
    ],
)
def test_a_wrong_hand_edit_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan_file: Path,
    tmp_path: Path,
    captured_once: None,
    change: object,
    says: str,
) -> None:
    path = _edited(plan_file, tmp_path, change)
    assert run(monkeypatch, "passes", LLAMA, "--plan", str(path)) in (4, 6)
    message = capsys.readouterr().err
    assert says in message and "next step:" in message and "Traceback" not in message


def test_a_legal_hand_edit_runs_and_is_equal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan_file: Path,
    tmp_path: Path,
) -> None:
    """Move a block to the other stage, recompute one, compute one product on every rank."""

    def change(document: dict) -> None:  # type: ignore[type-arg]
        first, second = document["stages"]
        second["blocks"].insert(0, first["blocks"].pop())
        second["recompute"] = [second["blocks"][0]]
        _first_kind(document)["linear.4"] = "replicate"
        _first_kind(document)["parameter mlp.gate_proj.weight"] = "R"

    path = _edited(plan_file, tmp_path, change)
    monkeypatch.setattr("autopar.runtime.launch.spawn", run_on_ranks)
    assert run(monkeypatch, "verify", LLAMA, "--nproc", "4", "--plan", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["worst_error"] <= 1e-5
