"""`autopar profile` on this machine: what it writes, every command accepts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.commands.profile import measure, parse_mesh
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.runtime.launch import spawn

ROOT = Path(__file__).resolve().parent.parent.parent


def test_two_ranks_describe_their_node(tmp_path: Path) -> None:
    texts = spawn(measure, 2, (6.0, True, Mesh(tp=2)), timeout_seconds=200)
    assert texts[1] is None
    path = tmp_path / "cluster.toml"
    path.write_text(texts[0])
    cluster = Cluster.parse(str(path))
    assert (cluster.nodes, cluster.ranks_per_node, len(cluster.links)) == (1, 2, 1)
    device, link = cluster.device, cluster.links[0]
    assert 1e8 < device.flops["float32"] < 1e13
    assert {"float32", "bfloat16"} <= set(device.flops)
    assert 1e8 < device.memory_bytes_per_second < 1e13
    assert 1e6 < link.bytes_per_second < 1e12 and link.latency_seconds >= 0
    assert device.attention[device.attention_kernel].head_dims
    assert 0 < device.overlap_slowdown <= 1
    assert 0 <= device.divided_slowdown < 2


def test_the_command_writes_a_file_for_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    command = [sys.executable, "-m", "autopar", "profile", "--quick", "--seconds", "3"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--out", str(path)], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"--cluster {path}" in done.stdout and "matmul float32" in done.stderr
    assert Cluster.parse(str(path)).size == 1


@pytest.mark.parametrize("text", ["tp", "tp=0", "ep=2", "tp=x"])
def test_a_bad_mesh_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="--mesh"):
        parse_mesh(text)


def test_axes_left_out_have_one_rank() -> None:
    assert parse_mesh("dp=2, tp=4") == Mesh(dp=2, tp=4)
