"""What a row of published measurements says about its framework, hardware and network, in words.

The words are matched by the rules of `data/practice.toml` and `data/gpus.toml`: facts about
frameworks live there, not in code.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, Device, Link
from autopar.devices import known_devices, load_device

DATA = Path(__file__).parent.parent / "data"
Row = Mapping[str, str]
# Ranks of the largest node that is no rack (DGX-2).
LARGEST_NODE = 16
# Network of a whole node or of one GPU, as people write it.
_PER_NODE = (
    re.compile(r"(\d+)x(\d+) ?Gb\b"),
    re.compile(r"(\d+) ?Gbps(?: ?/ ?| per )node"),
)
_PER_GPU = re.compile(r"(\d+) ?Gb/s per GPU")


class InexpressibleError(Exception):
    """The row asks for what can't be evaluated; its text is the reason, in few words."""


@cache
def _rules(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def practice_facts(row: Row) -> dict[str, Any]:
    """Facts about the framework of `row`; raises `InexpressibleError` when a rule says so."""
    facts: dict[str, Any] = {}
    for rule in _rules("practice.toml")["rule"]:
        conditions = rule["when"].items()
        if all(re.search(p, row.get(column) or "", re.IGNORECASE) for column, p in conditions):
            for name, value in rule.items():
                if name != "when":
                    facts.setdefault(name, value)
    if "inexpressible" in facts:
        raise InexpressibleError(facts["inexpressible"])
    return facts


def number(row: Row, column: str, default: float | None = None) -> float:
    """What a column states; raises `InexpressibleError` where that is no number, and where it is
    nothing without a `default`."""
    text = row.get(column) or ""
    if not text and default is not None:
        return float(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise InexpressibleError(f"{column} is {text!r}" if text else f"{column} not stated")
    return value


def whole_number(row: Row, column: str, default: int | None = None) -> int:
    """The same, of a column that counts."""
    value = number(row, column, default)
    if not value.is_integer():
        raise InexpressibleError(f"{column} is {row[column]!r}")
    return int(value)


def _about(one: float, other: float) -> bool:
    """Whether two sizes can be of one device, as differently as they are rounded."""
    return other / 2 < one < 2 * other


def reported_device(row: Row) -> tuple[str, Device]:
    """The device of a row: which file it comes from, and the device with the row's variations."""
    name, memory = row.get("gpu") or "", row.get("gpu_mem_gb") or ""
    for rule in _rules("gpus.toml")["gpu"]:
        if not re.search(rule["name"], name, re.IGNORECASE):
            continue
        low, high = rule.get("memory_gb", (0, float("inf")))
        if "memory_gb" in rule and not (memory and low <= number(row, "gpu_mem_gb") <= high):
            continue
        key = rule.get("device")
        if key is None or key not in known_devices():
            break
        device = load_device(key).device
        changes = {
            k: v for k, v in rule.items() if k in ("memory_bytes", "memory_bytes_per_second")
        }
        if "rate" in rule:
            changes["flops"] = {k: v * rule["rate"] for k, v in device.flops.items()}
        device = replace(device, **changes)
        if memory and not _about(number(row, "gpu_mem_gb"), device.memory_bytes / 2**30):
            raise InexpressibleError(
                f"gpu_mem_gb is {memory}, and {key} has {device.memory_bytes / 2**30:.0f} GiB"
            )
        return key, device
    raise InexpressibleError(f"no device file for GPU {name or 'not stated'}")


def reported_cluster(row: Row, facts: Mapping[str, Any]) -> Cluster:
    """The machine of a row, running the kernels that `facts` name. Nodes that are not printed are
    full nodes of 8, or one smaller one.

    Raises `InexpressibleError` for an unknown GPU or a number of ranks that does not fill nodes.
    """
    key, device = reported_device(row)
    if facts.get("attention_kernel") in device.attention:
        device = replace(device, attention_kernel=facts["attention_kernel"])
    device = _with_attention_rate(device, facts["attention_rate"])
    named = ("execution", "even_experts", "overlap_experts")
    device = replace(device, **{name: facts[name] for name in named})
    if re.search(r"fp16|16-bit", row.get("precision") or "", re.IGNORECASE):
        # Stand-ins are captured in bfloat16; the row's products are float16.
        device = replace(device, flops={**device.flops, "bfloat16": device.flops["float16"]})
    device = replace(device, context_bytes=facts.get("context_bytes", device.context_bytes))
    ranks = whole_number(row, "n_gpus")
    per_node = _ranks_per_node(row, ranks, load_device(key).most_ranks_per_node)
    if ranks % per_node:
        raise InexpressibleError(f"{ranks} GPUs do not fill nodes of {per_node}")
    nodes = ranks // per_node
    links = load_device(key).links(nodes, per_node)
    if nodes > 1:
        links = (*links[:-1], _network(links[-1], key, row.get("interconnect") or "", per_node))
    return Cluster(key, device, nodes, per_node, links)


def _ranks_per_node(row: Row, ranks: int, most: int) -> int:
    """Of one NVLink domain: a node, or the part of a rack that the ranks fill evenly."""
    if most > LARGEST_NODE:
        return max(n for n in range(1, most + 1) if ranks % n == 0)
    per_node = min(ranks, 8)
    if row.get("n_nodes"):
        nodes = whole_number(row, "n_nodes")
        if not nodes or (ranks % nodes and nodes < ranks):
            raise InexpressibleError(f"n_nodes is {row['n_nodes']!r}, of {ranks} GPUs")
        per_node = max(1, ranks // nodes)
    return min(per_node, most)


def _with_attention_rate(device: Device, rate: float) -> Device:
    kernel = device.attention.get(device.attention_kernel)
    if kernel is None or rate == 1.0:
        return device
    slower = replace(
        kernel,
        forward=tuple(rate * e for e in kernel.forward),
        backward=tuple(rate * e for e in kernel.backward),
    )
    return replace(device, attention={device.attention_kernel: slower})


def _network(link: Link, key: str, text: str, per_node: int) -> Link:
    """The link between nodes at the speed that `text` states, if it states one."""
    bits = 0.0
    if found := _PER_GPU.search(text):
        bits = float(found.group(1)) * 1e9
    elif found := _PER_NODE[0].search(text):
        bits = float(found.group(1)) * float(found.group(2)) * 1e9 / per_node
    elif found := _PER_NODE[1].search(text):
        bits = float(found.group(1)) * 1e9 / per_node
    usual = _rules("gpus.toml")["adapter_bits"].get(key)
    share = bits / usual if bits and usual else 1.0
    for rule in _rules("gpus.toml")["network"]:
        if re.search(rule["name"], text, re.IGNORECASE):
            share *= rule["rate"]
    return replace(link, bytes_per_second=link.bytes_per_second * share)
