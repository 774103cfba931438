"""How routing went from step to step: numbers of every layer, and auxiliary losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.experts.diagnosis import Routing
from autopar.experts.load import LayerLoad, checked_load, of_file, read_layers, read_load

MOST = 10_000
# What is recorded of a layer: properties of `LayerLoad`.
MEASURES = ("entropy", "expert_imbalance", "rank_imbalance", "dropped_share")


class RoutingHistory:
    """One record for each call of `add`, of what came since the one before; the oldest are
    forgotten when there are more than `most`."""

    def __init__(self, most: int = MOST) -> None:
        if most < 1:
            raise UsageError(f"most={most} records", next_step="give 1 or more")
        self._records: deque[dict[str, Any]] = deque(maxlen=most)
        self._last: Mapping[str, LayerLoad] = {}
        # From which on the next record counts.
        self._before: Mapping[str, LayerLoad] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, step: int, routing: Routing, auxiliary: Mapping[str, float]) -> dict[str, Any]:
        """`routing`: rows counted so far, or since `counts_were_reset`; `auxiliary`: losses of the
        step. Returns the record. Raises `UsageError` where no layer has experts."""
        if not routing.layers:
            raise UsageError(
                "the program has no layer with experts that are one op: there is no routing to "
                "record",
                next_step="declare the class that computes them (autopar.declare_experts) before "
                "planning, or leave record_routing() out",
            )
        layers = {}
        for name, now in routing.layers.items():
            own = _since(now, self._before.get(name))
            layers[name] = {measure: getattr(own, measure) for measure in MEASURES}
        self._last = self._before = dict(routing.layers)
        record = {"step": step, "auxiliary_losses": dict(auxiliary), "layers": layers}
        self._records.append(record)
        return record

    def counts_were_reset(self) -> None:
        """Rows are counted from zero: the next record is of those, and not of what came between
        the last record and the reset."""
        self._before = {}

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it: `load`, rows of every expert by layer at the last record, and
        `history`, the records."""
        load = {name: list(layer.rows) for name, layer in self._last.items()}
        return {"load": load, "history": list(self._records)}


@dataclass(frozen=True)
class Recorded:
    """What a file says of routing: `load`, rows of every expert by layer, and records (none where
    the file is a load alone)."""

    load: dict[str, tuple[float, ...]]
    records: tuple[dict[str, Any], ...] = ()

    @staticmethod
    def read(path: str | Path) -> Recorded:
        """A load file, or what `to_dict` of a history gave. Raises `UsageError` naming what is
        wrong with it."""
        given = read_layers(path)
        if not (isinstance(given, dict) and isinstance(given.get("history"), list)):
            return Recorded(read_load(path))
        if not given["history"] and not given.get("load"):
            raise UsageError(
                f"the history in {path} has no record yet",
                next_step="call program.record_routing() after a step, then write it",
            )
        for index, record in enumerate(given["history"]):
            _check(f"record {index} of {path}", record)
        with of_file(path):
            return Recorded(checked_load(given.get("load") or {}), tuple(given["history"]))


def _check(where: str, record: Any) -> None:
    if not _is_record(record):
        raise UsageError(
            f"{where} is no record of routing",
            next_step="give what program.history.to_dict() returned, as JSON",
        )


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return False
    layers = value.get("layers")
    if not isinstance(layers, dict) or not layers or not _numbers(value.get("auxiliary_losses")):
        return False
    return all(_numbers(layer) and set(MEASURES) <= set(layer) for layer in layers.values())


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_finite, value.values()))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _since(now: LayerLoad, before: LayerLoad | None) -> LayerLoad:
    if before is None or len(before.rows) != len(now.rows):
        return now
    rows = [a - b for a, b in zip(now.rows, before.rows, strict=True)]
    dropped = now.dropped - before.dropped
    if min(rows) < 0 or dropped < 0:
        raise UsageError(
            "a layer has fewer rows than at the record before",
            next_step="call counts_were_reset() of the history when its counts are reset",
        )
    return replace(now, rows=tuple(rows), dropped=dropped)
