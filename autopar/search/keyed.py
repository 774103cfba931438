"""Objects that are equal, as keys of caches, where what they are told by is."""

from __future__ import annotations


class Keyed:
    """Equal to another one of its class with an equal `key`; hashed once."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: tuple[object, ...]) -> None:
        self._key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._key == other._key
