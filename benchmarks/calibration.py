"""Prices of ops and collectives against published measurements: writes docs/calibration.md.

    python benchmarks/calibration.py FOLDER

FOLDER holds CSV files of published rows, named in `QUICK`, and layer_profiles. Every row that can
be expressed becomes a case, used to fit a constant of the device files or held out.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import Cluster, Device
from autopar.cost.attention_efficiency import BACKWARD_PRODUCTS, attention_seconds
from autopar.cost.collective import collective_time
from autopar.cost.compute import op_time
from autopar.cost.matmul_efficiency import matmul_seconds

PAGE = Path(__file__).resolve().parent.parent / "docs" / "calibration.md"
# Which rows each constant was fitted on, and how far off the prices were before.
FITS = Path(__file__).resolve().with_name("calibration_fits.md")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """One published row: `fitted` when a constant was fitted on it."""

    file: str
    group: str
    label: str
    fitted: bool
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error, positive when the prediction is too long."""
        return self.predicted / self.measured - 1


class Skipped(Exception):
    """A row that can't be expressed, and why."""


Row = dict[str, str]


def rows(folder: Path, file: str) -> Iterator[Row]:
    """Rows of a CSV file of the folder; none when it is missing."""
    path = folder / f"{file}.csv"
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as text:
            yield from csv.DictReader(text)


def number(text: str) -> float | None:
    return float(text) if text else None


MATMUL_DEVICES = {
    "NVIDIA A100 SXM": "a100-80",
    "NVIDIA H100 SXM": "h100",
    "NVIDIA H200 SXM": "h200",
    "NVIDIA GH200 SXM": "h200",
    "NVIDIA B200 SXM": "b200",
    "NVIDIA B300 SXM": "b300",
    "NVIDIA GB200 SXM": "gb200",
    "H800": "h100",
}


def matmul_case(row: Row) -> Case:
    """DeepGEMM by shape; the best shapes of a search are upper bounds of what is sustained."""
    name = MATMUL_DEVICES.get(row["gpu"])
    if name is None:
        raise Skipped(f"no device file for {row['gpu']}")
    device = Cluster.parse(f"{name}:1x8").device
    m, n, k = (int(row[key]) for key in "mnk")
    groups = int(row["groups"] or 1)
    dtype = "float8" if row["precision"].startswith("fp8") else "bfloat16"
    size = 1 if dtype == "float8" else 2
    flops = 2.0 * groups * m * n * k
    arithmetic = matmul_seconds(groups, m, n, k, dtype, device)
    predicted = op_time(arithmetic, groups * (size * (m * k + n * k) + 2.0 * m * n), device).seconds
    best = "MAMF" in row["source"]
    group = "best shapes found (upper bound)" if best else "DeepGEMM grouped"
    if not best and not row["groups"]:
        group = "DeepGEMM dense"
    label = f"{row['gpu']} {row['precision'][:4]} {groups}x{m}x{n}x{k}"
    measured = flops / (float(row["achieved_tflops"]) * 1e12)
    return Case("gemm_achieved", group, label, "grouped" not in group, measured, predicted)


KERNELS = {
    ("A100", "FlashAttention-2"): ("a100-80", "flash2"),
    ("H100", "FlashAttention-2"): ("h100", "flash2"),
    ("H100", "FlashAttention-3"): ("h100", "flash3"),
    ("H100", "cuDNN"): ("h100", "cudnn"),
}


