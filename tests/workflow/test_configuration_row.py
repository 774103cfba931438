"""Rows of published tables to configurations."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.workflow.configuration_row import read_row
from autopar.workflow.reported_practice import InexpressibleError
from autopar.workflow.stand_in import Architecture

ROW = {
    "model": "GPT 22B", "layers": "48", "hidden": "6144", "heads": "64", "ffn": "24576",
    "vocab": "51200", "seq": "2048", "gpu": "A100", "gpu_mem_gb": "80", "n_gpus": "16",
    "n_nodes": "2", "tp": "8", "sp": "0", "pp": "2", "dp": "1", "mbs": "4", "gbs": "32",
    "zero": "0", "precision": "fp16 mixed", "recompute": "full",
}  # fmt: skip
# Data parallelism alone.
WIDE = {"tp": "1", "pp": "1", "dp": "16", "gbs": "32"}


def test_a_megatron_row():
    found = read_row(ROW)
    c = found.configuration
    assert found.layers == 48
    assert found.architecture == Architecture(
        6144, 64, 64, 24576, 51200, gated=False, tied=True, fused_attention=False
    )
    assert (c.mesh, c.microbatch, c.microbatches) == (Mesh(2, 1, 8), 4, 8)
    assert (c.recompute, c.zero, c.boundaries) == ("full", 0, ("R",))
    assert c.cluster.nodes == 2 and c.cluster.device.memory_bytes > 80e9
    assert not c.practice.overlap_gradients


def test_a_gated_model_by_its_parameters_or_its_name():
    llama = ROW | {"model": "x", "hidden": "4096", "heads": "32", "kv_heads": "8", "layers": "32"}
    llama |= {"ffn": "14336", "vocab": "128256", "params_b": "8.03", "tp": "8", "sp": "1"}
    found = read_row(llama)
    assert found.architecture.gated and not found.architecture.tied
    assert found.architecture.parameters(32) == pytest.approx(8.03e9, rel=0.01)
    assert found.configuration.boundaries == ("S(1)",)
    assert not read_row(llama | {"params_b": "", "model": "GPT"}).architecture.gated


def test_a_llama_of_four_times_the_width_is_gated():
    row = ROW | {"hidden": "2048", "ffn": "8192", "heads": "32", "vocab": "131072", "layers": "16"}
    row |= {"params_b": "1.34"}
    for name, gated in (("Llama-like 1.34B", True), ("1.34B", False)):
        found = read_row(row | {"model": name}).architecture
        assert (found.gated, found.tied) == (gated, gated)
        assert found.parameters(16) == pytest.approx(1.34e9, rel=0.01)


def test_where_gradients_live():
    row = ROW | {"precision": "bf16 (fp32 grad accumulation)", "dp": "2", "n_gpus": "32"}
    row |= {"n_nodes": "4"}
    added = read_row(row).configuration
    assert added.precision == "bf16-mixed" and added.by_parameters
    assert added.practice.gradient_buffer == "end" and added.practice.gradient_buckets
    assert not read_row(row | {"zero": "1"}).configuration.practice.gradient_buckets
    kept = read_row(row | {"dp_mode": "Megatron-DeepSpeed"}).configuration
    assert kept.precision == "bf16-accumulated" and not kept.by_parameters
    assert kept.practice.gradient_buffer == "each" and not kept.practice.gradient_buckets
    assert read_row(ROW).configuration.practice.gradient_buffer == ""


@pytest.mark.parametrize(
    ("written", "vp", "found"),
    [
        ("", "", ("1f1b", 1)),
        ("1F1B", "2", ("interleaved", 2)),
        ("Interleaved1F1B", "4", ("interleaved", 4)),
        ("1F1B interleaved", "", ("1f1b", 1)),
        ("GPipe", "", ("gpipe", 1)),
        ("zero bubble", "", ("zero-bubble", 1)),
        ("zero-bubble", "2", ("zero-bubble", 2)),
        ("ZBV", "", ("zbv", 2)),
    ],
)
def test_schedules_as_they_are_written(written, vp, found):
    row = ROW | {"schedule": written, "vp": vp, "recompute": "none"}
    c = read_row(row).configuration
    assert (c.schedule, c.chunks) == found
    alone = read_row(row | WIDE | {"vp": "", "mbs": "2"}).configuration
    assert (alone.schedule, alone.chunks) == ("1f1b", 1)


def test_cp_is_beside_dp():
    found = read_row(ROW | {"cp": "2", "tp": "4"}).configuration
    assert found.mesh == Mesh(2, 1, 4, 2) and found.microbatches == 8
    assert read_row(ROW | {"cp": ""}).configuration.mesh.cp == 1


@pytest.mark.parametrize(
    ("told", "shard"),
    [
        ({"dp_mode": "HSDP (shard within node, replicate across)"}, 8),
        ({"dp_mode": "MaxText FSDP=4 x DP=4"}, 4),
        ({"dp_mode": "MaxText FSDP=16 x DP=1"}, 16),
        ({"dp_mode": "FSDP=4xDP=4"}, 4),
        ({"dp_mode": "FSDP=8 DP=2", "shard": "8"}, 8),
        ({"dp_mode": "FSDP=2"}, 2),
        ({"dp_mode": "FSDP=1"}, 16),
        ({"dp_mode": "FSDP=True"}, 16),
        ({"dp_mode": "HSDP", "shard": "4"}, 4),
        ({"dp_mode": "FSDP=1 x DP=16", "zero": "0"}, 1),
        ({"dp_mode": "FSDP=1xDP=16", "zero": ""}, 1),
        ({"shard": "1", "zero": "0"}, 1),
        ({"shard": "2"}, 2),
        ({}, 16),
    ],
)
def test_shards_within_groups_of_ranks(told, shard):
    found = read_row(ROW | WIDE | {"zero": "3", "mbs": "2"} | told).configuration
    assert found.setting.shards == shard
    if shard > 1:
        assert (found.mesh.dp_shard, found.mesh.dp_replicate) == (shard, 16 // shard)
    else:
        assert found.zero == 0 and found.mesh.dp_replicate == 1


def test_what_is_not_stated():
    found = read_row(ROW | {"recompute": "", "heads": "", "sp": "", "zero": ""})
    assert found.assumed == ("recompute", "heads")
    assert found.architecture.heads == 48  # 128 wide, divides among 8 ranks
    assert found.configuration.boundaries == ("R", "S(1)")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_experts": "8"}, "topk not stated"),
        ({"ep": "2", "dp": "2", "n_gpus": "32", "n_nodes": "4"}, "ep without experts"),
        ({"cp": "3"}, "tp x cp x pp x dp is not the number of GPUs"),
        ({"precision": "FP8"}, "8-bit"),
        ({"gpu": "TPU v4"}, "no device file for GPU TPU v4"),
        ({"vocab": ""}, "vocab not stated"),
        ({"gbs": "33"}, "does not divide into micro-batches"),
        ({"dp": "2"}, "not the number of GPUs"),
        ({"mbs": "two"}, "mbs is 'two'"),
        ({"heads": "7"}, "does not divide into heads"),
        ({"recompute": "some of it"}, "recomputation"),
        ({"dp_mode": "HSDP", "zero": "3"}, "that HSDP shards over not stated"),
        ({"dp_mode": "FSDP=8 x DP=3", "zero": "3", **WIDE}, "FSDP=8 x DP=3 of 16 data-parallel"),
        ({"dp_mode": "FSDP=8 x DP=4", "zero": "3", **WIDE}, "FSDP=8 x DP=4 of 16 data-parallel"),
        ({"dp_mode": "FSDP=8xDP=0", "zero": "3", **WIDE}, "FSDP=8 x DP=0 of 16 data-parallel"),
        ({"dp_mode": "FSDP=8.5 x DP=2", "zero": "3", **WIDE}, "FSDP=8.5 x DP=2 of 16"),
        ({"dp_mode": "FSDP=3", "zero": "3", **WIDE}, "sharding over 3 of 16"),
        ({"dp_mode": "FSDP=4 x DP=4", "shard": "8", "zero": "3", **WIDE}, "shard is 8, .* says 4"),
        ({"dp_mode": "HSDP (shard within node)", "shard": "4", "zero": "3", **WIDE}, "says 8"),
        ({"dp_mode": "FSDP=1 x DP=16", "zero": "3", **WIDE}, "ZeRO-3 with sharding over 1 of 16"),
        ({"dp_mode": "FSDP=16 x DP=1", "zero": "0", **WIDE}, "ZeRO-0 with sharding over 16 of"),
        ({"shard": "8", "zero": "0", **WIDE}, "ZeRO-0 with sharding over 8 of 16"),
        ({"shard": "32", "zero": "3", **WIDE}, "sharding over 32 of 16"),
        ({"kv_heads": "0"}, "64 heads do not divide among 0 kv_heads"),
        ({"kv_heads": "7"}, "64 heads do not divide among 7 kv_heads"),
        ({"zero": "4"}, "zero is '4'"),
        ({"mbs": "0"}, "mbs is '0'"),
        ({"gbs": "inf"}, "gbs is 'inf'"),
        ({"n_gpus": "16 GPUs"}, "n_gpus is '16 GPUs'"),
        ({"n_nodes": "0"}, "n_nodes is '0'"),
        ({"n_nodes": "two"}, "n_nodes is 'two'"),
        ({"gpu_mem_gb": "80GB"}, "gpu_mem_gb is '80GB'"),
        ({"params_b": "22B"}, "params_b is '22B'"),
        ({"schedule": "DualPipe"}, "DualPipe"),
        ({"schedule": "interleavd", "vp": "2"}, "schedule interleavd"),
        ({"vp": "0"}, "vp is '0'"),
        ({"schedule": "gpipe", "vp": "2"}, "gpipe has 1 chunk"),
        ({"schedule": "ZBV", "vp": "3", "recompute": "none"}, "has 2 chunks: one on the way"),
        ({"schedule": "zero-bubble", "zero": "2", "recompute": "none"}, "ZeRO-2 scatters"),
        ({"schedule": "zero-bubble", "recompute": "full"}, "a recomputed block would run again"),
        ({"schedule": "ZB-H1", "recompute": "none", "gbs": "28"}, "do not divide into 3 rounds"),
        ({"gpu_mem_gb": "nan"}, "gpu_mem_gb is 'nan'"),
        ({"gpu_mem_gb": "0.1"}, "no device file|and a100-80 has"),
        ({"gpu": "H100", "gpu_mem_gb": "8"}, "gpu_mem_gb is 8, and h100 has"),
        ({"n_nodes": "3"}, "n_nodes is '3', of 16 GPUs"),
        ({"": "surplus"}, "more cells than columns"),
    ],
)
def test_rows_that_cannot_be_expressed_say_why(change, reason):
    with pytest.raises(InexpressibleError, match=reason):
        read_row(ROW | change)


def test_the_network_of_a_node_is_taken_from_its_text():
    usual = read_row(ROW).configuration.cluster.links[-1]
    halved = read_row(ROW | {"interconnect": "NVLink; 800 Gbps per node inter-node"})
    same = read_row(ROW | {"interconnect": "8x200Gb HDR IB per node"})
    link = halved.configuration.cluster.links[-1]
    assert link.bytes_per_second == pytest.approx(usual.bytes_per_second / 2)
    assert same.configuration.cluster.links[-1] == usual


def test_interleaved_and_fsdp():
    chunked = read_row(ROW | {"vp": "3", "layers": "48"}).configuration
    assert (chunked.schedule, chunked.chunks) == ("interleaved", 3)
    alone = read_row(ROW | {"tp": "1", "pp": "1", "dp": "16", "dp_mode": "FSDP1", "zero": "3",
                            "precision": "bf16 amp", "mbs": "2"}).configuration  # fmt: skip
    assert (alone.zero, alone.precision, alone.mesh.dp) == (3, "bf16-reduce", 16)
    assert alone.practice.overlap_gathers


def test_what_stages_pass_on():
    """A part for each rank of tp, unless sequence parallelism has split the values before."""
    assert read_row(ROW).configuration.practice.split_sends
    assert not read_row(ROW | {"sp": "1"}).configuration.practice.split_sends
    deepspeed = ROW | {"dp_mode": "Megatron-DeepSpeed", "zero": "1"}
    kept = {"precision": "bf16 (fp32 grad accumulation, BF16 optimizer)"}
    practice = read_row(deepspeed | kept).configuration.practice
    assert practice.split_sends and practice.reduce_whole and not practice.block_seconds
    assert not read_row(deepspeed).configuration.practice.reduce_whole
    blocking = deepspeed | {"interconnect": "Omni-Path 4x100Gb per node"}
    assert read_row(blocking).configuration.practice.block_seconds > 1e-3


def test_trays_of_a_rack_are_no_nodes():
    rack = ROW | {"gpu": "GB200", "gpu_mem_gb": "", "n_gpus": "128", "n_nodes": "32", "dp": "8"}
    cluster = read_row(rack).configuration.cluster
    assert (cluster.nodes, cluster.ranks_per_node) == (2, 64)


def test_float16_where_there_is_no_bfloat16():
    old = ROW | {"gpu": "V100", "gpu_mem_gb": "32"}
    flops = read_row(old).configuration.cluster.device.flops
    assert flops["bfloat16"] == flops["float16"] > flops["float32"]
    flops = read_row(old | {"precision": "bf16"}).configuration.cluster.device.flops
    assert flops["bfloat16"] == flops["float32"]


GROK = ROW | {
    "model": "grok", "layers": "64", "heads": "48", "kv_heads": "8", "ffn": "32768",
    "vocab": "131072", "n_experts": "8", "topk": "2", "gpu": "H100", "n_gpus": "64",
    "n_nodes": "8", "tp": "4", "sp": "1", "pp": "1", "dp": "16", "ep": "8", "mbs": "1",
    "zero": "1", "dp_mode": "DDP dist-opt", "precision": "bf16", "recompute": "none",
    "notes": "capacity factor 1.0 (yaml)",
}  # fmt: skip


def test_experts_are_split_over_replicas_and_as_all_else_over_tp():
    found = read_row(GROK)
    assert found.configuration.mesh == Mesh(1, 16, 4, 1, 8)
    assert (found.architecture.experts, found.architecture.topk) == (8, 2)
    assert found.architecture.gated
    assert found.architecture.parameters(64) == pytest.approx(314e9, rel=0.03)
    assert read_row(GROK | {"etp": "4"}) == found
    for change, reason in (
        ({"etp": "1"}, "experts over ep and tp ranks together"),
        ({"ep": "32"}, "ep does not divide dp x cp"),
    ):
        with pytest.raises(InexpressibleError, match=reason):
            read_row(GROK | change)


def test_routers_of_benchmarks_are_even_and_tp_exchanges_parts():
    found = read_row(GROK).configuration
    assert found.cluster.device.even_experts and found.exchanges_parts
    assert not read_row(GROK | {"notes": ""}).configuration.cluster.device.even_experts
    assert not read_row(GROK | {"sp": "0"}).configuration.exchanges_parts
    assert not read_row(ROW).configuration.cluster.device.even_experts


def test_models_that_columns_do_not_describe():
    """Heads wider than the hidden size, and a model of the zoo where the columns fit it."""
    row = GROK | {"model": "Qwen3-30B-A3B", "hidden": "2048", "heads": "32", "kv_heads": "4",
                  "ffn": "768", "n_experts": "128", "topk": "8", "layers": "48",
                  "vocab": "151936", "params_b": "30.5", "tp": "1", "dp": "64",
                  "gbs": "64"}  # fmt: skip
    found = read_row(row)
    assert found.zoo == "" and found.architecture.head == 128
    assert found.architecture.parameters(48) == pytest.approx(30.5e9, rel=0.01)
    deepseek = row | {"model": "DeepSeekV3 (w/o MTP)", "layers": "61", "hidden": "7168"}
    assert read_row(deepseek).zoo == "deepseek-v3"
    assert read_row(deepseek).architecture is None
    assert read_row(deepseek | {"layers": "8", "heads": "56"}).zoo == ""
