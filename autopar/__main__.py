"""`python -m autopar`: the same command line as `autopar`."""

from __future__ import annotations

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
