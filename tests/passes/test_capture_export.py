"""Which sizes are tried, and when a trace without replays is made after one with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from autopar.passes import capture_export
from autopar.passes.capture_export import Exported, export
from autopar.passes.capture_repeats import Disagreement, Repeats
from tests.passes.repeated_layers import Stack

X = torch.ones(4, 8, device="meta")
BATCH = {"x": {0: Dim("batch", min=2)}}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """(symbolic, with replays) of each export."""
    found: list[tuple[bool, bool]] = []
    plain = capture_export._export

    def noted(twin: Any, leaves: Any, dims: Any, repeats: Repeats | None) -> Exported:
        found.append((dims is not None, repeats is not None))
        return plain(twin, leaves, dims, repeats)

    monkeypatch.setattr(capture_export, "_export", noted)
    return found


def meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def test_the_first_sizes_that_work_are_taken(tried: list[tuple[bool, bool]]) -> None:
    found = export(meta(Stack()), [X], [BATCH, None])
    assert tried == [(True, True)] and found.replayed > 0
    assert not export(meta(Stack()), [X], [BATCH, None], repeats=False).replayed


class FixedBatch(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(x)
        return x.view(4, 8).sum()


def test_sizes_that_a_replayed_trace_refuses_are_not_tried_in_full(
    tried: list[tuple[bool, bool]],
) -> None:
    found = export(meta(FixedBatch()), [X], [BATCH, None])
    assert tried == [(True, True), (False, True)] and found.replayed > 0


class FailsLate(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(x)
        return x.sum() if x.sum() > 0 else x.mean()


def test_another_error_after_replays_is_that_of_a_full_trace(
    tried: list[tuple[bool, bool]],
) -> None:
    with pytest.raises(Exception, match="[Dd]ata-dependent|meta"):
        export(meta(FailsLate()), [X], [None])
    assert tried == [(False, True), (False, False)]


@pytest.mark.parametrize("doubt", ["escape", "disagreement"])
def test_doubt_ends_in_a_full_trace(
    doubt: str, tried: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: Any) -> Any:
        raise Disagreement("for the test")

    if doubt == "escape":
        monkeypatch.setattr(Repeats, "_escape", lambda *_: True)
    else:
        monkeypatch.setattr(Repeats, "_called", differs)
    found = export(meta(Stack()), [X], [None])
    assert tried == [(False, True), (False, False)] and not found.replayed
