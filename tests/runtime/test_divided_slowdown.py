"""What dividing a backward costs: measured, and seen where it costs more."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from autopar.runtime import divided_slowdown
from autopar.runtime.divided_slowdown import measured_division

CPU = torch.device("cpu")


def test_is_a_part_of_the_backward() -> None:
    assert 0 <= measured_division(CPU) < 3


def test_more_to_do_between_the_halves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = divided_slowdown.input_backward

    def slower(*args: Any) -> Any:
        time.sleep(0.05)
        return usual(*args)

    monkeypatch.setattr(divided_slowdown, "input_backward", slower)
    assert measured_division(CPU) > 0.5
