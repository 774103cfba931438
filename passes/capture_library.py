"""Whether a model consists of code that is known to keep its state in its modules.

A layer is replayed instead of traced where its attributes, arguments and named globals show that
the result is the same (`capture_repeats`). Python offers ways to hand a layer state that no such
comparison sees: an object that another class wraps, a table of functions, the environment. In a
model of the libraries below, whose loops over layers do nothing of the kind, a layer can be
trusted; a class of somebody's own may do anything between two layers, so such a model is traced in
full.
"""

from __future__ import annotations

from torch import nn

LIBRARIES = frozenset({"torch", "transformers", "diffusers", "timm"})


def of_libraries(model: nn.Module) -> bool:
    """Every module's class, its forward, and what it inherits come from `LIBRARIES`, unpatched."""
    return all(_known(module) for module in model.modules())


def _known(module: nn.Module) -> bool:
    if "forward" in vars(module) or "__call__" in vars(module):
        return False
    classes = [c for c in type(module).__mro__ if issubclass(c, nn.Module)]
    forwards = [vars(c)["forward"] for c in classes if "forward" in vars(c)]
    # A method that was put into a library's class from outside says where it comes from.
    made_in = [getattr(made, "__module__", None) or "" for made in (*classes, *forwards)]
    return all(name.partition(".")[0] in LIBRARIES for name in made_in)
