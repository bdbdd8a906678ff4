"""The bundle while it is gathered: its files, what could not be read, what a bound kept away. For `contents`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvoffload_cli.kube import ClusterUnavailable, Denied, ReadFailed

MAX_OBJECTS = 1000
"""Of a kind, in one file."""
MAX_TEXT_BYTES = 1 << 20
"""Of one log, or of one pod's metrics."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Bundle:
    """Files by name, in their order: a text, or a document that becomes JSON."""

    entries: dict[str, Any] = field(default_factory=dict)
    holds: dict[str, str] = field(default_factory=dict)
    """What each file has, for people: `3 pods`."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """What could not be read, and why."""
    left_out: list[str] = field(default_factory=list)
    """What a bound kept away, one sentence each."""

    def add(self, name: str, content: Any, holds: str) -> None:
        """One more file."""
        self.entries[name] = content
        self.holds[name] = holds

    def attempt(self, what: str, read: Callable[[], _T], otherwise: _T) -> _T:
        """What was read; `otherwise`, and a failure, where it could not be."""
        try:
            return read()
        except (Denied, ReadFailed) as error:
            self.failures.append((what, str(error)))
            return otherwise

    def bounded(self, name: str, found: Iterable[_T]) -> list[_T]:
        """As many as one file takes."""
        listed = list(found)
        if len(listed) > MAX_OBJECTS:
            self.left_out.append(f"{name}: the first {MAX_OBJECTS} of {len(listed)}")
        return listed[:MAX_OBJECTS]

    def attempt_text(self, what: str, read: Callable[[], _T]) -> _T | None:
        """A log or metrics; None, and a failure, also where the way to that one pod does not answer."""
        try:
            return read()
        except (Denied, ClusterUnavailable) as error:
            self.failures.append((what, str(error)))
            return None

    def add_text(self, name: str, text: str) -> None:
        """A text within its bound."""
        encoded = text.encode()
        if len(encoded) > MAX_TEXT_BYTES:
            self.left_out.append(f"{name}: all but the first {MAX_TEXT_BYTES} bytes")
            text = encoded[:MAX_TEXT_BYTES].decode(errors="ignore")
        self.add(name, text, f"{text.count(chr(10))} lines")
