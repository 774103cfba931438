"""What the server of `warm_ranks` imports before it forks: no more than ranks would themselves."""

from __future__ import annotations

import importlib

import ortools.math_opt.python.mathopt  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.export  # noqa: F401

import autopar.api  # noqa: F401
import autopar.runtime.collectives  # noqa: F401
import autopar.runtime.program  # noqa: F401
import autopar.workflow.verification  # noqa: F401

# Ranks are forked: no thread of a pool may exist by then.
torch.set_num_threads(1)
for _name in ("gemma2", "gpt2", "llama", "qwen3"):
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
importlib.import_module("transformers.models.auto.modeling_auto")
