"""What a program leaves no choice about becomes a pin, and another wish of the user an error."""

from __future__ import annotations

import pytest
from torch import fx, nn

from autopar.errors import UsageError
from autopar.program import Program
from autopar.search.options import Pins
from autopar.workflow.forced_pins import forced_pins


def program(**reasons: str) -> Program:
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule(nn.Module(), graph)
    return Program("m", module, (), "loss", {"batch": "s0"}, {"batch": 4}, **reasons)  # type: ignore[arg-type]


def test_nothing_is_forced() -> None:
    pins = Pins(dp=2, microbatches=4)
    assert forced_pins(program(), pins, 8) == pins


def test_a_whole_batch_is_one_micro_batch_on_one_rank() -> None:
    made = program(batch_stays_whole="samples mix")
    assert forced_pins(made, Pins(), 8) == Pins(dp=1, microbatches=1)
    for pins in (Pins(dp=2), Pins(microbatches=2)):
        with pytest.raises(UsageError, match="samples mix"):
            forced_pins(made, pins, 8)


def test_one_micro_batch_may_be_spread_over_dp() -> None:
    made = program(one_micro_batch="a norm of the batch")
    assert forced_pins(made, Pins(dp=4), 8) == Pins(dp=4, microbatches=1)
    with pytest.raises(UsageError, match="microbatches=2, but a norm of the batch"):
        forced_pins(made, Pins(microbatches=2), 8)
