"""Execution: ranks, collectives, ZeRO, pipeline stages, and the distributed program.

Imported as `autopar.runtime`. Reads plans and stage programs; never costs, never the search.
"""

from __future__ import annotations

if __name__ == "runtime":
    # A second copy of these modules would define second, unequal copies of their classes.
    raise ImportError(
        "import `autopar.runtime`, not `runtime`: a module under two names has unequal classes"
    )
