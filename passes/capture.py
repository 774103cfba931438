"""nn.Module + example inputs -> Program, by torch.export on meta: nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from autopar.inputs import Inputs, flatten_inputs
from autopar.loss_function import LossFunction
from autopar.marks import mark_nodes
from autopar.passes.capture_experts import experts_as_one_op
from autopar.passes.capture_export import Exported, export
from autopar.passes.capture_graph import batch_size, program_of
from autopar.passes.capture_hooks import refuse_gradient_hooks
from autopar.passes.capture_library import of_libraries
from autopar.passes.capture_refusal import explain, remember_paths
from autopar.passes.capture_twin import (
    meta_twin,
    named_inputs,
    returns_loss,
    without_caches,
)
from autopar.passes.compare_batches import resized, with_batch_symbol
from autopar.program import Program


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    name: str = "",
    dtype: torch.dtype | None = None,
    loss_fn: LossFunction | None = None,
    replay_repeats: bool | None = None,
) -> Program:
    """Capture the forward of `model` in its present mode as one graph that ends in a scalar loss.

    `example_inputs`: keyword inputs as a mapping, or positional ones as a sequence; they may be
    nested (dicts, lists, tuples, dataclasses), and tensors that share the size of dim 0 form the
    batch. What is no tensor becomes fixed. `dtype`: compute dtype of the floating parameters
    (buffers keep theirs). `loss_fn`: of a model that returns no loss, see `loss_of`. Batch and
    sequence become symbols where torch.export allows. `replay_repeats`: trace a repeated layer once
    where the result is provably the same (default: in models made of library code alone).
    Raises `CaptureError` naming the module, the user's line and what to do.
    """
    refuse_gradient_hooks(model)
    inputs = named_inputs(model, example_inputs)
    repeats = of_libraries(model) if replay_repeats is None else replay_repeats

    def captured(given: Mapping[str, Any], symbols: bool) -> Program:
        return _captured(model, given, name, dtype, loss_fn, symbols, repeats)

    program = captured(inputs, True)
    if "batch" in program.symbols:
        return program
    rows = program.sizes["batch"]
    return with_batch_symbol(program, lambda size, s: captured(resized(inputs, rows, size), s))


def _captured(
    model: nn.Module,
    inputs: Mapping[str, Any],
    name: str,
    dtype: torch.dtype | None,
    loss_fn: LossFunction | None,
    symbols: bool,
    repeats: bool,
) -> Program:
    """One capture of a batch as it is given; with `symbols`, of any size where torch allows."""
    tensors, fixed = flatten_inputs(inputs)
    batch_size(tensors)
    twin = meta_twin(model, dtype)
    without_caches(twin)
    remember_paths(twin)
    leaves = returns_loss(twin, inputs, loss_fn)
    candidates = _dynamic_candidates(tensors) if symbols else [None]
    with experts_as_one_op(twin) as notes:
        try:
            found = export(twin, leaves, candidates, repeats=repeats)
        except Exception as error:
            raise explain(model, error) from error

        refuse_gradient_hooks(twin)  # one that the forward has registered

        def program_from(found: Exported) -> Program:
            title = name or type(model).__name__
            said = (*notes, *found.notes)
            return program_of(found.program, model, title, tensors, fixed, said)

        try:
            program = program_from(found)
        except Exception:
            if not found.replayed:
                raise
            # Only a full trace says for sure what can't be captured.
            program = program_from(export(twin, leaves, candidates, repeats=False))
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
