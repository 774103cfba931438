"""What an optimizer keeps, moves and works with, by the shapes of the parameters it updates.

AdamW and SGD keep whole copies of a parameter. AdamW may keep them in the memory of the host and
update there (Ren et al. 2021, arXiv 2101.06840): parameter and gradient go over the host's link,
the new parameter comes back, and the host reads and writes what a device otherwise would; measured
on a CPU, torch's fused AdamW takes 6.9 times as long as one pass of an addition over the parameter,
7 are counted. Two optimizers keep less:

- Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) has no first moment, and of the second one
  of a matrix [..., r, c] only the means of its rows [..., r, 1] and columns [..., 1, c]; of a
  vector all of it. ZeRO splits dim 0: of a matrix with 2 dims a rank has the means of its own rows
  and of all columns.
- AdamW with 8-bit states (Dettmers et al. 2022, arXiv 2110.02861): both moments are a byte for an
  element, a float32 scale for each 256 of them, and a table of 256 float32 that says what a byte
  stands for. As torchao 0.18 has it, a rank's part of fewer than 4096 elements, or of a number
  that 256 does not divide, keeps its moments in the parameter's type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod

from autopar.cluster import Device
from autopar.errors import UsageError

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

QUANTIZED_BLOCK = 256
LEAST_QUANTIZED = 4096
_SCALE, _TABLE = 4, 4 * 256


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`copies`: states that are laid out as the parameter, in its type. Otherwise `state` gives the
    bytes for one rank's part of a parameter (its shape, bytes per element), and `least` a number
    that no shapes of so many elements stay below.

    `host_copies`: such states that are kept in the host's memory, where the update is made.
    `all_at_once`: copies of all parameters that a step allocates (torch's foreach kernels);
    `one_by_one`: copies of one parameter, where a step goes through them in turn. `passes`: how
    often a step reads or writes parameter and gradient, states aside. `shrinks`: a smaller part of
    a parameter never has a larger state.
    """

    copies: int = 0
    state: Callable[[Shape, int], int] | None = None
    least: Callable[[int, int], int] | None = None
    all_at_once: int = 0
    one_by_one: int = 0
    passes: int = 3
    shrinks: bool = True
    host_copies: int = 0

    @property
    def on_host(self) -> bool:
        return self.host_copies > 0


def factored_bytes(shape: Shape, each: int) -> int:
    """Means of rows and columns over the last two dims; of a vector all of it."""
    if len(shape) < 2:
        return prod(shape) * each
    rows, columns = shape[-2:]
    return prod(shape[:-2]) * (rows + columns) * each


def quantized_bytes(shape: Shape, each: int) -> int:
    """Both moments of AdamW."""
    elements = prod(shape)
    if elements < LEAST_QUANTIZED or elements % QUANTIZED_BLOCK:
        return 2 * elements * each
    return 2 * (elements + _SCALE * elements // QUANTIZED_BLOCK + _TABLE)


OPTIMIZERS = {
    "adamw": Optimizer(copies=2, all_at_once=1),
    "adamw-host": Optimizer(host_copies=2),
    "sgd": Optimizer(),
    "sgd-momentum": Optimizer(copies=1),
    # Reads the gradient for its means, for the size of the update, and for the update; the
    # parameter for its own size, and to change it.
    "adafactor": Optimizer(
        state=factored_bytes,
        least=lambda elements, each: isqrt(elements) * each,
        one_by_one=1,
        passes=6,
    ),
    # torchao's step on one parameter at a time: both moments, old and new, and the update. That is
    # without compilation, which it asks for: compiled it holds no more.
    "adamw-8bit": Optimizer(
        state=quantized_bytes,
        least=lambda elements, each: 2 * elements,
        one_by_one=6,
        shrinks=False,
    ),
}


def check_host(name: str, device: Device) -> None:
    """Raise `UsageError` for an optimizer on the host of a device whose host is not known."""
    known = device.host_bytes_per_second and device.host_memory_bytes_per_second
    if OPTIMIZERS[name].on_host and not known:
        raise UsageError(
            f"optimizer {name}: the host's memory is not known apart from that of {device.name}",
            next_step="on a CPU use adamw; for an accelerator give host_bytes_per_second and "
            "host_memory_bytes_per_second in the cluster's TOML file",
        )


def part_of(shape: Shape, shards: int) -> Shape:
    """The largest rank's part of a parameter that ZeRO splits along dim 0."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else shape


@lru_cache(maxsize=4096)
def without(shapes: Shapes, others: Shapes) -> Shapes:
    """`shapes` less `others`, which are among them."""
    left = Counter(shapes) - Counter(others)
    return tuple(left.elements())


@lru_cache(maxsize=65536)
def state_bytes(name: str, shapes: Shapes, elements: int, shards: int, each: int) -> int:
    """States of parameters with `shapes` on a tp rank, `elements` in all, split over `shards` ranks
    (1: not); `each`: bytes per element. Without shapes, the least."""
    found = OPTIMIZERS[name]
    if found.state is None or found.least is None:
        return found.copies * -(-elements // shards) * each
    if not shapes:
        return found.least(elements // shards, each)
    return sum(found.state(part_of(shape, shards), each) for shape in shapes)


@lru_cache(maxsize=65536)
def largest_part(shapes: Shapes, shards: int) -> int:
    """Elements of the largest part of a parameter on one rank; 0 without shapes."""
    return max((prod(part_of(shape, shards)) for shape in shapes), default=0)
