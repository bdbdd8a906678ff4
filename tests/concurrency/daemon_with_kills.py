"""The real daemon, but for one thing: it kills itself at the N-th passage of one of its steps (environment KVO_KILL).

`step:count`, for example `journal.ready.before:3`. Steps are the calls whose order the journal's promises rest on.
Run by `test_kills.py` in place of `python -m kvoffload_node`.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from kvoffload_node.index import catalog, journal
from kvoffload_node.region import hugetlbfs, region
from kvoffload_node.session import connection, locks

STEPS: list[tuple[str, Any, str]] = [
    ("journal.writing", journal.TenantJournal, "writing"),
    ("journal.ready", journal.TenantJournal, "ready"),
    ("journal.free", journal.TenantJournal, "free"),
    ("journal.extent", journal.TenantJournal, "extent"),
    ("reservation.resize", hugetlbfs.Reservation, "resize"),
    ("file.allocate", hugetlbfs.RegionFile, "allocate"),
    ("catalog.write", region, "write_catalog"),
    ("attachment.create", locks.Attachments, "create"),
    ("attachment.remove", locks.Attachments, "remove"),
    ("connection.send", connection.Connection, "send"),
    ("welcome.send", connection.Connection, "_send_with_descriptors"),
]
NAMES = [f"{name}.{when}" for name, _, _ in STEPS for when in ("before", "after")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(wanted: str, count: int) -> None:
    left = count

    def wrap(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def passage(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if wanted == f"{name}.before":
                left -= 1
                if left == 0:
                    die()
            result = function(*args, **kwargs)
            if wanted == f"{name}.after":
                left -= 1
                if left == 0:
                    die()
            return result

        return passage

    for name, owner, attribute in STEPS:
        if wanted.startswith(name + "."):
            setattr(owner, attribute, wrap(getattr(owner, attribute), name))


if __name__ == "__main__":
    assert catalog.write_catalog is region.write_catalog
    if os.environ.get("KVO_KILL"):
        step, number = os.environ["KVO_KILL"].split(":")
        arm(step, int(number))
    from kvoffload_node.__main__ import main

    sys.exit(main())
