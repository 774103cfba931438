"""nn.Module + example inputs -> Program, by torch.export on meta: nothing is allocated."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from autopar.inputs import Inputs, flatten_inputs
from autopar.loss_function import LossFunction
from autopar.marks import mark_nodes
from autopar.passes.capture_graph import batch_size, program_of
from autopar.passes.capture_refusal import explain, remember_paths
from autopar.passes.capture_tracing import Tracing, masks_as_given
from autopar.passes.capture_twin import (
    meta_twin,
    named_inputs,
    returns_loss,
    without_caches,
)
from autopar.program import Program

_TORCH_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    name: str = "",
    dtype: torch.dtype | None = None,
    loss_fn: LossFunction | None = None,
) -> Program:
    """Capture the forward of `model` in its present mode as one graph that ends in a scalar loss.

    `example_inputs`: keyword inputs as a mapping, or positional ones as a sequence; they may be
    nested (dicts, lists, tuples, dataclasses), and tensors that share the size of dim 0 form the
    batch. What is no tensor becomes fixed. `dtype`: compute dtype of the floating parameters
    (buffers keep theirs). `loss_fn`: of a model that returns no loss, see `loss_of`. Batch and
    sequence become symbols where torch.export allows.
    Raises `CaptureError` naming the module, the user's line and what to do.
    """
    inputs = named_inputs(model, example_inputs)
    tensors, fixed = flatten_inputs(inputs)
    batch_size(tensors)
    twin = meta_twin(model, dtype)
    without_caches(twin)
    remember_paths(twin)
    leaves = returns_loss(twin, inputs, loss_fn)
    failure: Exception | None = None
    for dims in _dynamic_candidates(tensors):
        try:
            exported, notes = _export(twin, leaves, dims)
            break
        except Exception as error:
            failure = error
    else:
        assert failure is not None
        raise explain(model, failure) from failure
    program = program_of(exported, model, name or type(model).__name__, tensors, fixed, notes)
    mark_nodes(program.graph, model)
    return program


def _dynamic_candidates(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """What to try, most symbolic first: batch and sequence, batch alone, all static."""
    leaves = list(tensors.values())
    batch = batch_size(tensors)
    sequences = {v.shape[1] for v in leaves if v.dim() >= 2 and v.shape[0] == batch}

    def dims(with_sequence: bool) -> Any:
        found: list[Any] = []
        for value in leaves:
            if value.dim() == 0 or value.shape[0] != batch:
                found.append(None)
                continue
            found.append({0: Dim("batch", min=2)})
            if with_sequence and value.dim() >= 2:
                found[-1][1] = Dim("sequence", min=2)
        return {"tensors": tuple(found)}

    candidates: list[Any] = []
    if batch >= 2:
        integers = all(not v.is_floating_point() for v in leaves)
        if integers and len(sequences) == 1 and min(sequences) >= 2:
            candidates.append(dims(True))
        candidates.append(dims(False))
    return [*candidates, None]


def _export(
    model: nn.Module, leaves: list[torch.Tensor], dims: Any
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The exported program and what was assumed on the way."""
    tracing = Tracing()
    with _quiet(), masks_as_given(), tracing:
        exported = torch.export.export(model, tuple(leaves), dynamic_shapes=dims, strict=False)
    return exported, tuple(tracing.notes)


@contextmanager
def _quiet() -> Iterator[None]:
    """What libraries say while a model is traced is about tracing, not about the user's run."""
    talkative = [logging.getLogger(name) for name in ("transformers", *_TORCH_LOGGERS)]
    levels = [logger.level for logger in talkative]
    # Of a trace that fails, torch prints the whole graph.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in talkative:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(talkative, levels, strict=True):
                logger.setLevel(level)
