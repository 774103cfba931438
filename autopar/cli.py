"""The command line. Every command is thin: what it does is in `autopar.commands`, loaded when it
is used."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import AutoparError, UsageError

app = typer.Typer(
    name="autopar",
    help="Plan, explain, verify and run parallel training of a PyTorch model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="zoo:NAME, hf:PATH (config.json or its folder), or file.py:function; with +lora:16 at "
        "its end: frozen, with adapters of rank 16",
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="decisions to keep, e.g. tp=8,pp=4,zero=1,microbatch=1,recompute=full"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory-limit", help="per rank, for the five memory terms, e.g. 70GiB"),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="fp32, bf16-mixed, bf16 or fp16 (default: bf16-mixed on GPUs, fp32 on CPUs; for a "
        "model of your own as its parameters are)"
    ),
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        help="adamw, adamw-host (offloaded), adamw-8bit, adafactor, sgd or sgd-momentum: what"
        " states it keeps"
    ),
]
LoadOption = Annotated[
    Path | None,
    typer.Option(help="JSON of rows per expert by layer: prices assume them, not even routing"),
]
SpareOption = Annotated[
    int,
    typer.Option(help="slots of every rank beyond its part of a layer's experts, for copies"),
]


@app.command()
def plan(
    model: ModelArgument,
    global_batch: Annotated[int, typer.Option("--global-batch", help="samples per optimizer step")],
    cluster: Annotated[
        str | None, typer.Option(help="DEVICE:NODESxGPUS, cpu:N, or a TOML file")
    ] = None,
    clusters: Annotated[
        str | None,
        typer.Option(help="compare several, e.g. h100:1x8..16x8,a100-80:8x8 (doubling)"),
    ] = None,
    price: Annotated[
        str, typer.Option(help="with --clusters: per GPU-hour by device, e.g. h100=2.5,a100-80=1.3")
    ] = "",
    steps: Annotated[
        int, typer.Option(help="with --clusters: optimizer steps that hours and cost are of")
    ] = 1000,
    seq: Annotated[
        int | None,
        typer.Option("--seq", help="sequence length (default: the model's, at most 2048)"),
    ] = None,
    memory_limit: MemoryOption = None,
    pin: PinOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    time_limit: Annotated[
        float | None, typer.Option(help="seconds of search; the gap is then stated")
    ] = None,
    execution: Annotated[
        str | None,
        typer.Option(help="eager, or compile: element-wise ops priced as torch.compile fuses them"),
    ] = None,
    expert_load: LoadOption = None,
    spare_experts: SpareOption = 0,
    out: Annotated[Path | None, typer.Option(help="write the plan here")] = None,
    report: Annotated[
        Path | None, typer.Option(help="write a self-contained HTML page here")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest plan that fits, with its proof."""
    from autopar.commands.plan import PlanRequest
    from autopar.commands.what_if import comparison, plan_or_compare

    request = PlanRequest(
        model,
        cluster or "",
        global_batch,
        seq,
        memory_limit,
        ",".join(pin or []),
        precision,
        optimizer,
        time_limit,
        execution,
        expert_load,
        spare_experts,
    )
    several = comparison(clusters, price, steps)
    raise typer.Exit(plan_or_compare(request, several, out, report, as_json=json))


@app.command()
def check(
    model: ModelArgument,
    seq: Annotated[int | None, typer.Option("--seq", help="sequence length")] = None,
    json: JsonOption = False,
) -> None:
    """Say whether a model can be captured, and why not. Exit 0 only if it can."""
    from autopar.commands.check import check_command

    raise typer.Exit(check_command(model, seq, as_json=json))


