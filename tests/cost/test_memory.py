"""The memory table, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.block_cost import BlockCost, Tied
from autopar.cluster import Cluster, Device, Link
from autopar.cost.fullest_moment import StageMoments, stage_memory
from autopar.cost.memory import memory_limit
from autopar.cost.setting import Practice, Setting
from autopar.mesh import Mesh

DEVICE = Device("d", 10**9, 1e9, {"float32": 1e12}, 1.0, 1.0, 0.0, 10**6)
MESHES = {(pp, dp): Mesh(pp, dp, 1) for pp in (1, 2, 4) for dp in (1, 4)}
BLOCK = BlockCost(
    "a",
    "k",
    1.0,
    2.0,
    0.0,
    0.0,
    1.0,
    1000,
    1000,
    500,
    50,
    30,
    20,
    last_parameter=1000,
)


def setting(pp=1, dp=4, zero=0, m=4, precision="fp32", optimizer="adamw", schedule="1f1b"):
    ranks = pp * dp
    cluster = Cluster("c", DEVICE, 1, ranks, (Link("l", ranks, 1e9, 1e-6),))
    return Setting(cluster, MESHES[pp, dp], 1, m, schedule, zero, precision, optimizer)


def three() -> list[BlockCost]:
    """Blocks of 1000, 2000 and 3000 parameters."""
    return [
        replace(BLOCK, name="abc"[i], parameters=1000 * (i + 1), trainable=1000 * (i + 1))
        for i in range(3)
    ]


@pytest.mark.parametrize(
    ("zero", "precision", "parameters", "gradients", "optimizer"),
    [
        (0, "fp32", 6000 * 4, 6000 * 4, 2 * 6000 * 4),
        (1, "fp32", 1500 * 4 + 6000 * 4, 6000 * 4, 2 * 1500 * 4),
        (2, "fp32", 1500 * 4 + 6000 * 4, 1500 * 4, 2 * 1500 * 4),
        # The last block is reduced, and has given its parameters back; those before it are there.
        (3, "fp32", 1500 * 4 + 2000 * 4, 1500 * 4, 2 * 1500 * 4),
        (0, "bf16-mixed", 6000 * (4 + 2), 6000 * 4, 2 * 6000 * 4),
        (3, "bf16-mixed", 1500 * 4 + 2000 * 2, 1500 * 4, 2 * 1500 * 4),
        (3, "bf16", 1500 * 2 + 2000 * 2, 1500 * 2, 2 * 1500 * 2),
    ],
)
def test_states_with_four_data_parallel_ranks(zero, precision, parameters, gradients, optimizer):
    found = stage_memory(three(), 0, 3, (), 0, setting(zero=zero, precision=precision))
    assert (found.parameters, found.gradients, found.optimizer) == (
        parameters,
        gradients,
        optimizer,
    )


@pytest.mark.parametrize(
    ("precision", "bytes_per_parameter"), [("fp32", 4), ("bf16-mixed", 4 + 2), ("bf16", 2)]
)
def test_one_data_parallel_rank_keeps_a_copy_only_of_another_type(precision, bytes_per_parameter):
    found = stage_memory(three(), 0, 3, (), 0, setting(dp=1, precision=precision))
    assert found.parameters == 6000 * bytes_per_parameter


def test_zero_1_with_one_microbatch_scatters_at_once():
    whole = stage_memory(three(), 0, 3, (), 0, setting(zero=1, m=2))
    once = stage_memory(three(), 0, 3, (), 0, setting(zero=1, m=1))
    assert whole.gradients == 6000 * 4
    # The fullest moment is before the last block's forward: its parameters are copied out of the
    # buffer that they came in, and that of the block before is still there. No gradients are.
    assert once.parameters == 1500 * 4 + 6000 * 4 + (2000 + 3000) * 4
    assert (once.gradients, once.activations, once.buffers) == (0, 2 * 500, 0)
    of = StageMoments.of(three(), 0, 3, {}, setting(zero=1, m=1))
    assert of.end().gradients == 1500 * 4 == whole.gradients / 4


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("sgd-momentum", 1), ("sgd", 0)])
def test_optimizers(optimizer, states):
    found = stage_memory(three(), 0, 3, (), 0, setting(optimizer=optimizer))
    assert found.optimizer == states * 6000 * 4


def test_states_by_shape_count_tied_parameters_once():
    """Two blocks with a matrix each; a tied one of 40 x 25 is in both."""
    tied = (Tied("t", 1000, 1000, ((40, 25),)),)
    shapes = ((40, 25), (40, 50))
    blocks = [
        replace(BLOCK, name=n, parameters=3000, trainable=3000, shapes=shapes, tied=tied)
        for n in "ab"
    ]
    found = stage_memory(blocks, 0, 2, (), 0, setting(optimizer="adafactor"))
    assert found.optimizer == (2 * (40 + 50) + (40 + 25)) * 4
    found = stage_memory(blocks, 0, 2, (), 0, setting(optimizer="adafactor", zero=3))
    assert found.optimizer == (2 * (10 + 50) + (10 + 25)) * 4


def test_an_update_in_turn_works_with_the_largest_parameter():
    """Once gradients are reduced in place (dp 1) nothing else is there but the states."""
    small = replace(BLOCK, saved_bytes=0, input_bytes=0, transient_bytes=0, boundary_bytes=0)
    blocks = [replace(small, name=n, shapes=((20, 25), (10, 50))) for n in "ab"]
    at_end = stage_memory(blocks, 0, 2, (), 0, setting(dp=1, m=1, optimizer="adafactor"))
    states = 2 * (20 + 25 + 10 + 50) * 4
    assert at_end.total == 2 * 1000 * (4 + 4) + states + 500 * 4


def test_only_trainable_parameters_have_gradients_and_states():
    blocks = [replace(b, trainable=0) for b in three()]
    found = stage_memory(blocks, 0, 3, (), 0, setting())
    assert found.gradients == found.optimizer == 0 and found.parameters == 6000 * 4


def test_activations_follow_the_schedule():
    four = [replace(BLOCK, name=str(i)) for i in range(4)]
    for stage in range(4):
        one = stage_memory(four, stage, stage + 1, (), stage, setting(pp=4, m=8))
        kept = 500 + (20 if stage < 3 else 0) + (20 if stage else 0)
        # At the end of a backward: what it read is gone.
        assert one.activations == (4 - stage) * kept - 500
        # GPipe: the second backward, with all gradients, has one micro-batch less than the first.
        all_at_once = setting(pp=4, m=8, schedule="gpipe")
        found = stage_memory(four, stage, stage + 1, (), stage, all_at_once)
        assert found.activations == 7 * kept - 500


def test_a_stage_keeps_its_input_once():
    four = [replace(BLOCK, name=str(i), saved_input_bytes=20) for i in range(4)]
    found = stage_memory(four, 1, 2, (), 1, setting(pp=4, m=8))
    assert found.activations == 3 * (500 + 20) - 500


def test_recomputation_keeps_inputs_and_rebuilds_one_block_at_a_time():
    small = [replace(BLOCK, parameters=0, trainable=0)] * 2
    blocks = [replace(small[0], name="a"), replace(small[1], name="b", saved_bytes=900)]
    first = [replace(blocks[1], name="a"), replace(blocks[0], name="b")]

    def activations(blocks, again, m=4):
        return stage_memory(blocks, 0, 2, again, 0, setting(dp=1, m=m)).activations

    assert activations(blocks, ()) == 1400
    # A bound: as if the block behind a rebuilt one, of another kind, were recomputed too.
    assert activations(blocks, {"a"}) == (50 + 900) - 50 + 500
    assert activations(blocks, {"a", "b"}) == 50 + 50 + 900
    # When the large one is rebuilt the last has given back even its input.
    assert activations(first, {"a", "b"}) == 50 + 900
    keeps = [replace(b, saved_input_bytes=50) for b in blocks]
    assert activations(keeps, {"a", "b"}) == 50 + 900


def test_only_the_second_backward_has_all_gradients():
    four = [replace(BLOCK, name=str(i), saved_bytes=10**5) for i in range(4)]
    few = setting(pp=2, dp=1, m=2, optimizer="sgd")
    found = stage_memory(four, 0, 2, (), 0, few)
    # Two micro-batches and no gradient, where one and all gradients are less.
    assert (found.gradients, found.activations) == (0, 2 * (2 * 10**5 + 20))
    light = [replace(b, saved_bytes=500) for b in four]
    found = stage_memory(light, 0, 2, (), 0, few)
    assert (found.gradients, found.activations) == (2 * 4000, 500 + 20)


def test_gradients_in_the_compute_type_wait_for_the_end_of_the_backward():
    blocks = [replace(BLOCK, name=str(i), saved_bytes=100) for i in range(3)]
    found = stage_memory(blocks, 0, 3, (), 0, setting(dp=1, precision="bf16-mixed"))
    # At the end of the first block there are those of all three.
    assert found.buffers + found.activations == 3 * 1000 * 2
    same = stage_memory(blocks, 0, 3, (), 0, setting(dp=1, precision="bf16", optimizer="sgd"))
    assert same.buffers + same.activations == 3 * 100 + 1000 * 2 - 100


def test_buffers_hold_transients_bucket_and_gradients_under_way():
    four = [replace(BLOCK, name=str(i), parameters=0, trainable=0) for i in range(4)]
    middle = stage_memory(four, 1, 3, (), 1, setting(pp=4, m=8))
    # The gradient that was sent, and that of the result, which the last block works with itself.
    assert middle.buffers == 30 + 20
    assert stage_memory(four, 0, 4, (), 0, setting(m=8)).buffers == 30
    heavy = [replace(BLOCK, name="h", saved_bytes=10**6)]
    heavy = [replace(BLOCK, name="h", saved_bytes=100)]
    # Fresh gradients, their copy in the reduction and its shard; accumulated ones are among the
    # gradients.
    assert stage_memory(heavy, 0, 1, (), 0, setting(zero=2)).buffers == 1000 * (4 + 4) + 250 * 4
    assert stage_memory(heavy, 0, 1, (), 0, setting(zero=1)).buffers == 1000 * 4
    read = [replace(b, shared_bytes=7, shared_key="mask", transient_bytes=37) for b in four]
    shared = [replace(b, shared_kept_bytes=7) for b in read]
    assert stage_memory(shared, 1, 3, (), 1, setting(pp=4, m=8)).buffers == 30 + 20 + 3 * 7
    # Two blocks that read other values hold both; what only forwards read is not kept, unless a
    # block is recomputed.
    own = [replace(b, shared_key=b.name) for b in shared]
    assert stage_memory(own, 1, 3, (), 1, setting(pp=4, m=8)).buffers == 30 + 20 + 3 * 14
    assert stage_memory(read, 1, 3, (), 1, setting(pp=4, m=8)).buffers == 30 + 20
    again = [stage_memory(b, 1, 3, ("1",), 1, setting(pp=4, m=8)) for b in (read, shared)]
    assert again[0] == again[1]


def test_a_block_works_while_the_one_after_it_is_reduced():
    big = replace(BLOCK, saved_bytes=10**6)
    two = [replace(big, name="a"), replace(big, name="b", saved_bytes=1500)]
    found = stage_memory(two, 0, 2, (), 0, setting(zero=2))
    # In the last block, which ends with its gradients and their copy; or the one before it.
    assert found.total - found.parameters - found.optimizer - found.gradients == max(
        10**6 + 1000 * (4 + 4) + 250 * 4, 10**6 + 4000 + 30
    )
    again = stage_memory(two, 0, 2, {"a", "b"}, 0, setting(zero=2))
    assert (again.activations, again.buffers) == (50 + 10**6, 4000 + 30)


def test_the_forward_keeps_the_buffer_that_parameters_were_gathered_in():
    wide = [replace(BLOCK, name="w", saved_bytes=10**5, transient_bytes=0)]
    backward = stage_memory(wide, 0, 1, (), 0, setting(zero=3, m=2)).parameters
    forward = [replace(wide[0], forward_transient_bytes=1)]
    assert stage_memory(forward, 0, 1, (), 0, setting(zero=3, m=2)).parameters == backward
    assert backward == (250 + 2 * 1000) * 4


def test_gradients_take_the_place_of_activations_when_there_is_one_microbatch():
    keeps = replace(BLOCK, saved_bytes=10**5)
    one = stage_memory([keeps], 0, 1, (), 0, setting(dp=1, m=1))
    two = stage_memory([keeps], 0, 1, (), 0, setting(dp=1, m=2))
    assert (one.gradients, two.gradients) == (0, 4000)
    # At the end of the step all gradients are there, and the optimizer's scratch.
    small = [replace(BLOCK, saved_bytes=4000, parameters=10**6, trainable=10**6)]
    end = stage_memory(small, 0, 1, (), 0, setting(dp=1, m=1))
    assert end.total == 10**6 * 4 * 5


def test_the_optimizer_step_needs_scratch_when_activations_are_gone():
    small = [replace(BLOCK, parameters=10**6, trainable=10**6, saved_bytes=1) for _ in range(1)]
    many = [replace(small[0], name=str(i)) for i in range(8)]
    found = stage_memory(many, 0, 8, (), 0, setting(dp=1))
    assert found.activations + found.buffers == 8 * 10**6 * 4
    assert found.total == sum(
        (found.parameters, found.gradients, found.optimizer, found.activations, found.buffers)
    )


def test_zero_0_may_copy_all_gradients_to_sum_them():
    blocks = [replace(BLOCK, name=str(i), saved_bytes=1) for i in range(8)]
    found = stage_memory(blocks, 0, 8, (), 0, setting(optimizer="sgd"))
    assert found.activations + found.buffers == 8 * 1000 * 4
    alone = stage_memory(blocks, 0, 8, (), 0, setting(dp=1, optimizer="sgd"))
    # Without: the gradients that a block has just made, in the place of the byte that it saved.
    assert (alone.activations, alone.buffers) == (7, 1000 * 4)


def test_a_single_stage_has_one_microbatch_in_flight_whatever_the_schedule():
    for schedule in ("gpipe", "1f1b"):
        alone = setting(schedule=schedule, dp=1, optimizer="sgd")
        found = stage_memory([BLOCK] * 3, 0, 3, (), 0, alone)
        assert found.activations == 2 * 500  # the third is through


def test_tied_parameters_count_once_per_stage():
    blocks = three()
    for i in (0, 2):
        blocks[i] = replace(blocks[i], tied=(Tied("table", 400, 400),))
    together = stage_memory(blocks, 0, 3, (), 0, setting(zero=1))
    assert together.gradients == (6000 - 400) * 4
    assert together.parameters == (1500 - 100) * 4 + (6000 - 400) * 4
    apart = [stage_memory(blocks, i, i + 1, (), i, setting(pp=4, zero=1)) for i in range(3)]
    assert [a.gradients for a in apart] == [4000, 8000, 12000]
    root = stage_memory(blocks, 0, 3, (), 0, setting(zero=3))
    # Blocks gather 600, 2000 and 2600 of their own, and the last one is reduced; the tied 400 stay
    # gathered.
    assert root.parameters == (1500 - 100) * 4 + (2000 + 400) * 4


def test_two_groups_of_tied_parameters():
    blocks = three()
    first, second = Tied("table", 400, 400), Tied("projection", 100, 100)
    blocks[0] = replace(blocks[0], tied=(first,))
    blocks[1] = replace(blocks[1], tied=(second,))
    blocks[2] = replace(blocks[2], tied=(second, first))
    together = stage_memory(blocks, 0, 3, (), 0, setting(zero=1))
    assert together.gradients == (6000 - 500) * 4
    part = stage_memory(blocks, 1, 3, (), 0, setting(zero=1))
    assert part.gradients == (5000 - 100) * 4
    root = stage_memory(blocks, 0, 3, (), 0, setting(zero=3))
    # Blocks gather 600, 1900 and 2500 of their own, and the last one is reduced; the tied 500 stay
    # gathered.
    assert root.parameters == (1500 - 125) * 4 + (1900 + 500) * 4
    # Behind the cut the first group has one holder, which gathers it with the rest.
    rest = stage_memory(blocks, 1, 3, (), 0, setting(zero=3))
    assert rest.parameters == (1250 - 25) * 4 + (1900 + 100) * 4


def held_under(practice: Practice, zero: int, dp: int = 4):
    mixed = replace(setting(dp=dp, zero=zero, m=1, precision="bf16-mixed"), practice=practice)
    return stage_memory([replace(b, saved_bytes=90_000) for b in three()], 0, 3, (), 0, mixed)


def test_a_gradient_buffer_is_there_from_the_start():
    # The fullest moment is the last block's backward: no gradients yet, but in a buffer.
    assert held_under(Practice(), 0).gradients == held_under(Practice(), 1).gradients == 0
    for way in ("each", "end"):
        for zero in (0, 1):
            assert held_under(Practice(gradient_buffer=way), zero).gradients == 6000 * 4


def test_gradient_buckets_are_a_copy_in_the_compute_type():
    plain, copied = (Practice(gradient_buffer="end", gradient_buckets=b) for b in (False, True))
    assert held_under(copied, 0).total == held_under(plain, 0).total + 6000 * 2
    assert held_under(copied, 0, dp=1).total == held_under(plain, 0, dp=1).total


def test_frozen_tied_parameters_have_no_gradient_to_count_once():
    blocks = three()
    for i in (0, 2):
        frozen = Tied("table", 400, 0)
        blocks[i] = replace(blocks[i], tied=(frozen,), trainable=blocks[i].parameters - 400)
    found = stage_memory(blocks, 0, 3, (), 0, setting(zero=1))
    assert found.gradients == (6000 - 800) * 4
    assert found.optimizer == 2 * (1500 - 200) * 4
    assert found.parameters == (1500 - 100) * 4 + (6000 - 400) * 4


def test_the_limit_leaves_context_and_margin():
    assert memory_limit(DEVICE, margin=0.1) == 900_000_000 - 1_000_000


@given(zero=st.integers(0, 2), m=st.integers(1, 8), n=st.integers(0, 10**6))
def test_more_zero_never_takes_more_states(zero, m, n):
    block = [replace(BLOCK, parameters=n, trainable=n, last_parameter=n)]
    one = stage_memory(block, 0, 1, (), 0, setting(zero=zero, m=m))
    two = stage_memory(block, 0, 1, (), 0, setting(zero=zero + 1, m=m))
    assert two.gradients <= one.gradients and two.optimizer <= one.optimizer
    if zero == 1:
        assert two.parameters <= one.parameters
