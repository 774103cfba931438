"""What the rewrites hand to the runtime: one executable program per pipeline stage.

A stage is a chain of blocks. Each block is one `torch.fx` graph over *local* tensors (the
tensor-parallel collectives are ops inside it). Values live in an environment by name:

    env = shared values (from the batch) + received values
    for block in blocks: env[block.outputs] = block.graph(*parameters, *buffers, *env[block.inputs])
    send env[stage.send], or return env[stage.loss]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.placement import Placement


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One tensor as a rank sees it: local shape for one micro-batch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    placement: Placement = Placement("R")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the model, by its fully qualified name in the user's module.

    `placement` is on the tp axis. With `R*` every tp rank holds the whole parameter and produces
    a term of its gradient: the runtime sums it over tp once, at the end of the step.
    `stages` names all pipeline stages that hold it (more than one when tied across stages: their
    gradients are summed over those stages at the end of the step). `over_ep`: dim 0 counts the
    experts of a layer, which the ranks of ep split before tp. `spare`: empty slots that every rank
    has behind its part of dim 0, where that counts experts; the model's `shape` is without them.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    requires_grad: bool = True
    stages: tuple[int, ...] = ()
    over_ep: bool = False
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Rerun:
    """Nodes of a block's graph that run again in its backward, by name, in order.

    `ops` make the values that are not kept; `views` look at these values; both read parameters,
    buffers, inputs, each other, and the values of the nodes `sources`, which are kept for them.
    """

    ops: tuple[str, ...]
    views: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(slots=True)
class BlockProgram:
    """One block. `graph` takes, in order: parameters, buffers, inputs; returns a tuple: outputs.
    `recompute`: all of it runs again in the backward; `rerun`: a part of it, or None. `over_ep`:
    those of `parameters` that hold experts and are split over ep. `spare`: slots beyond its part of
    the experts that a rank has in those of `parameters` that have any."""

    name: str
    graph: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recompute: bool = False
    rerun: Rerun | None = None
    over_ep: frozenset[str] = frozenset()
    spare: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class StageProgram:
    """All that one pipeline stage executes for one micro-batch.

    `shared` (may be None) maps (buffers, batch inputs) to the parameter-free values that blocks
    read
    (rotary tables, masks); `shared_buffers`, `shared_inputs`, `shared_outputs` name its signature.
    `count` (last stage only, may be None) maps the batch inputs `count_inputs` to the number of
    target tokens of that batch as a 0-dim tensor; `loss` is then a mean over those tokens.
    `batch_inputs` are split into micro-batches along dim 0 (their shapes are one micro-batch's),
    except
    those named in `whole_inputs`, which every micro-batch sees whole. `sums`: the loss is a sum
    over the batch, so losses of micro-batches are added as they are. `even`: the loss is right only
    where all micro-batches count as much. `updates`: buffer -> value of
    one of the blocks that it holds after the step. `fixed`: inputs that are no tensors, with the
    only values that the program is right for. `draws`: some op draws random numbers.
    `loss_terms`: value of a block of the last stage -> name, of the loss's auxiliary terms.
    """

    index: int
    stages: int
    blocks: list[BlockProgram]
    parameters: dict[str, ParameterSpec]
    buffers: tuple[str, ...]
    receive: tuple[ValueSpec, ...]
    send: tuple[ValueSpec, ...]
    shared: fx.GraphModule | None = None
    shared_buffers: tuple[str, ...] = ()
    shared_inputs: tuple[str, ...] = ()
    shared_outputs: tuple[str, ...] = ()
    count: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    loss: str | None = None
    batch_inputs: dict[str, ValueSpec] = field(default_factory=dict)
    whole_inputs: frozenset[str] = frozenset()
    sums: bool = False
    even: bool = False
    updates: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    draws: bool = False
    loss_terms: dict[str, str] = field(default_factory=dict)
