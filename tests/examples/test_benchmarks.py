"""What the benchmarks rest on: sections of RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_sections_are_replaced_and_others_kept(tmp_path: Path) -> None:
    from results import write_section

    path = tmp_path / "RESULTS.md"
    write_section("One", ["first", "", "| a |"], path)
    write_section("Two", ["second"], path)
    write_section("One", ["anew"], path)
    assert path.read_text() == "# Benchmarks\n\n## One\n\nanew\n\n## Two\n\nsecond\n"


def test_ep_is_compared_with_what_experts_and_replicas_allow() -> None:
    from autopar.mesh import Mesh
    from moe_plans import other_degrees

    assert other_degrees(Mesh(2, 16, 1, 1, 8), experts=8) == [1, 4]
    assert other_degrees(Mesh(2, 16, 1, 1, 8), experts=64) == [1, 4, 16]
    assert other_degrees(Mesh(1, 4, 2, 2, 8), experts=64) == [1, 4]
    assert other_degrees(Mesh(1, 4), experts=8) == [2]


def test_a_token_is_dispatched_once_to_a_rank(tmp_path: Path) -> None:
    from moe_layer import dispatch_seconds, layer_rows

    one, two, all_of = (dispatch_seconds(4096, 8, k, 4096) for k in (1, 2, 8))
    assert one < two < all_of
    # All of its eight experts: once to each of the seven other ranks.
    assert all_of == pytest.approx(8 * one, rel=0.05)
    assert layer_rows(tmp_path) == []
