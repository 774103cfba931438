"""Many candidates at once take what the simulation of each alone takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import wavefronts
from autopar.cost.pipeline import (
    actions,
    interleaved_order,
    step_seconds,
    zero_bubble_order,
)
from autopar.cost.wavefronts import seconds_of_many
from autopar.interleaving import CHUNKED, DIVIDED, V_SHAPED, refused

CASES = st.tuples(
    st.sampled_from(["gpipe", "1f1b", *CHUNKED]),
    st.integers(2, 5),
    st.integers(1, 12),
    st.integers(2, 4),
).filter(lambda c: c[0] not in CHUNKED or not refused(c[1], c[2], c[0]))


@given(case=CASES, seed=st.integers(0, 999), largest=st.sampled_from([1, 4_000_000]))
def test_equals_one_simulation_after_another(case, seed, largest):
    schedule, stages, microbatches, chunks = case
    chunks = 2 if schedule in V_SHAPED else chunks if schedule in CHUNKED else 1
    draw = np.random.default_rng(seed)
    forward, backward, share = draw.uniform(0.1, 1.0, (3, stages * chunks, 3))
    weights = share * backward if schedule in DIVIDED else None
    later = [()] * 3 if weights is None else weights.T.tolist()
    expected = [
        step_seconds(list(f), list(b), microbatches, schedule, chunks, w)
        for f, b, w in zip(forward.T, backward.T, later, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wavefronts, "LARGEST_TABLE", largest)
        found = seconds_of_many(forward, backward, microbatches, schedule, chunks, weights)
    assert found.tolist() == expected


@given(case=CASES)
def test_the_order_as_arrays_is_that_of_the_actions(case):
    _, stages, microbatches, chunks = case
    for stage, order in enumerate(actions("interleaved", stages, microbatches, chunks)):
        chunk, microbatch, forward = interleaved_order(stage, stages, microbatches, chunks)
        assert chunk.tolist() == [a.chunk for a in order]
        assert microbatch.tolist() == [a.microbatch for a in order]
        assert forward.tolist() == [a.kind == "F" for a in order]
    for stage, order in enumerate(actions("zero-bubble", stages, microbatches, chunks)):
        chunk, microbatch, kind = zero_bubble_order(stage, stages, microbatches, chunks)
        assert chunk.tolist() == [a.chunk for a in order]
        assert microbatch.tolist() == [a.microbatch for a in order]
        assert kind.tolist() == ["FIW".index(a.kind) for a in order]
