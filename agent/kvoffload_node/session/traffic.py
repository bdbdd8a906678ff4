"""What engines do all day: look up, reserve, seal; and the counters of it.

Runs in the node daemon, called by `requests.py` for each message.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from kvoffload.errors import RefusalReason, Shortage
from kvoffload.protocol.messages import Report
from kvoffload_node.failures import Part
from kvoffload_node.index.slots import Namespace
from kvoffload_node.region.extents import HEADROOM_EXTENTS
from kvoffload_node.region.region import Region
from kvoffload_node.session.engines import Engine, Session

MIN_WRITES = 256
"""So many slots any engine may have reserved and not sealed; above, at most `MAX_WRITE_SHARE` of the capacity."""
MAX_WRITE_SHARE = 4
SHORT_RESERVATIONS = (*Shortage, RefusalReason.NOT_READY, RefusalReason.DRAINING, RefusalReason.RATE)
"""Every `Reserved.reason`."""


@dataclass(slots=True)
class Counters:
    """What `metrics.py` translates; counted since the daemon's start."""

    hits: int = 0
    misses: int = 0
    cross_engine_hits: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    deduplicated_bytes: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    steps: int = 0
    missed_deadlines: int = 0
    copied_by_rank: Counter[int] = field(default_factory=Counter)
    """Bytes that each rank says it copied into the region."""


class Traffic:
    """Serves the engines that are ready."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.counters = Counters()
        self.short_reservations: Counter[str] = Counter({reason.value: 0 for reason in SHORT_RESERVATIONS})
        self.paused = ""
        """Why nothing is served now, empty while it is."""

    def find(self, session: Session, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Offsets of the keys, -1 for a miss. `lease_found` must follow before anything else is handled."""
        engine = session.engine
        index = engine.tenant.index
        offsets = list(map(namespace.ready.get, keys, repeat(-1)))
        if engine.retired:
            ready, retired = index.ready, engine.retired
            offsets = [o if o >= 0 and ready[o].storer not in retired else -1 for o in offsets]
        return offsets

    def lease_found(self, session: Session, offsets: Sequence[int]) -> None:
        """Lease each hit to the session and count."""
        hits = [offset for offset in offsets if offset >= 0]
        self.count_lookups(hits=len(hits), misses=len(offsets) - len(hits))
        engine = session.engine
        self.counters.cross_engine_hits += engine.tenant.index.lease(session.holder, hits, engine.storer)

    def reserve(self, engine: Engine, count: int) -> tuple[list[int], str]:
        """Up to `count` slots for the engine to write, and why not all came."""
        offsets, reason = self._reserve(engine, count)
        if reason:
            self.short_reservations[reason] += 1
        return offsets, reason

    def _reserve(self, engine: Engine, count: int) -> tuple[list[int], str]:
        tenant, slab, account = engine.tenant, engine.slab, engine.pod.account
        if slab is None or not engine.ready:
            return [], RefusalReason.NOT_READY.value
        if self.paused:
            return [], RefusalReason.DRAINING.value
        allowed = max(MIN_WRITES, self._region.capacity_bytes // slab.slot_bytes // MAX_WRITE_SHARE) - engine.num_writes
        if allowed <= 0:
            return [], RefusalReason.RATE.value
        extents, index = self._region.extents, tenant.index
        offsets, reason = index.reserve(
            slab,
            min(count, allowed),
            owner=engine,
            account=account,
            find_extent=lambda before: extents.find_extent(tenant, slab, account, before),
        )
        if len(index.spare) < HEADROOM_EXTENTS:
            extents.wake()
        if index.is_disk_full and index.spare:
            why = index.journal.refusal
            self._region.failures.note(Part.RECORDS, f"records of more slots cannot be written, less is stored: {why}")
        return offsets, reason or (RefusalReason.RATE.value if len(offsets) < count else "")

    def published(self, engine: Engine, offsets: Sequence[int]) -> None:
        """These slots of the engine became READY."""
        row = engine.row
        if offsets and row is not None:
            self.counters.stored_bytes += len(offsets) * row.slot_bytes
            self.counters.deduplicated_bytes += len(offsets) * (row.plain_bytes - row.slot_bytes)
            engine.stored_bytes += len(offsets) * row.slot_bytes

    def report(self, session: Session, report: Report) -> None:
        """Count what a process says it moved."""
        engine, counters = session.engine, self.counters
        if report.stored_bytes:
            counters.copied_by_rank[session.rank] += report.stored_bytes
        engine.loaded_bytes += report.loaded_bytes
        counters.loaded_bytes += report.loaded_bytes
        counters.failed_loads += report.failed_loads
        counters.failed_stores += report.failed_stores
        counters.steps += report.steps
        counters.missed_deadlines += report.missed_deadlines
        engine.note = report.note or engine.note

    def count_lookups(self, *, hits: int, misses: int) -> None:
        """Count the keys of one look-up."""
        self.counters.hits += hits
        self.counters.misses += misses
