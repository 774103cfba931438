"""The schedule that a row of a table states, in the words of this package."""

from __future__ import annotations

import re

from autopar.interleaving import DIVIDED, V_SHAPED, chunks_refused, refused
from autopar.mesh import Mesh
from autopar.workflow.reported_practice import InexpressibleError, Row, whole_number
from autopar.zero_bubble import refused as divided_refused

# How published rows write schedules, the first that matches. `1F1B` and nothing stated mean the
# interleaved one where a row has several chunks.
WRITTEN = (
    (r"dual.?pipe", "DualPipe"),
    (r"zbv|zb-v|v-?shaped", "zbv"),
    (r"zero.?bubble|zb-?h1|zb1p", "zero-bubble"),
    (r"gpipe", "gpipe"),
    (r"interleaved|1f1b|no pipeline|^$", "1f1b"),
)


def row_schedule(row: Row, mesh: Mesh, microbatches: int, recompute: str) -> tuple[str, int]:
    """The schedule, and how many chunks each pp rank has. Raises `InexpressibleError`."""
    pp = mesh.pp
    told = (row.get("schedule") or "").strip()
    found = (name for pattern, name in WRITTEN if re.search(pattern, told, re.IGNORECASE))
    schedule = next(found, "")
    if not schedule or (schedule == "DualPipe" and pp > 1):
        raise InexpressibleError(f"schedule {told}")
    chunks = whole_number(row, "vp", 2 if schedule in V_SHAPED else 1)
    if not chunks:
        raise InexpressibleError(f"vp is {row['vp']!r}")
    if pp == 1:
        return "1f1b", 1
    if schedule == "1f1b" and chunks > 1:
        schedule = "interleaved"
    if reason := chunks_refused(schedule, chunks, pp):
        raise InexpressibleError(f"schedule {told} with vp={chunks}: {reason}")
    if schedule in DIVIDED:
        # Megatron interleaves any number of micro-batches, in rounds of which the last is shorter;
        # backwards are divided by torch's schedules alone.
        given = {"zero": whole_number(row, "zero", 0), "ep": mesh.ep}
        reason = divided_refused(**given, recomputes=recompute != "none")
        if reason := reason or refused(pp, microbatches, schedule):
            raise InexpressibleError(f"schedule {told}: {reason}")
    return schedule, chunks