def attention_case(row: Row) -> Case:
    """16384 tokens of width 2048; the operations skipped by a causal kernel are not counted."""
    if not row["tflops"]:
        raise Skipped("iterations per second of a context-parallel ring")
    if (row["gpu"], row["impl"]) not in KERNELS:
        raise Skipped(f"no kernel for {row['impl'].split(':')[0]} on {row['gpu']}")
    name, kernel = KERNELS[row["gpu"], row["impl"]]
    device = replace(Cluster.parse(f"{name}:1x8").device, attention_kernel=kernel)
    keys, head_dim = int(row["seq"]), int(row["head_dim"])
    causal, tokens, width = row["causal"] == "1", 16384, 2048
    flops = 4.0 * tokens * keys * width * (0.5 if causal else 1.0)
    parts = {"fwd": [(1.0, False)], "fwd+bwd": [(1.0, False), (BACKWARD_PRODUCTS, True)]}
    predicted = work = 0.0
    for share, backward in parts[row["direction"]]:
        work += share * flops
        predicted += attention_time(
            share * flops, device, tokens, keys, head_dim, width, causal, backward
        )
    label = f"{row['gpu']} {row['impl']} {row['direction']} d{head_dim} keys {keys} causal {causal}"
    fitted = keys in (512, 2048, 16384)
    measured = work / (float(row["tflops"]) * 1e12)
    return Case("attention_kernels", row["impl"], label, fitted, measured, predicted)


def attention_time(
    flops: float,
    device: Device,
    tokens: int,
    keys: int,
    head_dim: int,
    width: int,
    causal: bool,
    backward: bool,
) -> float:
    arithmetic = attention_seconds(
        flops,
        heads=tokens // keys * (width // head_dim),
        queries=keys,
        keys=keys,
        head_dim=head_dim,
        causal=causal,
        backward=backward,
        dtype="bfloat16",
        device=device,
    )
    return op_time(arithmetic, 2.0 * 4 * tokens * width, device).seconds


LINK_DEVICES = {
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "A100": "a100-80",
    "V100": "v100-32",
}
SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def link_cluster(gpu: str, nodes: int, per_node: int, network: str) -> Cluster:
    """The cluster a row was measured on, by what it prints about itself."""
    fabric = ""
    if nodes > 1:
        if "4x100" in network:
            fabric = "/efa-4x100"
        elif "32x100" in network:
            fabric = "/efa-32x100"
        elif "EFA v4" in network or "efa v4" in network:
            fabric = "/efa-8x400"
        elif "inter-node fabric" in network or "not stated" in network:
            raise Skipped("fabric not stated")
    for start, name in LINK_DEVICES.items():
        if gpu.startswith(start) or (start == "A100" and "A800" in gpu):
            return Cluster.parse(f"{name}:{nodes}x{per_node}{fabric}")
    raise Skipped(f"no device file for {gpu}")


