"""What two modules must have in common, and what a module holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.passes.capture_layer import Layer, global_hooks, is_plain, structure
from autopar.passes.capture_state import Digester


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.up: Any = nn.Linear(4, 4)
        self.down: Any = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))


def tie(block: Block) -> None:
    block.up.weight = block.down.weight


def same_part(block: Block) -> None:
    block.up = block.down


def wider(block: Block) -> None:
    block.up = nn.Linear(4, 5)


def no_bias(block: Block) -> None:
    block.up = nn.Linear(4, 4, bias=False)


def half(block: Block) -> None:
    block.up.half()


def frozen(block: Block) -> None:
    block.up.requires_grad_(False)


def renamed(block: Block) -> None:
    block.other = block.up
    del block.up


def temporary(block: Block) -> None:
    block.register_buffer("scale", torch.ones(4), persistent=False)


def test_values_and_attributes_are_no_structure() -> None:
    assert structure(Block(1)) == structure(Block(2))


@pytest.mark.parametrize(
    "change", [tie, same_part, wider, no_bias, half, frozen, renamed, temporary]
)
def test_structures_that_differ(change: Callable[[Block], None]) -> None:
    block = Block()
    change(block)
    assert structure(block) != structure(Block())


def test_own_tensors_by_place() -> None:
    block = Block()
    own = Layer(block).own()
    assert own["up.weight"] is block.up.weight and own[".scale"] is block.scale
    assert set(own) == {"up.weight", "up.bias", "down.weight", "down.bias", ".scale"}


def test_an_attribute_is_compared_by_what_it_means_in_the_layer() -> None:
    one, other = Layer(Block(1)), Layer(Block(2))

    def read(layer: Layer, place: str, name: str) -> Any:
        places = {**layer.places, **{id(t): name for name, t in layer.own().items()}}
        return layer.attribute(place, name, Digester(places))

    for same in ((".", "up"), (".", "missing"), ("up", "weight"), ("up", "in_features")):
        assert read(one, *same) == read(other, *same)
    assert read(one, ".", "index") != read(other, ".", "index")
    assert read(one, ".", "missing") != read(one, ".", "index")


def test_hooks_and_forwards_of_its_own() -> None:
    block = Block()
    assert not Layer(block).hooked() and not global_hooks() and is_plain(block)
    handle = block.up.register_forward_pre_hook(lambda *_: None)
    assert Layer(block).hooked()
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert global_hooks()
    finally:
        handle.remove()
    other = copy.deepcopy(block)
    other.forward = lambda x: x
    assert not is_plain(other)
