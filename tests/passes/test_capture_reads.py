"""Which attributes a forward reads, however it reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.passes.capture_reads import ALL, Reads, can_record


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.index = 3
        self.inner = nn.Linear(2, 2)

    @property
    def double(self) -> int:
        return self.index * 2


def read(what: Callable[[Part], Any], part: Part | None = None) -> set[tuple[str, str]]:
    part = part or Part()
    places = {id(part.__dict__): ".", id(part.inner.__dict__): "inner"}
    with Reads().recording(places) as found:
        what(part)
    return found


@pytest.mark.parametrize(
    "what",
    [lambda p: p.index, lambda p: getattr(p, "in" + "dex"), lambda p: p.double],
    ids=["attribute", "getattr", "property"],
)
def test_reads_of_an_attribute(what: Callable[[Part], Any]) -> None:
    assert (".", "index") in read(what)


def test_a_look_at_all_attributes() -> None:
    assert read(lambda p: vars(p)["index"]) == {(".", ALL)}
    assert read(lambda p: p.__dict__.get("index")) == {(".", ALL)}


def test_an_attribute_that_is_not_there_is_read_too() -> None:
    assert (".", "other") in read(lambda p: hasattr(p, "other"))


def test_parts_are_told_apart_and_others_are_left_alone() -> None:
    found = read(lambda p: (p.inner(torch.ones(2)), Part().index))
    assert ("inner", "weight") in found and (".", "inner") in found
    assert (".", "index") not in found and (".", ALL) not in found


def test_recordings_may_be_nested_and_leave_nothing_behind() -> None:
    part, reads = Part(), Reads()
    places = {id(part.__dict__): "."}
    with pytest.raises(ValueError, match="inside"), reads.recording(places) as outer:  # noqa: PT012
        with reads.recording(places) as inner:
            _ = part.index
        reads.note(part, "noted")
        raise ValueError("inside")
    assert inner == {(".", "index")} and outer == {(".", "index"), (".", "noted")}
    assert "__getattribute__" not in nn.Module.__dict__


def test_modules_with_reads_of_their_own() -> None:
    class Other(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    assert can_record(Part()) and not can_record(Other())
