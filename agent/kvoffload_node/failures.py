"""What fails in the daemon while it goes on serving: said once in the log, told in the condition Degraded, counted.

Runs in the node daemon; one object, made by `daemon.py` and handed down to whatever can fail without ending. A leaf:
`findings.py` and `metrics.py` translate.

    note ──> log (each message once), Degraded, kvoffload_daemon_failures_total
    clear, or not noted again for LASTING_SECONDS (all of it is tried again sooner) ──> no longer Degraded
"""

import errno
import logging
import os
import time
from collections import Counter
from enum import StrEnum
from pathlib import Path

log = logging.getLogger(__name__)

OUT_OF_DISK = (errno.ENOSPC, errno.EDQUOT)

LASTING_SECONDS = 60.0
"""What has not failed again for so long may fail no more: whoever tried is gone."""


class Part(StrEnum):
    """What failed; a closed set, used as metric label."""

    LAST_SPEC = "LastSpec"
    """The spec cannot be written down for the next start."""
    REGION_OBJECT = "RegionObject"
    """The KVOffloadRegion cannot be read: another version's, or damaged."""
    STATUS = "Status"
    """The region's status cannot be built whole."""
    SWEEP = "Sweep"
    """What ended engines leave cannot be cleared away."""
    ATTACHMENT = "Attachment"
    """An engine's attachment cannot be written: it is not taken."""
    RECORDS = "Records"
    """The disk does not take the records of more slots."""
    EXTENT = "Extent"
    """Pages cannot be given back."""
    HAND_OFF = "HandOff"
    """The attacher's connection cannot be accepted."""


OF_THE_DAEMON = frozenset({Part.REGION_OBJECT, Part.STATUS, Part.HAND_OFF})
"""Those that are not of the node's disk or pages."""


class Failures:
    """What fails now, and how often something did since the start."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter({part.value: 0 for part in Part})
        """By part, every one from the start: Prometheus sees no increase in a series that begins with an event."""
        self._now: dict[Part, tuple[str, float]] = {}
        """Message, and when it was noted last."""

    def lasting(self) -> dict[Part, str]:
        """What fails now, in words."""
        oldest = time.monotonic() - LASTING_SECONDS
        self._now = {part: (message, at) for part, (message, at) in self._now.items() if at > oldest}
        return {part: message for part, (message, _) in self._now.items()}

    def note(self, part: Part, message: str, *, bug: BaseException | None = None) -> None:
        """It failed (again). A message that was not the last one is logged, with the traceback where it is a bug."""
        self.counts[part] += 1
        if self.lasting().get(part) != message:
            log.warning("%s", message, exc_info=bug)
        self._now[part] = message, time.monotonic()

    def clear(self, part: Part) -> None:
        """It works, or works again."""
        if self._now.pop(part, None):
            log.info("%s: it works again", part)


def explain(error: OSError, path: Path) -> str:
    """Path, cause and remedy; the path is the one given where the kernel does not name one (writes)."""
    named = error.filename2 or error.filename or path
    if error.errno in OUT_OF_DISK:
        remedy = "make room on that disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "let the daemon write there"
    elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        remedy = "it is not the daemon's: remove it on the node, the daemon makes its own"
    else:
        remedy = "see the node's disk and its kernel log"
    return f"{named}: {os.strerror(error.errno) if error.errno else error}; {remedy}"
