"""The private torch interfaces that autopar's ops use, each behind one function."""

from __future__ import annotations

from typing import Any


def resolve_group(name: str) -> Any:
    """The process group of that name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