def collective_case(row: Row) -> Case:
    """An nccl-tests style run of one group that fills the cluster."""
    kind = row["collective"]
    if kind not in SHARES:
        raise Skipped(f"not a collective of a group: {kind}")
    size = number(row["size_bytes"])
    if size is None or not row["n_gpus"] or not row["n_nodes"].isdigit():
        raise Skipped("size, ranks or nodes not printed")
    ranks, nodes = int(row["n_gpus"]), int(row["n_nodes"])
    cluster = link_cluster(row["gpu"], nodes, ranks // nodes, row["interconnect"])
    if row["algo"].startswith("Ring") and "off" in row["algo"] or row["algo"] == "Ring":
        inner, *outer = cluster.links
        cluster = replace(cluster, links=(replace(inner, switch_bytes_per_second=0.0), *outer))
    time = number(row["time_us"])
    seconds = time * 1e-6 if time else 0.0
    if not seconds:
        share = SHARES[kind] * (ranks - 1) / ranks
        seconds = share * size / (float(row["busbw_gb_s"]) * 1e9)
    whole = size * ranks if kind == "all_to_all" else size
    predicted = collective_time(kind, whole, ranks, 1, cluster)
    where = f"{nodes} node{'s' if nodes > 1 else ''}"
    group = f"{row['gpu'].split(' (')[0][:10]} {where}, {kind}"
    group += ", below 1 MiB" if size < MIB else ""
    group += ", fewer than 8 ranks" if row["gpu"] == "V100" and ranks < 8 else ""
    label = f"{row['source'][:24]}: {row['gpu'][:10]} {ranks} ranks {size / MIB:g} MiB {kind}"
    fitted = collective_fitted(row, ranks, size)
    return Case("nccl_collectives", group, label, fitted, seconds, predicted)


def collective_fitted(row: Row, ranks: int, size: float) -> bool:
    """Sweeps over powers of two gave every other size to the fit."""
    odd_power = int(size).bit_length() % 2 == 0
    source, gpu = row["source"], row["gpu"]
    if row["collective"] == "all_reduce" and source.startswith("vTrain"):
        return (
            gpu == "A100" and ranks in (2, 4, 8) or gpu == "V100" and ranks == 8 and not odd_power
        )
    if source.startswith("AWS") and "EKS" not in source:
        return odd_power
    if "P6-B200" in source:
        return odd_power if ranks == 8 else not odd_power and size >= MIB / 4
    if source.startswith("ml-engineering network") and gpu == "A100":
        return not odd_power
    return source.startswith("CoreWeave") or "2411.13055" in source and size < 1e9


def dispatch_case(row: Row) -> Case:
    """DeepEP on H800 (NVLink of 200 GB/s one direction, a 400 Gbit/s adapter for each GPU)."""
    if "v2" in row["kernel"]:
        raise Skipped("bandwidth defined otherwise (DeepEP v2)")
    ranks = int(row["ep"])
    nodes = max(1, ranks // 8)
    inside, *_ = Cluster.parse("h100:1x8").links
    inside = replace(inside, bytes_per_second=inside.bytes_per_second * 200 / 450)
    outer = Cluster.parse("h100:2x8").links[1]
    if row["link"] == "NVLink":
        links: tuple[object, ...] = (inside,)
    else:
        links = (replace(outer, ranks=max(16, ranks)),)
    cluster = replace(Cluster.parse(f"h100:{nodes}x8"), links=links)  # type: ignore[arg-type]
    if row["latency_us"]:
        size = {"dispatch": 1.03, "combine": 2.0}[row["phase"]]  # FP8 with scales; bfloat16
        local, measured = 128 * 8 * 7168 * size, float(row["latency_us"]) * 1e-6
    else:
        local = 4096.0 * 7168
        measured = local / (float(row["bandwidth_gb_s"]) * 1e9)
    if cluster.size < ranks:
        raise Skipped("ranks do not fill nodes")
    predicted = collective_time("dispatch", local * ranks, ranks, 1, cluster)
    label = f"EP{ranks} {row['kernel']} {row['phase']}"
    # Two groups of rows gave the two efficiencies.
    fitted = row["kernel"].startswith("normal")
    return Case("moe_dispatch_deepep", row["kernel"], label, fitted, measured, predicted)


class Layers:
    """Forward seconds of one layer, and of embedding and head, of Llama-2-7B on one A100."""

    def __init__(self) -> None:
        import torch

        from autopar.api import model_costs, planned_sizes
        from autopar.models import resolve_model
        from autopar.passes.capture import capture
        from autopar.search.options import parse_pins
        from autopar.workflow.prepare import prepare

        cluster = Cluster.parse("a100-80:1x8").with_execution("compile")
        source = resolve_model("zoo:llama2-7b", sequence=2048, dtype=torch.bfloat16)
        program = capture(source.model, source.example_inputs, dtype=torch.bfloat16)
        sizes = planned_sizes(program, 2048)
        self.costs = model_costs(prepare(program, sizes), cluster, sizes, parse_pins(""))

    def case(self, row: Row) -> Case:
        if not row["item"].startswith("forward per sample") or row["hidden"] != "4096":
            raise Skipped("not one layer of a stated shape")
        microbatch = int(row["mbs"])
        blocks = self.costs.whole(microbatch).blocks
        layer = "layer" in row["item"]
        found = [b.forward for b in blocks if ("layers" in b.name) == layer]
        predicted = (found[0] if layer else sum(found)) / microbatch
        group = "Llama-2-7B layer" if layer else "Llama-2-7B embedding and head"
        label = f"{group}, micro-batch {microbatch}"
        fitted = layer and microbatch % 2 == 1
        return Case("layer_profiles", group, label, fitted, float(row["time_ms"]) / 1e3, predicted)


QUICK = {
    "gemm_achieved": matmul_case,
    "attention_kernels": attention_case,
    "nccl_collectives": collective_case,
    "moe_dispatch_deepep": dispatch_case,
}


def quick_cases(folder: Path) -> tuple[list[Case], Counter[str]]:
    """Cases of all files but the layers (those need a captured model), and rows left out by why."""
    return cases_of(folder, QUICK)


def cases_of(
    folder: Path, makers: dict[str, Callable[[Row], Case]]
) -> tuple[list[Case], Counter[str]]:
    """A case for every row of the files of `makers`, and rows left out by why."""
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    for file, make in makers.items():
        for row in rows(folder, file):
            try:
                cases.append(make(row))
            except Skipped as why:
                skipped[f"{file}: {why}"] += 1
    return cases, skipped


def percentile(values: list[float], part: float) -> float:
    """The smallest value that `part` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(part * 1000) * len(ordered) // 1000) - 1))]


def summary(cases: list[Case]) -> tuple[int, float, float, float, float]:
    """Count; median, 90th percentile and maximum of |relative error|; median signed error."""
    errors = [abs(case.error) for case in cases]
    bias = statistics.median(case.error for case in cases)
    return len(cases), statistics.median(errors), percentile(errors, 0.9), max(errors), bias


def table(cases: list[Case]) -> list[str]:
    """Rows of a Markdown table: one for each file, group and fitted or held out."""
    lines = [
        "| file | group | rows | used | median | 90 % | max | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted({(c.file, c.group, not c.fitted) for c in cases})
    for file, group, held in keys:
        chosen = [c for c in cases if (c.file, c.group, not c.fitted) == (file, group, held)]
        lines.append(_line(file, group, "held out" if held else "fit", chosen))
    for file in sorted({c.file for c in cases}):
        for held in (False, True):
            chosen = [c for c in cases if c.file == file and c.fitted != held]
            if chosen:
                lines.append(_line(file, "**all**", "held out" if held else "fit", chosen))
    return lines


def _line(file: str, group: str, used: str, cases: list[Case]) -> str:
    count, median, high, most, bias = summary(cases)
    numbers = f"{median:.1%} | {high:.1%} | {most:.1%} | {bias:+.1%}"
    return f"| {file} | {group} | {count} | {used} | {numbers} |"


def page(cases: list[Case], skipped: Counter[str]) -> str:
    """The whole of docs/calibration.md."""
    worst = sorted((c for c in cases), key=lambda c: -abs(c.error))[:15]
    lines = [
        "# Calibration of op and collective prices",
        "",
        "Written by `benchmarks/calibration.py` from published measurements. Constants and their",
        "sources are in `autopar/data/devices` and `autopar/data/fabrics`. |relative error| of",
        "seconds; bias is the median signed error, positive when a prediction is too long.",
        "",
        FITS.read_text(encoding="utf-8"),
        "",
        "## Errors",
        "",
        *table(cases),
        "",
        "## Worst rows",
        "",
        *(
            f"- {c.file}: {c.label}: {c.error:+.0%} ({'fit' if c.fitted else 'held out'})"
            for c in worst
        ),
        "",
        "## Rows left out",
        "",
        *(f"- {count} x {why}" for why, count in sorted(skipped.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page from the folder named on the command line."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    cases, skipped = cases_of(folder, QUICK | {"layer_profiles": Layers().case})
    PAGE.write_text(page(cases, skipped))
    print("\n".join(table(cases)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
