"""What a check of `kubectl kvoffload doctor` yields. Used by the checks and by `doctor`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvoffload_cli.facts import ClusterFacts


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Offload does not work for somebody."""
    WARNING = "warning"
    """It works worse than it could, or will stop."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, on what, and what to do."""

    severity: Severity
    check: str
    subject: str
    message: str
    remedy: str


Found = Iterator[tuple[Severity, str, str, str]]
"""Severity, subject, message, remedy."""
Check = Callable[[ClusterFacts], Found]
