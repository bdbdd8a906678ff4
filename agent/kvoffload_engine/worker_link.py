"""A worker's link to the node daemon: the region that it maps, and what it owes the daemon a word of.

Runs in vLLM's workers; used by `kvoffload_engine.worker` alone. It knows sessions, epochs and mappings, but neither
copies nor vLLM. `_connected`, `_readable` and `_tick` run in the connector's thread, the rest in the thread that runs
the model; `report` and `_send_unsent` in both.

    session  Welcome (+ region, lock) -> mapped, unless it is the region that is mapped -> what copies still touch is
             re-asserted, Mapped
    epochs   a store needs the session's own epoch (its Seal would be refused); a load needs a mapping of that epoch
    owed     Seal or Fail of each store, kept until there is a session; what was moved, about once a second
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvoffload.errors import DaemonUnavailable
from kvoffload.protocol.client import Connector, Session
from kvoffload.protocol.messages import (
    Drain,
    EngineLost,
    EngineReady,
    Fail,
    Hello,
    Mapped,
    Message,
    Refused,
    Report,
    Revoke,
    Revoked,
    Seal,
    build_reassertion,
)
from kvoffload_engine.attachment import AttachmentLock
from kvoffload_engine.log import logger
from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.offsets import unpack
from kvoffload_engine.slots import RegionSlots
from kvoffload_engine.transfer.backend import Transfer

REPORT_SECONDS = 1.0
MAX_UNSENT = 4096
"""Ends of stores that are kept for a session to come; older ones are freed by the daemon when this engine ends."""
START_WAIT_SECONDS = 2.0
"""How long a starting worker waits for the daemon; later it connects in the background."""

Copying = Callable[[], list[tuple[RegionSlots, bool]]]
"""Slots of the jobs under way, and whether they are written; called from the connector's thread."""


