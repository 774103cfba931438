"""Clusters as text: the short form `h100:8x8`, and the TOML file that can say everything.

`a100-80:4x8/efa-4x100` is the short form with another fabric between the nodes than the usual one.

name = "lab"
nodes = 4
ranks_per_node = 4
device = "h100"            # a known device, or a table [device]; `base = "h100"` inside it
                           # starts from a known one and changes some keys
[[links]]                  # innermost first; left out: those of the known device
name = "nvlink"
ranks = 4
bytes_per_second = 3.6e11
latency_seconds = 5e-6
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from autopar.cluster import AttentionKernel, Cluster, Device, Link
from autopar.devices import (
    DeviceFile,
    device_from_table,
    known_devices,
    link_from_table,
    load_device,
    load_fabric,
)
from autopar.errors import UsageError

_SHORT = re.compile(r"^([a-z0-9.-]+):(\d+)(?:x(\d+))?(?:/([a-z0-9.-]+))?$")


def parse_cluster(text: str) -> Cluster:
    """See `Cluster.parse`."""
    if text.endswith(".toml") or Path(text).is_file():
        return read_cluster(Path(text))
    found = _SHORT.match(text.strip().lower())
    forms = (
        f"NAME:NODESxGPUS with NAME one of {', '.join(d for d in known_devices() if d != 'cpu')}"
    )
    if not found:
        raise UsageError(
            f"cluster {text!r} is not understood",
            next_step=f"write {forms} (such as h100:8x8), or cpu:N, or the path of a TOML file",
        )
    name, first, second, fabric = found.groups()
    known = load_device(name)
    if fabric is not None:
        if known.between is None:
            raise UsageError(
                f"cluster {text!r}: {name} has one node", next_step=f"write {name}:{first}"
            )
        known = replace(known, between=load_fabric(fabric))
    one_node = known.between is None
    if one_node == (second is not None):
        example = f"{name}:4" if one_node else f"{name}:{first}x{known.most_ranks_per_node}"
        raise UsageError(
            f"cluster {text!r}: {name} takes {'ranks of one node' if one_node else 'NODESxGPUS'}",
            next_step=f"write for example {example}",
        )
    nodes, ranks = (1, int(first)) if one_node else (int(first), int(second))
    if nodes < 1 or not 1 <= ranks <= known.most_ranks_per_node:
        raise UsageError(
            f"cluster {text!r} has {nodes} nodes of {ranks} ranks; "
            f"a node of {name} has 1 to {known.most_ranks_per_node}",
            next_step="change the numbers (NODESxGPUS), or describe the machine in a TOML file",
        )
    return Cluster(text.strip().lower(), known.device, nodes, ranks, known.links(nodes, ranks))


def short_form(text: str) -> tuple[str, str] | None:
    """Device and `/FABRIC` (empty: the usual one) of a cluster in the short form, else None."""
    found = _SHORT.match(text)
    return None if found is None else (found[1], f"/{found[4]}" if found[4] else "")


def read_cluster(path: Path) -> Cluster:
    """See `Cluster.from_toml`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cluster file {path}: {error.strerror or error}", next_step="check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", next_step="repair the file") from error
    unknown = sorted(set(document) - {"name", "nodes", "ranks_per_node", "device", "links"})
    if unknown:
        raise UsageError(
            f"{path}: unknown keys {unknown}",
            next_step="the keys are name, nodes, ranks_per_node, device, links",
        )
    sizes = {key: _whole(path, key, document.get(key)) for key in ("nodes", "ranks_per_node")}
    device, base = _device(path, document.get("device"))
    links = _links(path, document.get("links"), base, **sizes)
    return Cluster(str(document.get("name", path.stem)), device, links=links, **sizes)


def write_cluster(cluster: Cluster) -> str:
    """See `Cluster.to_toml`. All is written out: the file does not depend on built-in data."""
    lines = [f"name = {json.dumps(cluster.name)}", f"nodes = {cluster.nodes}"]
    lines += [f"ranks_per_node = {cluster.ranks_per_node}", "", "[device]"]
    tables = ("flops", "dtype_efficiency")
    lines += _pairs(cluster.device, skip=(*tables, "attention"))
    for table in tables:
        by_dtype = getattr(cluster.device, table)
        lines += ["", f"[device.{table}]"]
        lines += [f"{json.dumps(dtype)} = {value!r}" for dtype, value in by_dtype.items()]
    for kernel, rates in cluster.device.attention.items():
        lines += ["", f"[device.attention.{json.dumps(kernel)}]", *_pairs(rates)]
    for link in cluster.links:
        lines += ["", "[[links]]", *_pairs(link)]
    return "\n".join(lines) + "\n"


def _pairs(value: Device | Link | AttentionKernel, skip: tuple[str, ...] = ()) -> list[str]:
    pairs = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name not in skip]
    return [f"{name} = {_text(found)}" for name, found in pairs]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return repr(list(value))
    # JSON writes text and truth values as TOML does.
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


def _device(path: Path, entry: Any) -> tuple[Device, DeviceFile | None]:
    if isinstance(entry, str):
        known = load_device(entry)
        return known.device, known
    if isinstance(entry, dict) and "base" in entry:
        known = load_device(str(entry["base"]))
        changes = {key: value for key, value in entry.items() if key != "base"}
        start = {f.name: getattr(known.device, f.name) for f in fields(known.device)}
        return device_from_table(f"{path}: device", {**start, **changes}), known
    if entry is None:
        raise UsageError(
            f"{path} has no device",
            next_step=f"add a [device] table, or device = one of {', '.join(known_devices())}",
        )
    return device_from_table(f"{path}: device", entry), None


def _links(
    path: Path, entry: Any, base: DeviceFile | None, nodes: int, ranks_per_node: int
) -> tuple[Link, ...]:
    if entry is None and base is not None and (base.between is not None or nodes == 1):
        return base.links(nodes, ranks_per_node)
    if not isinstance(entry, list) or not entry:
        raise UsageError(
            f"{path} has no links for {nodes} nodes of {ranks_per_node}",
            next_step="add [[links]] tables, innermost level first",
        )
    links = tuple(link_from_table(f"{path}: links[{i}]", table) for i, table in enumerate(entry))
    ranks = [link.ranks for link in links]
    nested = all(outer % inner == 0 for inner, outer in zip(ranks, ranks[1:], strict=False))
    if ranks != sorted(set(ranks)) or not nested or ranks[-1] != nodes * ranks_per_node:
        raise UsageError(
            f"{path}: links reach {ranks} ranks on {nodes} nodes of {ranks_per_node}",
            next_step="each level must be a multiple of the one before, the last the whole cluster",
        )
    return links


def _whole(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{path}: {name} is {value!r}", next_step="give a whole number above 0")
    return value