@app.command()
def show(
    path: PlanArgument,
    load: Annotated[
        Path | None,
        typer.Option(help="JSON of program.history.to_dict(), or a load: routing, for --report"),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="write the plan and its routing as an HTML page")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print a plan: decisions, memory, time, placements, proof."""
    from autopar.plan_document import Plan
    from autopar.report.text import show as render

    found = Plan.load(path)
    if load is not None or report is not None:
        from autopar.commands.show import show_page

        raise typer.Exit(show_page(found, load, report))
    if json:
        typer.echo(json_module.dumps(found.to_dict(), indent=2))
        return
    from rich.console import Console

    Console().print(render(found))


@app.command()
def explain(path: PlanArgument) -> None:
    """Say what limits a plan and why it is not its neighbour."""
    from autopar.plan_document import Plan
    from autopar.report.text import explain as render

    typer.echo(render(Plan.load(path)))


@app.command()
def compare(first: PlanArgument, second: PlanArgument) -> None:
    """What differs between two plans: decisions, time, memory."""
    from autopar.plan_document import Plan
    from autopar.report.diff import diff

    typer.echo(diff(Plan.load(first), Plan.load(second)))


@app.command()
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="as for plan; left out with --table"),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="as for plan")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch")] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="sequence length")] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            help="all decisions: tp, pp, zero, microbatch, recompute (none, full, core, products);"
            " optional: dp, shard, cp, ep, vp, sp, order, schedule, precision, optimizer,"
            " microbatches",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="CSV of configurations: layers, hidden, heads, kv_heads, ffn, vocab, seq, gpu,"
            " gpu_mem_gb, n_gpus, n_nodes, interconnect, tp, sp, pp, vp, cp, ep, etp, dp, shard,"
            " zero, dp_mode, mbs, gbs, precision, recompute, attention, schedule, compile, topk,"
            " n_experts"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the table with predictions appended")] = None,
    workers: Annotated[
        int | None, typer.Option(help="processes for a table (default: CPUs, at most 8)")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict time and memory of configurations in which every decision is given."""
    from autopar.commands.evaluate import EvaluateRequest, evaluate_command, table_command

    if table is not None:
        if out is None or model is not None:
            raise UsageError("--table goes with --out and no MODEL", next_step="give --out FILE")
        raise typer.Exit(table_command(table, out, workers))
    if model is None or cluster is None or global_batch is None:
        raise UsageError(
            "evaluate needs MODEL, --cluster and --global-batch, or --table and --out",
            next_step="give the three, and all decisions as --pin",
        )
    request = EvaluateRequest(model, cluster, seq, global_batch, ",".join(pin or []))
    raise typer.Exit(evaluate_command(request, as_json=json))


@app.command()
def verify(
    model: ModelArgument,
    nproc: Annotated[int, typer.Option(help="local ranks (gloo)")] = 4,
    plan: Annotated[Path | None, typer.Option(help="verify this plan")] = None,
    pin: PinOption = None,
    seq: Annotated[int | None, typer.Option("--seq")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch")] = None,
    memory_limit: MemoryOption = None,
    steps: Annotated[int, typer.Option(help="optimizer steps after the first comparison")] = 0,
    timeout: Annotated[float, typer.Option(help="seconds for the whole run")] = 300.0,
    json: JsonOption = False,
) -> None:
    """Run the program on local ranks and compare loss and every gradient with one device. Exit 0
    only if equal."""
    from autopar.commands.verify import VerifyRequest, verify_command

    request = VerifyRequest(
        model, nproc, plan, ",".join(pin or []), seq, global_batch, memory_limit, steps, timeout
    )
    raise typer.Exit(verify_command(request, as_json=json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="a script that calls autopar.compile")],
    nproc: Annotated[int, typer.Option(help="local ranks")] = 1,
) -> None:
    """Run a script on local ranks (a thin front of torchrun)."""
    from autopar.commands.run import run_command

    raise typer.Exit(run_command(script, nproc, context.args))


@app.command()
def profile(
    out: Annotated[
        Path | None, typer.Option(help="write the cluster TOML here (default: print it)")
    ] = None,
    nproc: Annotated[
        int, typer.Option(help="local ranks to start (not under torchrun, which starts them)")
    ] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(help="compare the groups of this mesh's axes too, e.g. pp=2,dp=2,tp=4"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="about how long to measure")] = 100.0,
    quick: Annotated[bool, typer.Option("--quick", help="small sizes only")] = False,
) -> None:
    """Measure this machine (under torchrun: all ranks and their links) and write a cluster TOML."""
    from autopar.commands.profile import profile_command

    raise typer.Exit(profile_command(out, nproc, mesh, seconds, quick=quick))


@app.command()
def experts(
    load: Annotated[
        Path,
        typer.Argument(metavar="LOAD", help="JSON of expert_load(): {layer: [rows per expert]}"),
    ],
    ranks: Annotated[int, typer.Option(help="over how many ranks each layer's experts are split")],
    nodes: Annotated[int, typer.Option(help="with --together: nodes that hold these ranks")] = 1,
    together: Annotated[
        Path | None,
        typer.Option(
            help="JSON of how often two experts are chosen by one token: {layer: matrix}; such are"
            " kept on one node where it costs no rows"
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="copies of hot experts beyond one each, per layer")
    ] = 0,
    most: Annotated[
        int | None,
        typer.Option(help="experts that fit on a rank; ranks then need not hold equally many"),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="seconds for all layers")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="write the assignment here, as JSON")] = None,
    json: JsonOption = False,
) -> None:
    """Assign experts to ranks by their load, so that the busiest rank has the least to do."""
    from autopar.commands.experts import ExpertsRequest, experts_command

    request = ExpertsRequest(load, ranks, nodes, together, replicas, most, time_limit)
    raise typer.Exit(experts_command(request, out, as_json=json))


@app.command()
def passes(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="print graphs of this model")
    ] = None,
    dump_after: Annotated[
        list[str] | None, typer.Option(help="print the graph after this pass")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="rewrite for this plan")] = None,
    cluster: Annotated[str, typer.Option()] = "cpu:1",
    global_batch: Annotated[int | None, typer.Option("--global-batch")] = None,
    pin: PinOption = None,
    seq: Annotated[int | None, typer.Option("--seq")] = None,
) -> None:
    """List the passes in order; with a MODEL, print the graph after some of them."""
    from autopar.commands.passes import passes_command

    raise typer.Exit(
        passes_command(
            model, dump_after or [], plan, cluster, global_batch, ",".join(pin or []), seq
        )
    )


# As shells report it: 128 and the number of the signal.
INTERRUPTED = 130


def main() -> int:
    """Entry point; an error that a user can mend is one message on stderr and its own exit code."""
    try:
        result = app(standalone_mode=False)
        if result == INTERRUPTED:  # which is what is left of a KeyboardInterrupt
            typer.echo("interrupted: nothing was found yet", err=True)
    except AutoparError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:
        code = getattr(error, "exit_code", None)
        show_usage = getattr(error, "show", None)
        if code is None or show_usage is None:
            raise
        show_usage(file=sys.stderr)
        return int(code)
    return int(result or 0)
