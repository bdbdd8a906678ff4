"""Registration of the region with the device, extent by extent, in the background: without it copies are slower, not
wrong.

Runs in vLLM's workers with a device, owned by `transfer.cuda`. Only extents that the daemon has allocated are
registered (registering a hole would allocate its pages), and a slot that was given out says that its extent is.

    first job that touches an extent -> queued -> registered by this thread; the job itself copies pageable memory
    refused once -> all is undone, one warning, and the scheduler is told, so that every rank goes on without
    revoked      -> unregistered before the daemon hears that it may punch: a registration keeps old pages alive
"""

import queue
import threading
from collections.abc import Callable

from kvoffload_engine.log import logger

Register = Callable[[int, int], str]
"""(address, bytes) -> what was wrong, empty if registered."""
Unregister = Callable[[int], None]


class Pinning:
    """The registrations of one mapping; each is one extent, far below what drivers take in one call."""

    def __init__(self, *, base_address: int, extent_bytes: int, register: Register, unregister: Unregister) -> None:
        self._base_address = base_address
        self._extent_bytes = extent_bytes
        self._register = register
        self._unregister = unregister
        self._known: set[int] = set()
        self._registered: set[int] = set()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.refused = ""
        """Why this device registers nothing, empty while it does."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-pinning", daemon=True)
        self._thread.start()

    @property
    def num_registered(self) -> int:
        """Extents registered now."""
        return len(self._registered)

    def want(self, extents: set[int]) -> None:
        """These extents (by number) are in use: register them when there is time."""
        for extent in extents - self._known:
            self._known.add(extent)
            self._queue.put(extent)

    def revoke(self, extents: set[int]) -> None:
        """Unregister these now; they may be wanted again later."""
        with self._lock:
            for extent in extents & self._registered:
                self._unregister(self._base_address + extent * self._extent_bytes)
            self._registered -= extents
            self._known -= extents

    def give_up(self, because: str) -> None:
        """Undo all registrations, and make no more. No copy that relies on them is under way."""
        with self._lock:
            self._give_up(because)

    def close(self) -> None:
        """As `give_up`, at the end."""
        self.give_up(self.refused or "closed")
        self._queue.put(None)
        self._thread.join()

    def _give_up(self, because: str) -> None:
        self.refused = self.refused or because
        for extent in sorted(self._registered):
            self._unregister(self._base_address + extent * self._extent_bytes)
        self._registered.clear()

    def _run(self) -> None:
        while (extent := self._queue.get()) is not None:
            with self._lock:
                if self.refused or extent not in self._known:
                    continue
                wrong = self._register(self._base_address + extent * self._extent_bytes, self._extent_bytes)
                if not wrong:
                    self._registered.add(extent)
                    continue
                undone = len(self._registered)
                self._give_up(wrong)
            logger.warning(
                "kvoffload: the device registers no pages (%s): copies go through pageable memory, slower; "
                "%d extents were undone",
                wrong,
                undone,
            )
