"""How FSDP2 shards the experts that ep splits: over the ranks that hold the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.mesh import EXPERT_REPLICA
from autopar.runtime.ranks import Ranks
from autopar.runtime.torch_compat import ShardOver
from autopar.stage_program import ParameterSpec


class ExpertShards:
    """Made once for all blocks: parameters of one group have to name the same mesh."""

    def __init__(self, ranks: Ranks) -> None:
        mesh = ranks.experts[EXPERT_REPLICA]
        self._ranks, self._over = mesh.size(), ShardOver(mesh)

    def placements(self, module: nn.Module) -> dict[nn.Parameter, Any]:
        """Of those parameters of a block that hold experts; what FSDP2 asks for each of them."""
        specs: Mapping[str, ParameterSpec] = getattr(module, "specs", {})
        found = {}
        for name, spec in specs.items():
            parameter = module._parameters[name]
            if spec.over_ep and parameter is not None:
                found[parameter] = self._over.along(self._dim(parameter, spec.spare))
        return found

    def _dim(self, parameter: nn.Parameter, spare: int) -> int:
        """The first dim that divides, with and without spare slots (as what is saved is): FSDP2
        pads dim 0 and no other."""
        assert isinstance(parameter, DTensor)
        slots, *rest = parameter._local_tensor.shape
        sizes = (gcd(slots, slots - spare), *rest)
        return next((dim for dim, size in enumerate(sizes) if size % self._ranks == 0), 0)
