"""Piece names are read back as they were written; other names are whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.piece_name import Piece, by_whole, parse_piece


@given(st.integers(0, 3), st.integers(0, 99), st.integers(1, 99))
def test_round_trip(dim: int, start: int, size: int) -> None:
    piece = Piece("h.0.attn.weight", dim, start, start + size)
    assert parse_piece(str(piece)) == piece


def test_text() -> None:
    assert str(Piece("attn.weight", 1, 0, 768)) == "attn.weight[:, 0:768]"
    assert parse_piece("attn.weight") is None
    assert parse_piece("attn.weight[0]") is None


def test_by_whole() -> None:
    names = ["w[8:12]", "b", "w[0:8]", "v[:, 0:2]"]
    assert by_whole(names) == {
        "w": [Piece("w", 0, 0, 8), Piece("w", 0, 8, 12)],
        "v": [Piece("v", 1, 0, 2)],
    }