class WorkerLink:
    """See the module's docstring."""

    def __init__(
        self, *, rank: int, socket_path: str, make_hello: Callable[[], Hello], transfer: Transfer, copying: Copying
    ) -> None:
        self._rank = rank
        self._transfer = transfer
        self._copying = copying
        self.mapping: RegionMapping | None = None
        """The region of the newest session."""
        self._old_mappings: list[RegionMapping] = []
        self._lock = AttachmentLock()
        self._unsent: deque[Seal | Fail] = deque(maxlen=MAX_UNSENT)
        self._sending = threading.Lock()
        """For `_unsent`, which both threads send."""
        self._draining = False
        self._counters = threading.Lock()
        self._stored_bytes = self._loaded_bytes = self._failed_loads = self._failed_stores = 0
        self._next_report = 0.0
        self._connector = Connector(
            socket_path,
            make_hello=make_hello,
            on_connected=self._connected,
            on_event=lambda line: logger.info("kvoffload rank %d: %s", rank, line),
            on_readable=self._readable,
            on_tick=self._tick,
        )

    def start(self) -> None:
        """Connect; a daemon that is there is found before the engine is up."""
        self._connector.start(wait_seconds=START_WAIT_SECONDS)

    def close(self) -> None:
        """Say what is owed, then end the session and unmap; nothing may be copied any more."""
        self._send_unsent()
        self.report(force=True)
        self._connector.close()
        for mapping in [*self._old_mappings, *([self.mapping] if self.mapping else [])]:
            mapping.close()
        self._old_mappings, self.mapping = [], None
        self._lock.close()

    # --- for the worker's jobs --------------------------------------------------------------------------------------

    def usable_mapping(self, slots: RegionSlots, *, is_store: bool) -> RegionMapping:
        """The mapping through which these slots may be touched. Raises DaemonUnavailable."""
        mapping, session = self.mapping, self._connector.current()
        if mapping is None or slots.epoch not in mapping.epochs:
            raise DaemonUnavailable(f"the slots are of epoch {slots.epoch}, which this worker has no region of")
        if is_store and (session is None or session.welcome.epoch != slots.epoch or self._draining):
            raise DaemonUnavailable("the daemon that gave these slots out is gone or stops")
        return mapping

    def end_store(self, slots: RegionSlots, *, failed: bool) -> None:
        """This rank has written its share, or never will: the daemon hears of it now, or when it, or another one, is
        there again."""
        with self._sending:
            self._unsent.append(Fail(slots.epoch, slots.offsets) if failed else Seal(slots.epoch, slots.offsets))
        self._send_unsent()

    def count(self, num_bytes: int, *, is_store: bool, failed: bool) -> None:
        """A job has ended, and moved so much."""
        with self._counters:
            if is_store:
                self._stored_bytes += num_bytes
                self._failed_stores += failed
            else:
                self._loaded_bytes += num_bytes
                self._failed_loads += failed

    def report(self, *, force: bool = False) -> None:
        """Tell the daemon what was moved since the last report: after a step, or from the connector's thread."""
        now = time.monotonic()
        session = self._connector.current()
        if session is None or (now < self._next_report and not force):
            return
        self._next_report = now + REPORT_SECONDS
        with self._counters:
            counts = (self._stored_bytes, self._loaded_bytes, self._failed_loads, self._failed_stores)
            self._stored_bytes = self._loaded_bytes = self._failed_loads = self._failed_stores = 0
        if not any(counts):
            return
        refused = self._transfer.registration_refused
        note = f"pages are not registered with the device of rank {self._rank}: {refused}" if refused else ""
        try:
            session.send(Report(*counts, note=note))
        except DaemonUnavailable as error:
            logger.debug("kvoffload rank %d: a report was not sent: %s", self._rank, error)

    # --- the session ------------------------------------------------------------------------------------------------

    def _connected(self, session: Session) -> None:
        region, lock = session.take_descriptors()
        with self._lock.succeeded_by(lock):
            try:
                old = self._map(region, session)
            finally:
                os.close(region)
            self._reassert(session, old)
        self._draining = False

    def _map(self, region: int, session: Session) -> RegionMapping | None:
        """Map the session's region, unless it is the one that is mapped; returns what was mapped before."""
        epoch, num_bytes = session.welcome.epoch, session.welcome.region_bytes
        old = self.mapping
        if old is not None and old.is_of(region, num_bytes):
            old.epochs.add(epoch)
            return old
        mapping = RegionMapping(region, num_bytes, epoch)
        self._transfer.region_mapped(mapping, session.welcome.extent_bytes)
        if old is not None:
            self._old_mappings.append(old)  # a copy may still be under way: unmapped at the end
        self.mapping = mapping
        return old

    def _reassert(self, session: Session, old: RegionMapping | None) -> None:
        """Say what copies may still read or write, and that this rank has mapped the region."""
        reassertion: Sequence[Message] = ()
        jobs = self._copying()
        if jobs:
            oldest = min(slots.epoch for slots, _ in jobs)
            reads = b"".join(slots.offsets for slots, is_store in jobs if not is_store)
            writes = b"".join(slots.offsets for slots, is_store in jobs if is_store)
            reassertion = build_reassertion(oldest, reads, writes)
        elif old is not None:
            reassertion = build_reassertion(max(old.epochs), b"", b"")
        session.send(*reassertion, Mapped())

    def _tick(self) -> None:
        """In the connector's thread, while there is a session: what an idle engine's model thread does not send."""
        self._send_unsent()
        self.report()

    def _send_unsent(self) -> None:
        """Say what became of stores: at their end, or when there is a session again. In either thread."""
        session = self._connector.current()
        with self._sending:
            while session is not None and self._unsent:
                try:
                    session.send(self._unsent[0])
                except DaemonUnavailable:
                    return
                self._unsent.popleft()

    def _readable(self, session: Session) -> None:
        for message in session.receive():
            if isinstance(message, Revoke):
                self._revoke(session, message)
            elif isinstance(message, Drain):
                self._draining = True
                logger.info("kvoffload rank %d: the node daemon stops: %s", self._rank, message.message)
            elif isinstance(message, Refused):
                logger.warning(
                    "kvoffload rank %d: the node daemon refused: %s: %s", self._rank, message.reason, message.message
                )
            elif isinstance(message, EngineLost):
                logger.info("kvoffload rank %d: offload pauses: %s", self._rank, message.message)
            elif isinstance(message, EngineReady):
                self._draining = False  # a paused pool is active again
                self._log_row(message)

    def _revoke(self, session: Session, message: Revoke) -> None:
        self._transfer.extents_revoked(unpack(message.extents).tolist())
        session.send(Revoked(message.extents))

    def _log_row(self, ready: EngineReady) -> None:
        logger.info(
            "kvoffload rank %d: offload is on: %s, slots of %d bytes, this rank's part at %d, written by %d rank(s)%s",
            self._rank,
            "one copy for all ranks" if ready.replicated else "a part for each rank",
            ready.slot_bytes,
            ready.part_offsets[self._rank],
            ready.sharers[self._rank],
            f" ({ready.reason})" if ready.reason else "",
        )
