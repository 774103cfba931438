"""Numbers of a layer's load, by hand."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.experts.load import LayerLoad, checked_load, read_layers, read_load


def test_numbers_of_a_skewed_layer() -> None:
    layer = LayerLoad((6, 0, 1, 1), 2)
    assert layer.mean == 2
    assert layer.busiest_expert == 0 and layer.expert_imbalance == 3
    assert layer.of_ranks == (6, 2) and layer.rank_imbalance == 1.5
    assert layer.idle == (1,)
    expected = -(0.75 * log(0.75) + 0.25 * log(0.125)) / log(4)
    assert layer.entropy == pytest.approx(expected)


def test_ranks_with_copies_and_empty_places() -> None:
    """Expert 0 has three copies, ranks 4, 1 and 3 experts."""
    layer = LayerLoad((30, 4, 6, 2), 3, order=(0, 1, 2, 3, 0, -1, -1, -1, 0, -1, -1, -1))
    assert layer.of_ranks == (22, 10, 10)
    assert layer.rank_imbalance == 22 * 3 / 42
    unequal = LayerLoad((30, 4, 6, 2), 2, order=(0, -1, -1, 1, 2, 3))
    assert unequal.of_ranks == (30, 12)


def test_even_and_empty_and_single() -> None:
    assert LayerLoad((3, 3, 3)).entropy == pytest.approx(1)
    assert LayerLoad((9, 0, 0)).entropy == 0
    empty = LayerLoad((0, 0), 2)
    assert (empty.entropy, empty.expert_imbalance, empty.rank_imbalance) == (1, 1, 1)
    assert LayerLoad((5,)).entropy == 1


def test_one_length_when_it_is_known() -> None:
    assert checked_load({"a": [1, 2]}, 2) == {"a": (1, 2)}
    with pytest.raises(UsageError, match="has 2 numbers, there are 3 experts"):
        checked_load({"a": [1, 2]}, 3)


WRONG = {
    '{"a": [1, 2]}': "has 2 numbers, there are 3 experts",
    '{"a": [1, -2, 3]}': "expert 1 of layer 'a' is -2",
    '{"a": [1, NaN, 3]}': "expert 1 of layer 'a' is nan",
    "[1, 2, 3]": "a mapping of layers",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_file_names_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"load.json: .*{WRONG[text]}") as caught:
        read_load(path, 3)
    assert caught.value.next_step
    path.write_text('{"a": [1, 2, 3]}')
    assert read_load(path, 3) == {"a": (1, 2, 3)}


def test_a_folder_is_no_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="can't be read"):
        read_layers(tmp_path)
