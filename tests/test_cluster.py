from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.devices import known_devices, known_fabrics, load_device, load_fabric
from autopar.errors import UsageError


def test_short_form() -> None:
    cluster = Cluster.parse("h100:8x4")
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node, cluster.size) == (
        "h100:8x4",
        8,
        4,
        32,
    )
    assert [(link.name, link.ranks) for link in cluster.links] == [("nvlink", 4), ("network", 32)]
    assert cluster.device.flops["bfloat16"] == 989e12
    assert Cluster.parse(" H100:8x4 ") == cluster


def test_one_node_has_one_level_and_so_has_one_rank_per_node() -> None:
    assert [link.name for link in Cluster.parse("b200:1x8").links] == ["nvlink"]
    assert [link.name for link in Cluster.parse("b200:4x1").links] == ["network"]
    assert [link.ranks for link in Cluster.parse("cpu:4").links] == [4]


@pytest.mark.parametrize("name", known_devices())
def test_every_device_file_is_plausible(name: str) -> None:
    known = load_device(name)
    device = known.device
    assert device.name == name
    assert 0 <= device.context_bytes < device.memory_bytes
    assert {"float32", "bfloat16", "float16"} <= set(device.flops)
    assert device.flops["bfloat16"] >= device.flops["float32"]
    assert device.attention_kernel in ("", *device.attention)
    assert 1e-7 < device.launch_seconds < 1e-4
    if known.between is not None:
        assert known.between.bytes_per_second < known.inside.bytes_per_second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo", ["h100", "a100-40", "cpu:N", "TOML"]),
        ("v9:1x8", ["known: a100-40, a100-80, b200, b300, cpu, gb200, h100, h200, h800, v100-16"]),
        ("v100:1x8", ["v100-16 or v100-32"]),
        ("h100:2x8/tin-cans", ["unknown fabric 'tin-cans'", "efa-4x100", "ib-8x400"]),
        ("cpu:4/ib-8x400", ["cpu has one node", "cpu:4"]),
        ("a100:1x8", ["a100-40 or a100-80"]),
        ("h100:8", ["h100:8x8"]),
        ("h100:1x16", ["16 ranks", "1 to 8"]),
        ("h100:0x8", ["0 nodes"]),
        ("h100:8x0", ["0 ranks"]),
        ("h100:8x8x8", ["NODESxGPUS"]),
        ("cpu:2x4", ["cpu:4"]),
        ("cpu:0", ["0 ranks"]),
        ("missing.toml", ["missing.toml", "check the path"]),
        ("", ["TOML"]),
    ],
)
def test_other_text_is_an_error_that_helps(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Cluster.parse(text)
    for word in words:
        assert word in str(caught.value)


def test_the_fabric_can_be_named() -> None:
    slow, usual = Cluster.parse("a100-80:2x8/efa-4x100"), Cluster.parse("a100-80:2x8")
    assert slow.name == "a100-80:2x8/efa-4x100"
    assert slow.links[0] == usual.links[0] and slow.links[1] != usual.links[1]
    assert slow.links[1].bytes_per_second < usual.links[1].bytes_per_second / 3


@pytest.mark.parametrize("name", known_fabrics())
def test_every_fabric_file_is_plausible(name: str) -> None:
    link = load_fabric(name)
    assert 1e9 < link.bytes_per_second < 2e11
    assert 1e-6 < link.latency_seconds < link.start_seconds < 1e-3
    assert 0 < link.exchange_efficiency < link.dispatch_efficiency <= 1


def test_execution_is_eager_or_compile() -> None:
    cluster = Cluster.parse("h100:1x8")
    assert cluster.device.execution == "eager"
    compiled = cluster.with_execution("compile")
    assert compiled.device == replace(cluster.device, execution="compile")
    with pytest.raises(UsageError, match="execution 'fast'"):
        cluster.with_execution("fast")


@pytest.mark.parametrize(
    "text", ["h100:8x8", "a100-40:2x16", "cpu:3", "b200:4x1", "v100-32:2x8/ib-8x200"]
)
def test_toml_round_trip(text: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(text)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml())
    assert Cluster.from_toml(path) == cluster
    assert Cluster.parse(str(path)) == cluster


def test_toml_starts_from_a_known_device(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(
        'nodes = 2\nranks_per_node = 4\n[device]\nbase = "h100"\nmemory_bytes = 96_000_000_000\n'
    )
    cluster, plain = Cluster.from_toml(path), Cluster.parse("h100:2x4")
    assert cluster.name == "lab"
    assert cluster.links == plain.links
    assert cluster.device == replace(plain.device, memory_bytes=96_000_000_000)


HEAD = 'nodes = 2\nranks_per_node = 4\ndevice = "h100"\n'
LINK = '[[links]]\nname = "a"\nranks = {}\nbytes_per_second = 1e9\nlatency_seconds = 1e-6\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = ", "not TOML"),
        ("nodes = 2\nranks_per_node = 4", "no device"),
        (HEAD.replace("2", "0", 1), "nodes is 0"),
        (HEAD.replace("4", "true"), "ranks_per_node is True"),
        ("gpus = 8\n" + HEAD, "unknown keys ['gpus']"),
        (HEAD.replace("h100", "h1"), "unknown device 'h1'"),
        (HEAD.replace('"h100"', '"cpu"'), "no links"),
        (HEAD + LINK.format(4), "links reach [4] ranks"),
        (HEAD + LINK.format(3) + LINK.format(8), "links reach [3, 8]"),
        (HEAD + LINK.format(8) + LINK.format(8), "links reach [8, 8]"),
        (HEAD + LINK.format(8).replace("1e9", "0"), "bytes_per_second is 0"),
        (HEAD + LINK.format(8).replace("1e9", '"fast"'), "bytes_per_second is 'fast'"),
        (HEAD + LINK.format(8) + "speed = 1\n", "unknown keys ['speed']"),
        (HEAD + "links = []\n", "no links"),
        (
            HEAD.replace('"h100"', '{base = "h100", memory_efficiency = 2}'),
            "memory_efficiency is 2",
        ),
        (HEAD.replace('"h100"', '{base = "h100", flops = {float16 = 1}}'), "float32"),
        (HEAD.replace('"h100"', '{base = "h100", execution = "fast"}'), "execution is 'fast'"),
        (
            HEAD.replace('"h100"', '{base = "h100", attention_kernel = "flash9"}'),
            "give one of flash2, flash3, cudnn",
        ),
        (
            HEAD.replace('"h100"', '{base = "h100", dtype_efficiency = {float8 = 0}}'),
            "dtype_efficiency is {'float8': 0}",
        ),
        (
            HEAD.replace('"h100"', '{base = "h100", attention = {flash2 = {half_keys = 1}}}'),
            "attention.flash2: unknown keys [], missing keys",
        ),
        (HEAD.replace('"h100"', '{name = "x"}'), "missing keys"),
    ],
)
def test_bad_toml_names_the_key(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Cluster.from_toml(path)
    assert words in str(caught.value)
    assert caught.value.next_step


def test_memory_limit() -> None:
    cluster = Cluster.parse("h100:1x8")
    device = cluster.device
    small = cluster.with_memory_limit(2**30).device
    assert small.usable_bytes == 2**30
    # A limit above what the driver leaves can't be granted in full.
    assert cluster.with_memory_limit(device.memory_bytes).device == device
    for limit in (0, -1, device.memory_bytes + 1):
        with pytest.raises(UsageError, match="memory limit"):
            cluster.with_memory_limit(limit)


def test_price_is_per_cluster() -> None:
    cluster = Cluster.parse("h100:2x8")
    assert cluster.price_per_hour == pytest.approx(16 * cluster.device.price_per_hour)
    assert Cluster.parse("cpu:2").price_per_hour == 0


@pytest.mark.parametrize(
    ("group", "stride", "link"),
    [
        (1, 1, "nvlink"),
        (8, 1, "nvlink"),
        (4, 2, "nvlink"),
        (2, 8, "network"),
        (16, 1, "network"),
        (8, 2, "network"),
    ],
)
def test_link_for(group: int, stride: int, link: str) -> None:
    assert Cluster.parse("h100:8x8").link_for(group, stride).name == link


def test_link_for_a_group_that_straddles_nodes() -> None:
    # Ranks 0-3 of a six-GPU node are inside it, ranks 4-7 are not.
    assert Cluster.parse("h100:2x6").link_for(4, 1).name == "network"
    assert Cluster.parse("h100:2x6").link_for(3, 1).name == "nvlink"
