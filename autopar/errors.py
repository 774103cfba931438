"""Every error a user can meet: what is wrong, what was expected, and the next step."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors; `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str, *, next_step: str = "") -> None:
        self.message = message
        self.next_step = next_step
        self.next_step = next_step
        super().__init__(f"{message}\n  next step: {next_step}" if next_step else message)


class UsageError(AutoparError):
    """An argument, pin, cluster or model name is not usable."""

    exit_code = 2


class CaptureError(AutoparError):
    """The model can't be turned into one graph."""

    exit_code = 3


class PlanError(AutoparError):
    """A plan does not fit the model, the mesh or the batch."""

    exit_code = 4


class InfeasibleError(AutoparError):
    """No plan fits in memory; the message says by how many bytes and what would help."""

    exit_code = 5


class PassError(AutoparError):
    """A pass failed, or its result is not a legal program."""

    exit_code = 6


class RuntimeFault(AutoparError):
    """A rank died, ranks disagree, or a wait ran out."""

    exit_code = 7


class NotEqualError(AutoparError):
    """The distributed program does not equal the single-device one."""

    exit_code = 8
