"""Bytes of optimizer states by shape, against counts by hand and against what libraries make."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.optimizer import OPTIMIZERS, largest_part, part_of, state_bytes

SHAPE = st.lists(st.integers(1, 300), min_size=0, max_size=3).map(tuple)


def whole(name, shape, shards=1, each=4):
    return state_bytes(name, (shape,), prod(shape), shards, each)


def test_adafactor_keeps_means_of_rows_and_columns():
    assert whole("adafactor", (100, 30)) == (100 + 30) * 4
    assert whole("adafactor", (100, 30), each=2) == (100 + 30) * 2
    assert whole("adafactor", (8, 100, 30)) == 8 * (100 + 30) * 4
    assert whole("adafactor", (30,)) == 30 * 4


def test_a_shard_of_rows_has_the_means_of_all_columns():
    assert whole("adafactor", (100, 30), shards=8) == (13 + 30) * 4
    assert whole("adafactor", (8, 100, 30), shards=4) == 2 * (100 + 30) * 4
    assert whole("adafactor", (30,), shards=4) == 8 * 4


def test_eight_bit_states_are_a_byte_an_element_and_scales():
    both = 2 * (4096 + 4 * 16 + 1024)
    assert whole("adamw-8bit", (64, 64)) == both
    # Few elements, or no whole blocks: as AdamW's own.
    assert whole("adamw-8bit", (64, 63)) == whole("adamw", (64, 63)) == 2 * 64 * 63 * 4
    assert whole("adamw-8bit", (65, 64)) == 2 * 65 * 64 * 4
    # So a part can take more than the whole.
    assert whole("adamw-8bit", (64, 64), shards=2) == 2 * 2048 * 4 > both


def made(optimizer, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    found = optimizer([parameter])
    with torch.compiler.set_stance("force_eager"):
        found.step()
    del found.state[parameter]["step"]
    return found.state[parameter].values()


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 5, 3), (1, 9)])
def test_adafactor_has_the_states_of_torch(shape):
    states = made(torch.optim.Adafactor, shape)
    assert sum(s.nbytes for s in states) == whole("adafactor", shape)


@pytest.mark.parametrize("shape", [(64, 64), (64, 63), (65, 64), (16384,), (4, 32, 48)])
def test_eight_bit_adamw_has_the_states_of_torchao(shape):
    torchao = pytest.importorskip("torchao.optim")
    states = made(torchao.AdamW8bit, shape)
    parts = [
        getattr(s, name)
        for s in states
        for name in getattr(s, "tensor_attrs", ["data"])  # codes, scales, table
    ]
    assert sum(p.nbytes for p in parts) == whole("adamw-8bit", shape)


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(shapes=st.lists(SHAPE, min_size=1, max_size=4).map(tuple), shards=st.integers(1, 9))
def test_without_shapes_it_is_a_lower_bound(name, shapes, shards):
    elements = sum(prod(s) for s in shapes)
    exact = state_bytes(name, shapes, elements, shards, 4)
    assert state_bytes(name, (), elements, shards, 4) <= exact
    # Of the parameters that tensor parallelism leaves too: fewer elements bound no more.
    assert state_bytes(name, (), -(-elements // 2), shards, 4) <= exact


@given(SHAPE, st.integers(1, 9))
def test_the_largest_part_holds_its_share(shape, shards):
    assert largest_part((shape, ()), shards) == max(1, prod(part_of(shape, shards)))
    assert prod(part_of(shape, shards)) * shards >= prod(shape)
