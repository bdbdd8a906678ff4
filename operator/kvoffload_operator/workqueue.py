"""Names that need a pass: each at most once in line, never two passes over one name at a time, failures later.

Runs in the operator's event loop; handlers add, `operator.py`'s workers take.

    add ---> waiting --get--> running --done--> (waiting again if it was added meanwhile)
                ^------ after a delay -------'
"""

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """A queue of keys without duplicates."""

    def __init__(self, *, first_delay_seconds: float = 0.5, max_delay_seconds: float = 60.0) -> None:
        self._waiting: dict[Key, None] = {}  # ordered
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._first_delay_seconds, self._max_delay_seconds = first_delay_seconds, max_delay_seconds

    def add(self, key: Key) -> None:
        """A pass over this key is needed, after the present one if it is running."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        else:
            self._waiting.setdefault(key)
            self._changed.set()

    def add_later(self, key: Key, delay_seconds: float) -> None:
        """Add after a while, unless it is added before; the earlier of two delays holds."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_seconds
        if (timer := self._timers.get(key)) is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._add_due, key)

    def _add_due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def get(self) -> Key:
        """The next key; call `done` or `failed` with it afterwards."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._running.add(key)
        return key

    def done(self, key: Key) -> None:
        """The pass went well."""
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: Key) -> float:
        """The pass failed: it comes again after a delay that doubles; returns that delay, seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(self._first_delay_seconds * 2.0 ** min(failures, 20), self._max_delay_seconds)
        self._finish(key)
        if key not in self._waiting:
            self.add_later(key, delay)
        return delay

    def _finish(self, key: Key) -> None:
        self._running.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
