"""A dry run is one rank of a job of any size: shapes of that rank, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.runtime.dry_run import dry_run
from autopar.runtime.ranks import Ranks, agree, together


def test_a_rank_of_many_has_its_place_and_talks_to_itself() -> None:
    own = vars(DeviceMesh)["__getitem__"]
    with dry_run(13, 16) as shapes_only:
        ranks = Ranks.create(Mesh(pp=2, dp=4, tp=2))
        assert [ranks.index(a) for a in ("pp", "dp", "tp")] == [1, 2, 1]
        agree(ranks, "the same")
        with shapes_only:
            assert together(ranks, None, (3.0,)) == (3.0,)
            assert ranks.device_mesh["dp"].get_local_rank() == 2
            huge = torch.empty(2**40)
            assert isinstance(huge, FakeTensor)
            dist.all_reduce(huge, group=ranks.group("dp"))
        with pytest.raises(UsageError, match="one already"), dry_run(0, 2):
            pass
    assert not dist.is_initialized()
    assert vars(DeviceMesh)["__getitem__"] is own


def test_an_error_leaves_no_process_group() -> None:
    with pytest.raises(ZeroDivisionError), dry_run(0, 4):
        raise ZeroDivisionError
    assert not dist.is_initialized()
