"""The report: one HTML file that shows a plan and needs nothing else, no network either."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from autopar.errors import UsageError
from autopar.experts.history import Recorded
from autopar.plan_document import Plan
from autopar.report.block_picture import BlockPicture
from autopar.report.page_data import page_data
from autopar.report.page_parts import parts
from autopar.report.routing_part import routing_data, routing_section
from autopar.report.timeline import Event

_HOLE = re.compile(r"\{\{(\w+)\}\}")


def write_report(
    plan: Plan,
    pictures: Sequence[BlockPicture],
    timeline: Iterable[Event] | None,
    path: str | Path,
    routing: Recorded | None = None,
) -> Path:
    """Write the page to `path` and return it.

    `pictures`: one per kind of block (may be empty); `timeline`: the events of one step, `None` to
    simulate them from the plan's predictions; `routing`: what was measured of it. All text is
    escaped. Raises `UsageError` if the file can't be written.
    """
    path = Path(path)
    text = render(plan, pictures, timeline, routing)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"can't write the report {path}: {error.strerror}",
            next_step="name a file in a folder that exists and is writable",
        ) from error
    return path


def render(
    plan: Plan,
    pictures: Sequence[BlockPicture],
    timeline: Iterable[Event] | None,
    routing: Recorded | None = None,
) -> str:
    """The page as text."""
    holes = parts(plan, pictures)
    holes["css"], holes["script"] = _data("page.css"), _data("page.js")
    holes["libraries"] = "\n".join(
        f"<script>{_script(name)}</script>" for name in ("echarts.min.js", "dagre.min.js")
    )
    holes["routing"] = routing_section(plan, routing)
    data = page_data(plan, pictures, timeline) | {"routing": routing_data(routing)}
    holes["data"] = embedded_json(data)
    # One pass: what is filled in is never searched for holes again.
    return _HOLE.sub(lambda hole: holes[hole.group(1)], _data("page.html"))


def embedded_json(value: object) -> str:
    """JSON that can stand inside a script element: no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(name: str) -> str:
    return (files("autopar") / "data" / "report" / name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    """A vendored library; without the pointer to a source map, which would be a request."""
    text = re.sub(r"^//# sourceMappingURL=.*$", "", _data(name), flags=re.MULTILINE)
    return text.replace("</script", "<\\/script")
