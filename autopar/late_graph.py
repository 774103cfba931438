"""Graph modules whose Python code is written when it is first needed.

Passes copy and change hundreds of graphs, most of which nobody ever runs; writing the code of a
graph takes longer than changing it.
"""

from __future__ import annotations

from typing import Any

from torch import fx


class LateGraphModule(fx.GraphModule):
    """A `GraphModule` that compiles its graph at the first call after a change."""

    def recompile(self) -> Any:
        """Note that the graph has changed."""
        type(self).forward = LateGraphModule._first_call

    def write(self) -> None:
        """Compile the graph unless its code is up to date."""
        if type(self).forward is LateGraphModule._first_call:
            super().recompile()

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        self.write()
        return type(self).forward(self, *args, **kwargs)

    @property
    def code(self) -> str:
        self.write()
        return super().code

    def __str__(self) -> str:
        self.write()
        return super().__str__()

    def __reduce__(self) -> Any:
        # Every instance has a class of its own, which can't be found by its name.
        return _late, (fx.GraphModule(self, self.graph),)


def _late(module: fx.GraphModule) -> LateGraphModule:
    return LateGraphModule(module, module.graph)
