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
