"""What workers may be touching, and which session of the scheduler answers for it: told again to each new daemon.

Runs in vLLM's engine core; used by `kvoffload_engine.link` (`kvoffload_engine.worker_link` tells what a worker
copies); `Held` is also made by `kvoffload_engine.manager`. `begin` runs in the connector's thread, before the
scheduler's thread sees the session; the rest in the scheduler's. It sends nothing but the reassertion, and knows
neither what is asked of a session nor what is stored.

    loads     leased by the session that found them, and by each later one that was told of them when it began
    stores    told by epoch and offset; no session leases them
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

from kvoffload.protocol.client import Session
from kvoffload.protocol.messages import build_reassertion
from kvoffload_engine.attachment import AttachmentLock


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What workers may be touching: packed offsets and the epoch in which they were given out."""

    offsets: bytes
    epoch: int
    session: Session | None = None
    """The one that leased them; None where they are written."""


Holdings = Callable[[], tuple[list[Held], list[Held]]]
"""Leased slots of loads under way, and slots of stores under way; called from the connector's thread."""


class Reassertion:
    """See the module's docstring."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._lock = AttachmentLock()
        self._last_session: Session | None = None
        self._loads: frozenset[Held] = frozenset()
        """Those that the newest session leases because they were under way when it began."""

    def begin(self, session: Session) -> None:
        """In the connector's thread, before anybody else sees the new session: what workers may still read or
        write."""
        (lock,) = session.take_descriptors()
        with self._lock.succeeded_by(lock):
            if self._last_session is not None:
                self._reassert(session, self._last_session)
            self._last_session = session

    def _reassert(self, session: Session, last: Session) -> None:
        loads, writes = self._holdings()
        # What was prepared when the last session had ended is leased by neither, and no worker does it.
        reads = [held for held in loads if self.is_leased_by(last, held)]
        self._loads = frozenset(reads)
        oldest = min([last.welcome.epoch, *(held.epoch for held in (*reads, *writes) if held.epoch)])
        packed = (b"".join(held.offsets for held in reads), b"".join(held.offsets for held in writes))
        session.send(*build_reassertion(oldest, *packed))

    def is_leased_by(self, session: Session, held: Held) -> bool:
        """Whether this session, the newest, leases it: it gave it out itself, or was told of it when it began. Neither
        is so for a load that was prepared while the connector was at it."""
        return held.session is session or held in self._loads

    def ended_meanwhile(self) -> Set[Held]:
        """Loads that were re-asserted and ended before the scheduler's thread saw the session: nobody else gives them
        back."""
        under_way, _ = self._holdings()
        return self._loads.difference(under_way)

    def close(self) -> None:
        """No worker touches the region for this scheduler any more."""
        self._lock.close()
