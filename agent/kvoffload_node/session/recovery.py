"""After a restart: who was here before, what they still read and write, and when eviction may begin again.

Runs in the node daemon, called by `registry.py`. A journaled attachment whose lock is held is a process that may
still touch the region: READY slots are served at once, but nothing is evicted in its tenant, and nothing it may be
writing is given out, until it has connected again and re-asserted, or is dead.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from kvoffload.errors import ProtocolError
from kvoffload.protocol.messages import LEFT_ALONE_PREFIX
from kvoffload_node.index.restore import has_bytes, restore, restored_writes, revive
from kvoffload_node.index.slots import WriteOwner
from kvoffload_node.region.extents import Tenant
from kvoffload_node.region.region import Region
from kvoffload_node.session.engines import SCHEDULER, Engine, Pod, Session
from kvoffload_node.session.locks import AttachmentEntry, Attachments
from kvoffload_node.session.turns import Floor, Turns


class Recovery:
    """What is left to settle of an earlier daemon's time."""

    def __init__(self, region: Region, floor: Floor, *, quarantine_seconds: float) -> None:
        self._region = region
        self._floor = floor
        self._nobody = WriteOwner(number=0, storer=0, world_size=1)
        """Owns what dead engines were writing and what was dropped under a reader."""
        self._nobody_until = time.monotonic() + quarantine_seconds

    def read_attachments(self, attachments: Attachments) -> Iterator[AttachmentEntry]:
        """Those of processes that may still touch the region; the others are forgotten."""
        for entry in list(attachments.read_all()):
            may_touch = not entry.engine_id.startswith(LEFT_ALONE_PREFIX) and attachments.is_held(entry.number)
            if may_touch and entry.tenant in self._region.extents.tenants:
                yield entry
            else:
                attachments.remove(entry.number)

    def take_up(self, entry: AttachmentEntry, pods: dict[str, Pod], engines: dict[int, Engine]) -> Session | None:
        """Make the session of a journaled attachment, with its engine and pod if they are the first of theirs.

        Returns the session that it replaces: the same process, which had just connected again when the daemon died.
        """
        pod = pods.get(entry.pod_uid)
        if pod is None:
            tenant = self._region.extents.tenants[entry.tenant]
            account = self._region.account(entry.pod_namespace)
            uid, namespace, name = entry.pod_uid, entry.pod_namespace, entry.pod_name
            pod = Pod(uid, namespace, name, entry.predicted_layout, tenant, account, Turns(self._floor))
            pod.detached = True  # until the attacher hands it over: it may be gone since
            pods[entry.pod_uid] = pod
        engine = engines.get(entry.engine)
        if engine is None:
            engine = Engine(
                number=entry.engine,
                storer=self._region.next_number(),
                world_size=entry.world_size,
                pod=pod,
                engine_id=entry.engine_id,
                identity=entry.identity,
            )
            engines[entry.engine] = pod.engines[entry.engine_id] = engine
        before = engine.sessions.get(entry.rank)
        engine.sessions[entry.rank] = Session(
            entry.number, engine, entry.rank, entry.process, is_part=True, recovered=True
        )
        if before is None and entry.rank != SCHEDULER:
            pod.tenant.num_workers += 1
        pod.tenant.index.may_evict = False
        return before

    def restore_slots(self, engines: dict[int, Engine]) -> list[Engine]:
        """Read the journals. Returns engines that lack a rank which may have been writing: those ranks are dead."""
        for tenant in self._region.extents.tenants.values():
            restore(tenant.index, engines, self._region.accounts, self._nobody)
        return [engine for engine in engines.values() if engine.num_writes and len(engine.workers) < engine.world_size]

    def reassert(self, session: Session, epoch: int, pins: Sequence[int], writes: Sequence[int], *, more: bool) -> None:
        """A process says what of before it still reads and writes; with the last part (no `more` follows) the rest is
        given up. Raises ProtocolError.

        Leases are the scheduler's: what a rank reads is leased by it, and a rank has no way to give a lease back.
        """
        engine, index = session.engine, session.engine.tenant.index
        if session.rank != SCHEDULER:
            pins = ()
        said = session.said_pins
        self._check_pins(session, epoch, pins)
        for offset in pins:
            said[offset] = said.get(offset, 0) + 1
        # what it does not write is no claim: a process could fill the daemon's memory with numbers
        session.said_writes.update(
            o for o in writes if (write := index.writes.get(o)) is not None and write.owner is engine
        )
        if not more:
            self._check_pins(session, epoch, said)  # what it said first may have gone since
            self._take_over(session)

    def _take_over(self, session: Session) -> None:
        """The process has said all: it leases and writes that, and nothing else of before."""
        engine, index, said = session.engine, session.engine.tenant.index, session.said_pins
        for offset in said:
            revive(index, offset, self._nobody)
        old, session.holder = session.holder, {}
        index.lease(session.holder, said)
        session.holder.update(said)
        index.release(old)
        session.recovered = False
        session.claims = session.said_writes
        session.said_pins, session.said_writes = {}, set()
        if session.rank == SCHEDULER:
            unassigned = list(index.unassigned(engine))
            index.fail(engine, SCHEDULER, [o for o in unassigned if o not in session.claims])
            # their Assign was lost with the connection before
            index.assign_nothing(engine, [o for o in unassigned if o in session.claims])
        self.settle(engine)

    def _check_pins(self, session: Session, epoch: int, pins: Collection[int]) -> None:
        index = session.engine.tenant.index
        if epoch == self._region.epoch:
            unknown = sum(offset not in session.holder for offset in pins)
        else:
            unknown = sum(not has_bytes(index, offset, self._nobody) for offset in pins)
        if unknown:
            raise ProtocolError(f"reassert of {unknown} slots that hold nothing for this session")

    def settle(self, engine: Engine) -> None:
        """Once each process of the engine has spoken or is dead, free those writes of before that no rank claims: one
        that has sealed its part says no more, and one that has not heard of it yet will not begin it."""
        if any(session.recovered for session in engine.sessions.values()):
            return
        for offset, write in restored_writes(engine.tenant.index, engine):
            claimed = sum(1 << worker.rank for worker in engine.workers if offset in (worker.claims or ()))
            engine.tenant.index.keep_pending(offset, write, (engine.dying >> 1) | claimed)

    def ended(self, session: Session, offsets: Iterable[int]) -> None:
        """A rank has ended writes that an earlier daemon gave out: they will not be READY, but are free sooner."""
        index = session.engine.tenant.index
        for offset in offsets:
            write = index.writes.get(offset)
            if write is not None and write.owner is session.engine and write.restored and session.rank >= 0:
                index.keep_pending(offset, write, ~(1 << session.rank))

    def check(self, tenant: Tenant, engines: Iterable[Engine]) -> None:
        """Eviction begins when every process of before the restart has spoken or is dead."""
        if not tenant.index.may_evict and not any(
            session.recovered for engine in engines if engine.tenant is tenant for session in engine.sessions.values()
        ):
            tenant.index.end_recovery()
            self._region.extents.wake()

    def end_quarantine(self) -> None:
        """Free what belongs to nobody, once readers have spoken and no write can land any more."""
        if self._nobody.num_writes and time.monotonic() > self._nobody_until:
            for tenant in self._region.extents.tenants.values():
                if tenant.index.may_evict:
                    tenant.index.end_writes(self._nobody, 1)
