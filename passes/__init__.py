"""Compiler passes: analyses that annotate a program, rewrites that return a new one.

Imported as `autopar.passes`. `pipeline.py` lists the order, `verify.py` says what is legal.
"""

from __future__ import annotations

if __name__ == "passes":
    # A second copy of these modules would define second, unequal copies of their classes.
    raise ImportError(
        "import `autopar.passes`, not `passes`: a module loaded under two names has unequal classes"
    )
