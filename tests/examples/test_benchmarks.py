"""What the benchmarks rest on: the count of live bytes, and sections of RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_live_bytes_counts_storages_once_and_forgets_freed_ones() -> None:
    from memory import LiveBytes

    before = torch.zeros(1000)
    live = LiveBytes()
    live.add([before])
    with live:
        view = before[10:]
        other = torch.ones(500)
        assert live.bytes() == 6000
        del other
        assert live.bytes() == 4000
        view.untyped_storage().resize_(0)
        assert live.bytes() == 0
    assert live.peak == 6000


def test_live_bytes_sees_what_autograd_keeps() -> None:
    from memory import LiveBytes

    leaf = torch.ones(256, requires_grad=True)
    live = LiveBytes()
    live.add([leaf])
    with live:
        loss = leaf.exp().sin().sum()
        # leaf, the result of exp which sin keeps, and the scalar; the result of sin is gone.
        assert live.bytes() == 2 * 1024 + 4
        torch.autograd.backward(loss)
    assert leaf.grad is not None


def test_sections_are_replaced_and_others_kept(tmp_path: Path) -> None:
    from results import write_section

    path = tmp_path / "RESULTS.md"
    write_section("One", ["first", "", "| a |"], path)
    write_section("Two", ["second"], path)
    write_section("One", ["anew"], path)
    assert path.read_text() == "# Benchmarks\n\n## One\n\nanew\n\n## Two\n\nsecond\n"
