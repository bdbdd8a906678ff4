"""What the developer's tools print: one line when a step begins, one when it ends, and how a failure is told.

Used by everything under `hack/`. A step that fails raises; `main_guard` turns that into a reason, the log's path and an
exit status, without a traceback for what the user can mend.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class StepError(Exception):
    """A step could not be done: what was found, what to change, and the log that has the details."""

    def __init__(self, reason: str, *, log: Path | None = None) -> None:
        """Remember the reason and the log to point the user at."""
        super().__init__(reason)
        self.log = log


def require_root(what: str) -> None:
    """Raise StepError before anything is begun that only root can end; `what` names it and why."""
    if os.geteuid() != 0:
        raise StepError(f"{what}; run this as root, or with sudo")


def say(message: str) -> None:
    """Print one line at once, whatever standard output is connected to."""
    print(message, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title, and afterwards how long it took; a failure passes through."""
    say(f"==> {title}")
    started = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"    FAILED after {time.monotonic() - started:.1f} s: {title}")
        raise
    say(f"    done in {time.monotonic() - started:.1f} s")


def wait_until(
    described: str,
    is_true: Callable[[], bool],
    *,
    timeout_seconds: float,
    poll_seconds: float = 0.2,
    explain: Callable[[], str] = lambda: "",
    log: Path | None = None,
) -> None:
    """Poll a condition until it holds; past the timeout raise StepError with what `explain` found."""
    deadline = time.monotonic() + timeout_seconds
    while not is_true():
        if time.monotonic() > deadline:
            detail = explain()
            raise StepError(
                f"waited {timeout_seconds:.0f} s for {described}, in vain" + (f":\n{detail}" if detail else ""), log=log
            )
        time.sleep(poll_seconds)


def main_guard(main: Callable[[], None]) -> None:
    """Run a command's main function; print a StepError as text and exit with status 1. SIGTERM unwinds as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except StepError as failure:
        print(f"\nerror: {failure}", file=sys.stderr)
        if failure.log is not None:
            print(f"log: {failure.log}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
