"""Each op takes values and gradients from placement to placement, on ranks and on fake tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.placement import Placement
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from tests.warm_ranks import run_on_ranks

ops = torch.ops.autopar
SHAPE = (4, 8, 12)

# op: placement before, placement after, arguments (n: ranks, g: group).
EDGES = {
    "copy": ("R", "R*", "g"),
    "all_reduce": ("P", "R", "g"),
    "all_reduce_both": ("P", "R*", "g"),
    "first_rank_only": ("R", "P", "g"),
    "first_rank_gradient": ("R*", "R", "g"),
    "all_gather": ("S({d})", "R*", "dng"),
    "all_gather_slice": ("S({d})", "R", "dng"),
    "reduce_scatter": ("P", "S({d})", "dng"),
    "slice": ("R", "S({d})", "dng"),
    "slice_pad": ("R*", "S({d})", "dng"),
    "pad": ("S({d})", "P", "dng"),
    "all_to_all": ("S({d})", "S({e})", "deng"),
}
CASES = [
    (name, dim, other)
    for name, (_, _, arguments) in EDGES.items()
    for dim in ((0, 1, 2) if "d" in arguments else (0,))
    for other in ((0, 1, 2) if "e" in arguments else (0,))
    if "e" not in arguments or dim != other
]


def call(name: str, x: torch.Tensor, dim: int, other: int, ranks: int, group: str) -> torch.Tensor:
    values = {"d": dim, "e": other, "n": ranks, "g": group}
    result: torch.Tensor = getattr(ops, name)(x, *(values[c] for c in EDGES[name][2]))
    return result


def piece(
    whole: torch.Tensor, placement: Placement, is_sum: bool, rank: int, ranks: int
) -> torch.Tensor:
    """What `rank` holds of `whole`; `is_sum`: a term, all of which sum to it."""
    if placement.is_shard:
        return whole.chunk(ranks, placement.dim)[rank]
    if not is_sum:
        return whole
    generator = torch.Generator().manual_seed(7)
    terms = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(ranks)]
    terms[-1] = whole - sum(terms[:-1])
    return terms[rank]


def check(got: torch.Tensor, whole: torch.Tensor, placement: Placement, is_sum: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if is_sum:
        got = got.clone()
        dist.all_reduce(got)
    expected = whole.chunk(ranks, placement.dim)[rank] if placement.is_shard else whole
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check_edges() -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    done = 0
    for name, dim, other in CASES:
        before, after = (Placement.parse(text.format(d=dim, e=other)) for text in EDGES[name][:2])
        torch.manual_seed(done)
        value, cotangent = torch.randn(2, *SHAPE, dtype=torch.float64).unbind()
        local = piece(value, before, before.kind == "P", rank, ranks)
        # Strided memory: transposed and back.
        local = local.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        result = call(name, local, dim, other, ranks, group)
        check(result.detach(), value, after, after.kind == "P")
        gradient = piece(cotangent, after, after.kind == "R*", rank, ranks)
        (back,) = torch.autograd.grad(result, local, gradient.mT.contiguous().mT)
        check(back, cotangent, before, before.kind == "R*")
        done += 1
    return done


def check_channels_last() -> bool:
    """Each op that moves data, of [1, heads, q, k] as relative position biases make it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    whole = torch.arange(256, dtype=torch.float64).view(1, 8, 8, 4).permute(0, 3, 1, 2)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        before, after = (Placement.parse(text.format(d=1, e=2)) for text in EDGES[name][:2])
        local = piece(whole, before, before.kind == "P", rank, ranks)
        local = local.contiguous(memory_format=torch.channels_last)
        check(call(name, local, 1, 2, ranks, group), whole, after, after.kind == "P")
    return True


def test_channels_last_values_move() -> None:
    assert all(run_on_ranks(check_channels_last, 2, timeout_seconds=90))


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients(ranks: int) -> None:
    assert run_on_ranks(check_edges, ranks, timeout_seconds=90) == [len(CASES)] * ranks


@pytest.mark.parametrize(("name", "dim", "other"), CASES)
def test_shapes_on_fake_tensors(name: str, dim: int, other: int) -> None:
    ranks = 4
    before, after = (Placement.parse(t.format(d=dim, e=other)) for t in EDGES[name][:2])
    with FakeTensorMode():
        x = torch.empty(before.local_shape(SHAPE, ranks), requires_grad=True)
        result = call(name, x, dim, other, ranks, "no such group")
        assert tuple(result.shape) == after.local_shape(SHAPE, ranks)
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_identities_copy_nothing() -> None:
    x = torch.randn(3)
    views = ops.copy(x, "g"), ops.first_rank_gradient(x, "g"), ops.send(x, 1), ops.recv(x, 0)
    assert {view.data_ptr() for view in views} == {x.data_ptr()}
    with torch.inference_mode():
        assert ops.copy(torch.ones(2), "g").sum() == 2


def test_ops_live_in_graphs() -> None:
    graph = torch.fx.symbolic_trace(lambda x: ops.send(ops.all_gather(x, 1, 4, "tp"), 1))
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets == [ops.all_gather, ops.send]
    assert graph(torch.empty(2, 3, device="meta")).shape == (2, 12)
