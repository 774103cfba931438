from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.compute import op_time

H100 = Cluster.parse("h100:1x8").device


def test_the_largest_term_decides_and_names_the_class() -> None:
    assert op_time(1.0, 1e10, H100).bound == "compute"
    assert op_time(0.0, 1e10, H100).bound == "memory"
    assert op_time(1e-9, 1e3, H100).bound == "launch"


def test_seconds_are_those_of_the_formula() -> None:
    start = H100.kernel_seconds
    assert op_time(2.0, 1e10, H100).seconds == pytest.approx(start + 2.0)
    copy = 1e10 / (3.35e12 * H100.memory_efficiency)
    assert op_time(0.0, 1e10, H100).seconds == pytest.approx(start + copy)
    assert op_time(0.0, 0.0, H100).seconds == H100.launch_seconds


def test_short_kernels_reach_a_part_of_the_bandwidth() -> None:
    def rate(nbytes: float) -> float:
        return nbytes / op_time(0.0, nbytes, replace(H100, launch_seconds=0.0)).seconds

    rates = [rate(2.0**i) for i in range(16, 34, 2)]
    assert rates == sorted(rates)
    assert rates[0] < 0.02 * 3.35e12 and rates[-1] == pytest.approx(0.83 * 3.35e12, rel=0.01)


def test_a_part_of_a_kernel_pays_no_start() -> None:
    assert op_time(0.0, 0.0, H100, starts=False).seconds == 0.0
    part = op_time(0.0, 1e9, H100, starts=False).seconds
    assert op_time(0.0, 1e9, H100).seconds == pytest.approx(part + H100.kernel_seconds)
