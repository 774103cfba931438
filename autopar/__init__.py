"""autopar: automatic parallelization of PyTorch models by search and program rewriting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Plan",
    "assign_experts",
    "compile",
    "declare_experts",
    "expect_load",
    "launch",
    "limit_experts",
    "plan",
    "register_rule",
    "replicate",
]

if TYPE_CHECKING:
    from autopar.api import compile, launch, plan
    from autopar.cluster import Cluster
    from autopar.experts.assignment import assign_experts
    from autopar.experts.capacity import limit_experts
    from autopar.experts.declaration import declare_experts
    from autopar.experts.expected import expect_load
    from autopar.marks import replicate
    from autopar.plan_document import Plan
    from autopar.rules.registration import register_rule

_HOME = {
    "assign_experts": "autopar.experts.assignment",
    "Cluster": "autopar.cluster",
    "Plan": "autopar.plan_document",
    "compile": "autopar.api",
    "declare_experts": "autopar.experts.declaration",
    "expect_load": "autopar.experts.expected",
    "launch": "autopar.api",
    "limit_experts": "autopar.experts.capacity",
    "plan": "autopar.api",
    "replicate": "autopar.marks",
    "register_rule": "autopar.rules.registration",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import autopar` alone must not load torch."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
