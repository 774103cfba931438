"""One rank of a run in which the last rank dies, fails, or stays away; a script for Popen.

    python -m tests.runtime.failing_rank dies dp=2,tp=2 FILE

writes what this rank's steps came to, and after how many seconds from the last good one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

GOOD_STEPS = 2
WAIT_SECONDS = 12.0


def main(how: str, mesh_text: str, file: str) -> None:
    from autopar.mesh import Mesh
    from autopar.runtime import collectives  # noqa: F401
    from autopar.runtime.program import DistributedProgram
    from autopar.runtime.ranks import Ranks
    from tests.runtime.toy import make_batch, make_model, make_plan, make_stages

    degrees = dict(part.split("=") for part in mesh_text.split(","))
    plan = make_plan(Mesh(**{axis: int(degree) for axis, degree in degrees.items()}))
    ranks = Ranks.create(plan.mesh, timeout_seconds=WAIT_SECONDS)
    group = ranks.group("tp").group_name if plan.mesh.tp > 1 else ""
    program = DistributedProgram(make_stages(plan, group), plan, ranks, make_model())
    last = ranks.rank == plan.mesh.size - 1
    batch = make_batch(plan.global_batch)
    for _ in range(GOOD_STEPS):
        program.step(batch)
    start = time.monotonic()
    outcomes = []
    for attempt in range(2):
        try:
            if last and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if last and how == "stays away":
                time.sleep(WAIT_SECONDS + 30)
            # Ranks of one pipeline share a batch; only the last one looks a label up.
            if how == "fails" and attempt == 0 and (last or plan.mesh.pp > 1):
                batch["labels"] = batch["labels"] + 10_000  # no such class
            program.step(batch)
            outcomes.append("no error")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    Path(file).write_text(f"{seconds}\n" + "\n====\n".join(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
