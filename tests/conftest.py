"""Settings of every test run: few threads, no network, subprocesses find this checkout, order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported anywhere: tests and the ranks they start share a few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# `pythonpath` of pytest reaches this process only, not the programs that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# The longest files first, so that the workers end together: `make test` gives a worker whole files.
_FIRST = ("end_to_end", "zoo", "test_cli.py", "runtime", "examples", "workflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        part = item.path.relative_to(folder).parts[0] if folder in item.path.parents else ""
        return _FIRST.index(part) if part in _FIRST else len(_FIRST)

    items.sort(key=place)
