"""`autopar check`: can this model be captured, and what becomes of it? Nothing is planned."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import torch

from autopar.errors import AutoparError, CaptureError
from autopar.models import resolve_model
from autopar.program import Program

SHOWN = 12


def check_command(model: str, sequence: int | None, *, as_json: bool) -> int:
    """Print the verdict; 0 when the model is captured, else the exit code of what was wrong."""
    start = time.perf_counter()
    source = resolve_model(model, sequence=sequence, dtype=torch.float32)
    try:
        verdict = captured(model, source)
        code = 0
    except (CaptureError, AutoparError) as error:
        verdict = {
            "model": model,
            "captured": False,
            "problem": error.message,
            "next_step": error.next_step,
        }
        code = error.exit_code
    verdict["seconds"] = round(time.perf_counter() - start, 2)
    print(json.dumps(verdict, indent=2) if as_json else _text(verdict))
    return code


def captured(name: str, source: Any) -> dict[str, Any]:
    """What is worth knowing of a captured model. Raises `CaptureError` as `capture` does."""
    from autopar.passes.analysis.blocks import analyse_blocks
    from autopar.passes.capture import capture
    from autopar.workflow.prepare import prepare

    program = capture(source.model, source.example_inputs, name=name, loss_fn=source.loss_fn)
    program = prepare(program, program.sizes)
    blocks = analyse_blocks(program)
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    return {
        "model": name,
        "captured": True,
        "ops": len(calls),
        "blocks": len(blocks.chain),
        "distinct_blocks": {kind: len(names) for kind, names in blocks.kinds.items()},
        "symbols": sorted(program.symbols),
        "sizes": dict(program.sizes),
        "inputs": [i.target for i in program.of_kind("input")],
        "fixed_inputs": {k: repr(v) for k, v in program.fixed.items()},
        "updated_buffers": list(program.updates),
        "batch_stays_whole": program.batch_stays_whole,
        "one_micro_batch": program.one_micro_batch,
        "replicated_ops": replicated_ops(program),
        "notes": list(program.notes),
    }


def replicated_ops(program: Program) -> dict[str, int]:
    """Ops with parameters above them that no rule covers: each rank of a tp group runs them whole.

    How often each occurs, most often first.
    """
    from autopar.op_call import Bindings, op_call
    from autopar.passes.analysis.blocks import needs_parameters
    from autopar.rules import rule_for

    bindings = Bindings(program.symbols, program.sizes)
    found: Counter[str] = Counter()
    for node, needs in needs_parameters(program).items():
        if not needs or node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if rule_for(op_call(node, bindings)) is None:
            found[str(node.target._opname)] += 1
    return dict(found.most_common())


def _text(verdict: dict[str, Any]) -> str:
    if not verdict["captured"]:
        lines = [f"NOT CAPTURED  {verdict['model']}", verdict["problem"]]
        return "\n".join([*lines, f"  next step: {verdict['next_step']}"])
    symbols = ", ".join(verdict["symbols"]) or "nothing: the sizes are those of the example"
    lines = [
        f"OK  {verdict['model']}, in {verdict['seconds']} s",
        f"ops        {verdict['ops']}",
        f"blocks     {verdict['blocks']}, {len(verdict['distinct_blocks'])} distinct: "
        + _counts(verdict["distinct_blocks"]),
        f"symbolic   {symbols}",
        f"inputs     {', '.join(verdict['inputs'])}",
    ]
    if verdict["fixed_inputs"]:
        fixed = ", ".join(f"{k}={v}" for k, v in verdict["fixed_inputs"].items())
        lines.append(f"fixed      {fixed}")
    if verdict["updated_buffers"]:
        lines.append(f"updated    {len(verdict['updated_buffers'])} buffers change in a step")
    if verdict["batch_stays_whole"]:
        lines.append(f"batch      can't be split: {verdict['batch_stays_whole']}")
    if verdict["one_micro_batch"]:
        lines.append(f"batch      one micro-batch, over dp ranks: {verdict['one_micro_batch']}")
    if verdict["replicated_ops"]:
        lines.append(
            f"replicated {_counts(verdict['replicated_ops'])} (no sharding rule: every rank of a "
            "tp group runs them whole)"
        )
    return "\n".join([*lines, *(f"note       {n}" for n in verdict["notes"])])


def _counts(counts: dict[str, int]) -> str:
    shown = [f"{n} x{c}" if c > 1 else n for n, c in list(counts.items())[:SHOWN]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
