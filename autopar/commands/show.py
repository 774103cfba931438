"""`autopar show PLAN --report PAGE.html`: a plan, with the routing that was measured under it."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import UsageError
from autopar.experts.history import Recorded
from autopar.plan_document import Plan
from autopar.report.page import write_report


def show_page(plan: Plan, load: Path | None, report: Path | None) -> int:
    """Write the page and print where it is; exit code 0. Raises `UsageError` for a load without a
    page to show it in."""
    if report is None:
        raise UsageError("--load is shown in the HTML page", next_step="add --report PAGE.html")
    routing = Recorded.read(load) if load is not None else None
    print(write_report(plan, (), None, report, routing))
    return 0
