"""A rank's own parameters and buffers, made one at a time from the user's model.

The tensor-parallel slice of a parameter is a `DTensor` on the tp mesh (also when tp is 1, so that
state has one form), that of experts which ep splits one on the mesh of ep and tp;
`autopar.runtime.zero` shards it further over dp. Only one whole parameter
exists at a time, on the CPU.
"""

from __future__ import annotations

import torch
import torch.distributed.tensor as dt
from torch import nn

from autopar.errors import PlanError
from autopar.mesh import EP
from autopar.piece_name import parse_piece
from autopar.runtime.initialize import module_values
from autopar.runtime.ranks import Ranks
from autopar.stage_program import ParameterSpec


def storage_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """In what dtype a parameter that the program reads as `dtype` is kept and optimised.

    One dtype for all floating-point parameters of a precision: shards of a block travel together.
    """
    if not dtype.is_floating_point or dtype == torch.float64:
        return dtype
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


class ParameterSource:
    """Reads whole tensors from the user's model by name; initialises what is on meta."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self._model = model
        self._seed = seed
        self._path: str | None = None
        self._values: dict[str, torch.Tensor] = {}

    def tensor(self, fqn: str) -> torch.Tensor:
        """Raises `PlanError` when the model has no such parameter, piece of one, or buffer."""
        piece = parse_piece(fqn)
        if piece is not None:
            return self.tensor(piece.whole).narrow(piece.dim, piece.start, piece.stop - piece.start)
        path, _, name = fqn.rpartition(".")
        if path != self._path:
            try:
                self._model.get_submodule(path)
            except AttributeError as error:
                raise self._missing(fqn) from error
            self._values = module_values(self._model, path, self._seed)
            self._path = path
        if name not in self._values:
            raise self._missing(fqn)
        return self._values[name]

    def forget(self) -> None:
        """Drop what is kept from the last module read."""
        self._path, self._values = None, {}

    def parameter(self, spec: ParameterSpec, ranks: Ranks, precision: str) -> nn.Parameter:
        """This tp rank's piece, on its device."""
        whole = self.tensor(spec.fqn)
        if tuple(whole.shape) != spec.shape:
            raise PlanError(
                f"parameter {spec.fqn!r} has shape {tuple(whole.shape)}, the program was made for "
                f"{spec.shape}",
                next_step="plan and compile the same model",
            )
        placement: dt.Placement = dt.Replicate()
        piece = whole.chunk(ranks.mesh.ep)[ranks.index(EP)] if spec.over_ep else whole
        if spec.placement.is_shard:
            dim = spec.placement.dim
            spec.placement.local_shape(spec.shape, ranks.mesh.tp)  # raises when it does not divide
            piece = piece.chunk(ranks.mesh.tp, dim)[ranks.index("tp")]
            placement = dt.Shard(dim)
        dtype, rows = storage_dtype(spec.dtype, precision), spec.shape
        if spec.spare:
            local = torch.zeros(
                (piece.shape[0] + spec.spare, *piece.shape[1:]), dtype=dtype, device=ranks.device
            )
            local[: piece.shape[0]] = piece
            rows = (len(local) * ranks.mesh.degree(EP if spec.over_ep else "tp"), *spec.shape[1:])
        else:
            local = torch.empty(piece.shape, dtype=dtype, device=ranks.device)
            local.copy_(piece)
        tensor = dt.DTensor.from_local(
            local,
            ranks.experts[EP, "tp"] if spec.over_ep else ranks.tp,
            [dt.Shard(0), placement] if spec.over_ep else [placement],
            run_check=False,
            shape=torch.Size(rows),
            stride=torch.empty(rows, device="meta").stride(),
        )
        return nn.Parameter(tensor, requires_grad=spec.requires_grad)

    def buffer(self, fqn: str, ranks: Ranks) -> torch.Tensor:
        """A buffer, whole on every rank, in the dtype of the model."""
        path, _, name = fqn.rpartition(".")
        value = self.tensor(fqn)
        declared = getattr(self._model.get_submodule(path), name)
        return value.to(device=ranks.device, dtype=declared.dtype, copy=True)

    def _missing(self, fqn: str) -> PlanError:
        return PlanError(
            f"the model has no parameter or buffer {fqn!r}",
            next_step="plan and compile the same model",
        )
