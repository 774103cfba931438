"""What all settings share that differ in schedule and chunks alone, computed once."""

from __future__ import annotations

from autopar.cost.setting import Setting
from autopar.search.keyed import Keyed


class AnyChunks(Keyed):
    """A setting as a key: equal to those that differ from it in schedule and chunks alone. (Not
    across schedules that divide a backward and those that do not: what hides the end of a step
    differs.)"""

    __slots__ = ("setting",)

    def __init__(self, setting: Setting) -> None:
        cluster = setting.cluster
        self.setting = setting
        key = (
            *(setting.mesh, setting.microbatch, setting.microbatches, setting.zero),
            *(setting.precision, setting.optimizer, setting.practice, setting.divided),
            *(cluster.name, cluster.device.name, cluster.links),
        )
        super().__init__(key)
