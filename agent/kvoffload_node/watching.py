"""A watch of the API server that goes on whatever happens, in a thread of its own.

Runs in the daemon and in the attacher; used by `report.py` and `attach/pods.py`, with them the only users of the
Kubernetes client on the node.

    round: list, then watch until it ends ──> again     API server away: said, again after a pause
                                                        an object that cannot be read: said with the remedy, likewise
"""

import logging
import threading
from collections.abc import Callable

from kubernetes import watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from kvoffload.errors import KVOffloadError

log = logging.getLogger(__name__)


class ApiServerError(KVOffloadError):
    """The API server refused, or could not be reached."""


class Watching:
    """One watch and its thread."""

    def __init__(self, name: str, what: str, on_unreadable: Callable[[str], None]) -> None:
        """`what` is watched, in words. `on_unreadable` gets, in the thread, why an object could not be read, and an
        empty text when a round ends well."""
        self.watch = watch.Watch()
        self._what = what
        self._on_unreadable = on_unreadable
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, run_round: Callable[[], None], *, retry_seconds: float) -> None:
        """Run rounds until `stop`, in a thread that does not hold up the end of the process: a watch cannot be
        interrupted."""

        def run() -> None:
            while not self._stopped.is_set():
                try:
                    run_round()
                except (ApiServerError, ApiException, HTTPError, OSError) as error:
                    log.warning("%s cannot be asked for now: %s", self._what, describe(error))
                except Exception as error:
                    if self._stopped.is_set():
                        return  # whoever was told has ended
                    self._on_unreadable(
                        f"{self._what} cannot be read by this version, what was known last stays in force: "
                        f"{describe(error)}; update the node's image to the operator's version"
                    )
                    log.debug("%s", self._what, exc_info=True)
                else:
                    self._on_unreadable("")
                    continue
                self._stopped.wait(retry_seconds)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, at its next event or timeout."""
        self._stopped.set()
        self.watch.stop()


def describe(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return " ".join(str(error).split())[:1000] or type(error).__name__
