"""torch.export on the twin: the most symbolic sizes that work, repeated layers traced once."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import UserError, UserErrorType
from torch.export import ExportedProgram

from autopar.passes.capture_chance import no_python_chance
from autopar.passes.capture_functions import functions_as_ops
from autopar.passes.capture_hooks import no_hooks_in_forward
from autopar.passes.capture_repeats import Disagreement, Repeats
from autopar.passes.capture_tracing import Tracing, masks_as_given, no_function_transforms

_TORCH_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export",
    "torch._subclasses.fake_tensor",
)


@dataclass(frozen=True)
class Exported:
    """`notes`: what was assumed on the way. `replayed`: calls of layers that were not traced."""

    program: ExportedProgram
    notes: tuple[str, ...]
    replayed: int = 0


def export(
    twin: nn.Module, leaves: list[torch.Tensor], candidates: Sequence[Any], *, repeats: bool = True
) -> Exported:
    """The twin exported with the first of `candidates` (dynamic shapes) that torch.export takes.

    With `repeats`, layers that are provably alike are traced once. What fails with it is tried
    without, so that the result and the errors are those of a full trace. Raises the last error.
    """
    failure: Exception | None = None
    for dims in candidates:
        shared = Repeats(twin) if repeats else None
        try:
            found = _export(twin, leaves, dims, shared)
            if shared is None or not shared.escaped:
                return found
        except Exception as error:
            failure = error
            if shared is None or _fails_in_full(error, shared):
                continue
        try:
            return _export(twin, leaves, dims, None)
        except Exception as error:
            failure = error
    assert failure is not None
    raise failure


def _fails_in_full(error: Exception, shared: Repeats) -> bool:
    """Whether a trace of all layers would fail too: it asks all that this one asked of sizes."""
    if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
        return True
    return not shared.replayed and not isinstance(error, Disagreement)


def _export(
    twin: nn.Module, leaves: list[torch.Tensor], dims: Any, repeats: Repeats | None
) -> Exported:
    tracing = Tracing()
    replay = repeats.active() if repeats else nullcontext()
    refused = no_python_chance(twin), no_hooks_in_forward(), no_function_transforms()
    with ExitStack() as stack:
        for each in (_quiet(), masks_as_given(), functions_as_ops(), *refused, replay, tracing):
            stack.enter_context(each)
        program = torch.export.export(twin, tuple(leaves), dynamic_shapes=dims, strict=False)
    return Exported(program, tuple(tracing.notes), repeats.replayed if repeats else 0)


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
