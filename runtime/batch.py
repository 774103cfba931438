"""The batch of a step: whether it is what the program was made for, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.inputs import flatten_inputs
from autopar.runtime.ranks import Ranks
from autopar.stage_program import ValueSpec

Tensor = torch.Tensor


def flat_batch(batch: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a batch by name; what is no tensor has to be what the program was made for.

    Raises `PlanError` naming an input with another fixed value.
    """
    tensors, others = flatten_inputs(batch)
    for name, value in others.items():
        if name not in fixed or fixed[name] != value:
            what = f"the program was made for {fixed[name]!r}" if name in fixed else "not a tensor"
            raise PlanError(
                f"batch input {name!r} is {value!r}: {what}",
                next_step="give a tensor, or compile with this value in example_inputs",
            )
    return dict(tensors)


@dataclass(frozen=True)
class BatchRules:
    """`inputs` hold the shapes of one microbatch; those in `whole` are not cut."""

    inputs: dict[str, ValueSpec]
    whole: frozenset[str]
    microbatches: int
    dp: int
    dp_index: int

    def local(
        self, batch: Mapping[str, Any], ranks: Ranks
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's rows of the inputs that are cut, and the whole inputs; on the device.

        Takes the global batch, of which every dp rank uses its own rows, or only those rows; dim 0
        tells which. Raises `PlanError` for a missing or unknown input, another size, or another
        dtype.
        """
        self._check_names(batch)
        cut: dict[str, Tensor] = {}
        whole: dict[str, Tensor] = {}
        rows: set[tuple[str, int]] = set()
        for name, spec in self.inputs.items():
            value = self._checked(name, spec, batch[name]).to(
                device=ranks.device, dtype=spec.dtype, non_blocking=True
            )
            if name in self.whole:
                whole[name] = value
                continue
            own = spec.shape[0] * self.microbatches
            rows.add((name, value.shape[0]))
            if value.shape[0] == own:
                cut[name] = value
            elif value.shape[0] == own * self.dp:
                cut[name] = value[self.dp_index * own : (self.dp_index + 1) * own]
            else:
                raise self._wrong_rows(name, spec, value)
        if len({count for _, count in rows}) > 1:
            raise PlanError(
                f"batch inputs differ in dim 0: {dict(sorted(rows))}",
                next_step="give all inputs the same number of rows",
            )
        return cut, whole

    def _check_names(self, batch: Mapping[str, Any]) -> None:
        missing = sorted(set(self.inputs) - set(batch))
        unknown = sorted(set(batch) - set(self.inputs))
        if missing or unknown:
            raise PlanError(
                f"batch inputs: missing {missing}, unknown {unknown}",
                next_step=f"the program was made for {sorted(self.inputs)}; to use another input, "
                "compile with it in example_inputs",
            )

    def _checked(self, name: str, spec: ValueSpec, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise PlanError(
                f"batch input {name!r} is a {type(value).__name__}", next_step="give a tensor"
            )
        start = 0 if name in self.whole else 1
        if value.dim() != len(spec.shape) or tuple(value.shape[start:]) != spec.shape[start:]:
            raise PlanError(
                f"batch input {name!r} has shape {list(value.shape)}, the program was made for "
                f"{self._expected(name, spec)}",
                next_step="pad or cut the batch, or plan for this shape",
            )
        if value.dtype.is_floating_point != spec.dtype.is_floating_point:
            raise PlanError(
                f"batch input {name!r} is {value.dtype}, the program was made for {spec.dtype}",
                next_step="convert it",
            )
        return value

    def _expected(self, name: str, spec: ValueSpec) -> str:
        if name in self.whole:
            return str(list(spec.shape))
        own = spec.shape[0] * self.microbatches
        local = [own, *spec.shape[1:]]
        if self.dp == 1:
            return str(local)
        return (
            f"{[own * self.dp, *spec.shape[1:]]} (the global batch) or {local} (a dp rank's part)"
        )

    def _wrong_rows(self, name: str, spec: ValueSpec, value: Tensor) -> PlanError:
        return PlanError(
            f"batch input {name!r} has {value.shape[0]} rows, expected "
            f"{self._expected(name, spec)}: {self.microbatches} microbatches of {spec.shape[0]} "
            f"on each of {self.dp} dp ranks",
            next_step="give a batch of that size, or plan for another global_batch_size; if dim 0 "
            f"of {name!r} is no batch, compile with example_inputs of another number of rows",
        )
