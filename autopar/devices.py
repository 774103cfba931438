"""Built-in facts about common accelerators and networks: one TOML file each in `data/devices` and
`data/fabrics`, with sources."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cluster import EXECUTIONS, AttentionKernel, Device, Link
from autopar.errors import UsageError

FOLDER = Path(__file__).parent / "data" / "devices"
FABRICS = Path(__file__).parent / "data" / "fabrics"


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """A device, the largest node it is sold in, and the links inside and between such nodes."""

    device: Device
    most_ranks_per_node: int
    inside: Link
    between: Link | None

    def links(self, nodes: int, ranks_per_node: int) -> tuple[Link, ...]:
        """Link levels of `nodes` x `ranks_per_node` of this device, innermost first."""
        levels = [replace(self.inside, ranks=ranks_per_node)]
        if nodes > 1 and self.between is not None:
            outer = replace(self.between, ranks=nodes * ranks_per_node)
            # A node with one rank has no inside to speak of.
            levels = [outer] if ranks_per_node == 1 else [*levels, outer]
        return tuple(levels)


def known_devices() -> tuple[str, ...]:
    """Names usable in `NAME:NODESxGPUS`, and `cpu`."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def known_fabrics() -> tuple[str, ...]:
    """Names usable in `NAME:NODESxGPUS/FABRIC`."""
    return tuple(sorted(path.stem for path in FABRICS.glob("*.toml")))


@cache
def load_fabric(name: str) -> Link:
    """The built-in link between nodes `name`; raises `UsageError` that lists the known ones."""
    if name not in known_fabrics():
        raise UsageError(
            f"unknown fabric {name!r}; known: {', '.join(known_fabrics())}",
            next_step="use one of these, or describe the links in a TOML file",
        )
    document = tomllib.loads((FABRICS / f"{name}.toml").read_text(encoding="utf-8"))
    return link_from_table(name, {**document, "ranks": 1})


@cache
def load_device(name: str) -> DeviceFile:
    """The built-in device `name`; raises `UsageError` that lists the known ones."""
    if name not in known_devices():
        near = [known for known in known_devices() if known.startswith(name + "-")]
        raise UsageError(
            f"unknown device {name!r}; known: {', '.join(known_devices())}",
            next_step=f"write {' or '.join(near)}" if near else "use one of these, or a TOML file",
        )
    document = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    node = document.pop("node")
    links = {key: document.pop(key, None) for key in ("inside", "between")}
    inside = link_from_table(f"{name}.inside", {**links["inside"], "ranks": 1})
    between = links["between"] and load_fabric(links["between"]["fabric"])
    return DeviceFile(device_from_table(name, document), node["most_ranks"], inside, between)


def device_from_table(where: str, table: dict[str, Any]) -> Device:
    """A `Device` from a TOML table; `where` names it in errors. Unknown or missing keys raise."""
    values = _checked(
        where,
        table,
        Device,
        {
            "name": str,
            "flops": dict,
            "dtype_efficiency": dict,
            "attention": dict,
            "attention_kernel": str,
            "execution": str,
            "even_experts": bool,
            "overlap_experts": bool,
        },
    )
    flops = values["flops"]
    if "float32" not in flops or not all(_positive(rate) for rate in flops.values()):
        raise UsageError(
            f"{where}.flops is {flops!r}",
            next_step="give FLOP/s above 0 by dtype; at least float32",
        )
    for name in ("memory_bytes", "memory_bytes_per_second"):
        _require(where, name, values[name], _positive(values[name]), "a number above 0")
    for name in ("matmul_efficiency", "memory_efficiency"):
        good = 0 < values[name] <= 1
        _require(where, name, values[name], good, "a fraction above 0 and at most 1")
    factors = values.get("dtype_efficiency", {})
    good = all(_positive(factor) for factor in factors.values())
    _require(where, "dtype_efficiency", factors, good, "factors above 0 by dtype")
    execution = values.get("execution", EXECUTIONS[0])
    _require(where, "execution", execution, execution in EXECUTIONS, " or ".join(EXECUTIONS))
    values["flops"] = {dtype: float(rate) for dtype, rate in flops.items()}
    kernels = values.get("attention", {})
    values["attention"] = {k: _attention(f"{where}.attention.{k}", t) for k, t in kernels.items()}
    kernel = values.get("attention_kernel", "")
    good = not kernel or kernel in kernels
    _require(where, "attention_kernel", kernel, good, f"one of {', '.join(kernels)}")
    return Device(**values)


def _attention(where: str, table: Any) -> AttentionKernel:
    lists = ("head_dims", "forward", "backward")
    if isinstance(table, AttentionKernel):  # a known device's, taken over
        return table
    values = _checked(where, table, AttentionKernel, dict.fromkeys(lists, list | tuple))
    dims = values["head_dims"]
    for name in lists:
        good = len(values[name]) == len(dims) > 0 and all(_positive(v) for v in values[name])
        _require(where, name, values[name], good, "as many numbers above 0 as there are head dims")
        values[name] = tuple(values[name])
    _require(where, "head_dims", dims, sorted(dims) == list(dims), "growing head dims")
    return AttentionKernel(**values)


def link_from_table(where: str, table: dict[str, Any]) -> Link:
    """A `Link` from a TOML table; `where` names it in errors. Unknown or missing keys raise."""
    values = _checked(where, table, Link, {"name": str})
    for name in ("ranks", "bytes_per_second"):
        _require(where, name, values[name], _positive(values[name]), "a number above 0")
    return Link(**values)


def _checked(where: str, table: Any, kind: type, types: dict[str, Any]) -> dict[str, Any]:
    """Values of `table` with the types that the fields of dataclass `kind` have."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} is {table!r}", next_step="make it a TOML table")
    known = {field.name: field for field in fields(kind)}
    required = {name for name, field in known.items() if _has_no_default(field)}
    unknown, missing = sorted(set(table) - set(known)), sorted(required - set(table))
    if unknown or missing:
        raise UsageError(
            f"{where}: unknown keys {unknown}, missing keys {missing}",
            next_step=f"the keys are {', '.join(known)}",
        )
    values: dict[str, Any] = {}
    for name, value in table.items():
        wanted = types.get(name)
        if wanted is not None:
            kind_name = getattr(wanted, "__name__", "list")
            _require(where, name, value, isinstance(value, wanted), f"a {kind_name}")
            values[name] = value
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        whole = "int" in str(known[name].type)
        good = number and (not whole or int(value) == value)
        _require(where, name, value, good, "a whole number" if whole else "a number, not negative")
        values[name] = int(value) if whole else float(value)
    return values


def _has_no_default(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _require(where: str, name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise UsageError(f"{where}.{name} is {value!r}", next_step=f"give {expected}")
