"""`autopar profile` refuses what can't work before it measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.commands.profile import profile_command
from autopar.errors import UsageError


def test_a_mesh_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="--mesh tp=3 has 3 ranks, --nproc is 2"):
        profile_command(None, 2, "tp=3", 100.0, quick=True)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no writable folder"):
        profile_command(tmp_path / "none" / "cluster.toml", 1, None, 100.0, quick=True)
