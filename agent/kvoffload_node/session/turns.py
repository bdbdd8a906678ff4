"""Turns: how the daemon's one thread is shared by the pods, whatever they send over however many connections.

Runs in the node daemon's event loop; a `Turns` for each pod, used by `connection.py`. What is bounded is the time that
a pod's messages take, because a message of 8,192 keys takes a thousand times that of one.

    handled at once ──> TURN_SECONDS are spent ──> its connections wait, unread, and go on one after another
                                                     │ in the loop's next round: everybody else was served between
                                                     │ later, where other pods are at work and this one has had more
                                                     │ than its share: nothing is dropped, a flood is only slow
"""

import asyncio
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffload_node.session.connection import Connection

TURN_SECONDS = 0.001
"""A pod's messages are handled for so long, and to the end of the one in hand, before the others have their turn."""
MAX_SHARE = 0.25
"""Of the thread's time that one pod has while others are at work."""
BURST_SECONDS = 0.01
"""So much more than its share a pod may have in one go."""
CONTENDED_SECONDS = 0.1
"""Others count as being at work for so long after each of their messages."""


class Floor:
    """Whose message was handled last, and until when pods count as being in each other's way."""

    __slots__ = ("contended_until", "speaker")

    def __init__(self) -> None:
        self.speaker: Turns | None = None
        self.contended_until = 0.0


class Turns:
    """One pod's turns."""

    __slots__ = ("_credit", "_floor", "_seen", "_spent", "_waiting", "is_over")

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._spent = 0.0
        """Seconds of the present turn."""
        self._credit = BURST_SECONDS
        """Seconds that it may have beyond its share, as of the last turn's end; below 0: it has had too much."""
        self._seen = perf_counter()
        self._waiting: deque[Connection] = deque()
        self.is_over = False
        """Whether the next turn has to be waited for."""

    def spend(self, begun: float, ended: float) -> None:
        """Messages of the pod were handled between these moments of `perf_counter`."""
        floor = self._floor
        if floor.speaker is not self:
            if floor.speaker is not None:
                floor.contended_until = ended + CONTENDED_SECONDS
            floor.speaker = self
        self._spent += ended - begun
        if self._spent > TURN_SECONDS and not self.is_over:
            self._end_turn(ended)

    def wait(self, connection: "Connection") -> None:
        """Call the connection's `take_turn` when it is its turn."""
        self._waiting.append(connection)
        if not self.is_over:
            self._end_turn(perf_counter())

    def _end_turn(self, now: float) -> None:
        self.is_over = True
        self._credit = min(BURST_SECONDS, self._credit + (now - self._seen) * MAX_SHARE) - self._spent
        self._seen = now
        loop = asyncio.get_running_loop()
        if now >= self._floor.contended_until:
            self._credit = max(self._credit, 0.0)  # nobody missed what it had
        if self._credit < 0:
            loop.call_later(-self._credit / MAX_SHARE, self._begin_turn)
        else:
            loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self.is_over = False
        self._spent = 0.0
        while self._waiting and not self.is_over:
            self._waiting.popleft().take_turn()
