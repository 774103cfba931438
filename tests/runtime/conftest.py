"""A process group of this process alone, for what needs a group but no neighbour."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.mesh import Mesh
from autopar.runtime.ranks import Ranks


@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    yield Ranks.create(Mesh(), device="cpu")
    dist.destroy_process_group()
