"""What verdicts of plans against one device have to say."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.workflow.verification import Verdict


def assert_equal(verdicts: Mapping[str, Verdict]) -> None:
    """Loss and every gradient are those of one device; all that are not are named."""
    failed = [
        f"{name}: {v.error or f'loss {v.loss_error:.2g}, {v.worst} {v.worst_error:.2g} ({v.plan})'}"
        for name, v in verdicts.items()
        if not v.equal
    ]
    assert not failed, "\n".join(failed)
    for verdict in verdicts.values():
        assert verdict.gradients and verdict.loss_error <= 1e-5 and verdict.worst_error <= 1e-5
