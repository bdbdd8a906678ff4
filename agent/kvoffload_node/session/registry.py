"""The registry: which pods, engines and sessions there are, and what begins and ends with them.

Runs in the node daemon. `connection.py` calls it for `Hello` and when a socket ends; the sweep asks the kernel, by the
attachment locks, which processes are gone.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from kvoffload.api.pool import Mode
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import ProtocolError, RefusalReason, SessionRefused
from kvoffload.layout.rows import RankPart
from kvoffload.protocol.messages import (
    PROTOCOL_VERSION,
    Drain,
    EngineLost,
    EngineReady,
    FromEngine,
    Hello,
    Report,
    Revoke,
)
from kvoffload_node.index.slots import Namespace
from kvoffload_node.region.extents import HEADROOM_EXTENTS, Tenant
from kvoffload_node.session.engines import SCHEDULER, Engine, Pod, Session
from kvoffload_node.session.locks import AttachmentEntry, Attachments
from kvoffload_node.session.packing import pack_offsets
from kvoffload_node.session.timing import Durations

if TYPE_CHECKING:
    from kvoffload_node.region.region import Region
    from kvoffload_node.session.connection import Connection

log = logging.getLogger(__name__)


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
    missed_deadlines: int = 0
    copied_by_rank: Counter[int] = field(default_factory=Counter)
    """Bytes that each rank says it copied into the region."""


SWEEP_SECONDS = 0.25
"""How often the locks of sessions without a connection are tested."""


class Registry:
    """All pods, engines and sessions of one daemon."""

    def __init__(self, *, region: "Region", attachments: Attachments, quarantine_seconds: float) -> None:
        self.region = region
        self.attachments = attachments
        self.pods: dict[str, Pod] = {}
        self.engines: dict[int, Engine] = {}
        self.quarantine_seconds = quarantine_seconds
        self.refusals: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.draining = ""
        """Why no engine is taken any more, empty while the daemon serves."""
        self.connections: set[Connection] = set()
        self.counters = Counters()
        self.durations: dict[type, Durations] = {kind: Durations() for kind in get_args(FromEngine)}
        self._nobody: object | None = None
        self._nobody_until = 0.0
        self._refused: set[tuple[str, str]] = set()
        self._quarantine: list[tuple[float, Engine, int]] = []
        self._revocations: dict[object, tuple[set[Session], asyncio.Future[None]]] = {}

    # --- pods -------------------------------------------------------------------------------------------------------

    def add_pod(self, uid: str, namespace: str, name: str, predicted_layout: str) -> Pod:
        """The pod of this uid, made if it is new."""
        pod = self.pods.get(uid)
        if pod is None:
            tenant = self.region.tenant_for(namespace, uid)
            pod = Pod(uid, namespace, name, predicted_layout, tenant, self.region.account(namespace))
            self.pods[uid] = pod
        return pod

    def take_spec(self, spec: KVOffloadRegionSpec) -> None:
        """The pool was changed: what can change while engines are attached does."""
        was_paused = self.region.spec.mode is Mode.PAUSED
        self.region.take_spec(spec)
        if spec.mode is not Mode.ACTIVE and not was_paused:
            for engine in self.engines.values():
                for member in engine.sessions.values():
                    self._lose(member, f"the pool is {spec.mode.value}")
            self._tell_to_leave(f"the pool's mode is {spec.mode.value}")

    def drain(self, message: str) -> None:
        """Take no engine any more, and tell those that are here."""
        self.draining = message
        self._tell_to_leave(message)

    def _tell_to_leave(self, message: str) -> None:
        for connection in list(self.connections):
            connection.send(Drain(message))

    def close(self) -> None:
        """End every connection; leases and locks stay as they are for a successor."""
        for connection in list(self.connections):
            connection.abort("DaemonStops")

    # --- sessions ---------------------------------------------------------------------------------------------------

    def greet(self, pod: Pod, hello: Hello, connection: "Connection") -> tuple[Session, int]:
        """A process says hello: its session, and the locked descriptor to pass to it. Raises SessionRefused."""
        self._check_hello(hello)
        engine = self._engine_for(pod, hello)
        before = engine.sessions.get(hello.rank)
        session = Session(self.region.next_number(), engine, hello.rank, hello.process, connection)
        if hello.rank != SCHEDULER:
            session.part = RankPart(hello.part, hello.part_bytes)
            session.reason, session.message = hello.reason, hello.message
        lock = self.attachments.create(
            AttachmentEntry(
                number=session.number,
                engine=engine.number,
                pod_uid=pod.uid,
                pod_namespace=pod.namespace,
                pod_name=pod.name,
                predicted_layout=pod.predicted_layout,
                tenant=pod.tenant.name,
                engine_id=hello.engine_id,
                identity=hello.identity,
                world_size=hello.world_size,
                rank=hello.rank,
                process=hello.process,
            )
        )
        if before is not None:
            self._succeed(before, session)
        engine.sessions[hello.rank] = session
        engine.model = hello.model or engine.model
        engine.engine_version = hello.engine_version or engine.engine_version
        if hello.rank != SCHEDULER:
            pod.tenant.num_workers += 1
            self.region.extents.wake()
        return session, lock

    def _check_hello(self, hello: Hello) -> None:
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            raise SessionRefused(
                RefusalReason.PROTOCOL_VERSION,
                f"the engine speaks protocol {hello.protocol_min} to {hello.protocol_max}, this daemon "
                f"{PROTOCOL_VERSION}; recreate the pod so that it gets this daemon's library",
            )
        if self.draining:
            raise SessionRefused(RefusalReason.DRAINING, self.draining)
        self.region.check_serving()
        if (hello.role == "scheduler") != (hello.rank == SCHEDULER) or hello.rank >= hello.world_size:
            raise ProtocolError(f"role {hello.role} with rank {hello.rank} of {hello.world_size}")
        if hello.rank != SCHEDULER and not hello.part_bytes > 0:
            raise ProtocolError("a worker's part has no bytes")

    def _engine_for(self, pod: Pod, hello: Hello) -> Engine:
        """The engine that the process belongs to: the newest of its id, or a new one where its place is taken."""
        engine = pod.engines.get(hello.engine_id)
        if engine is not None:
            for session in list(engine.sessions.values()):
                if session.connection is None:
                    self._end_if_dead(session)
        if engine is not None and engine.number in self.engines:
            occupant = engine.sessions.get(hello.rank)
            same = (engine.world_size, engine.identity) == (hello.world_size, hello.identity)
            if not same and engine.is_attached:
                raise SessionRefused(
                    RefusalReason.RANK_CONFLICT,
                    f"engine {hello.engine_id} is attached with {engine.world_size} ranks and identity "
                    f"{engine.identity.hex()[:12]}; this process says {hello.world_size} ranks and identity "
                    f"{hello.identity.hex()[:12]}",
                )
            if same and (occupant is None or _is_same_process(occupant, hello)):
                return engine
        attached = sum(engine.is_attached for engine in self.engines.values())
        if attached >= self.region.spec.max_engines:
            raise SessionRefused(
                RefusalReason.TOO_MANY_ENGINES,
                f"{attached} engines are attached, maxEnginesPerNode is {self.region.spec.max_engines}",
            )
        number = self.region.next_number()
        engine = Engine(number, pod, hello.engine_id, hello.world_size, hello.identity, storer=number)
        pod.engines[hello.engine_id] = self.engines[number] = engine
        return engine

    def _succeed(self, before: Session, session: Session) -> None:
        """The same process has connected again: what it held stays held, until it says what it still needs."""
        self._lose(before, f"rank {before.rank} connects again")
        if before.connection is not None:
            before.connection.end("Succeeded")
        session.holder = before.holder
        session.recovered = before.recovered
        session.claims = before.claims
        session.unmapping = before.unmapping
        for token in set(session.unmapping.values()):
            waiting, _ = self._revocations[token]
            waiting.discard(before)
            waiting.add(session)
        self.attachments.remove(before.number)
        if before.rank != SCHEDULER:
            before.engine.tenant.num_workers -= 1

    def disconnected(self, session: Session, reason: str) -> None:
        """The session's socket is closed; whether its process lives is another question."""
        self.closed[reason] += 1
        session.connection = None
        if session.engine.sessions.get(session.rank) is session:
            self._lose(session, f"rank {session.rank} disconnected: {reason}")
            self._end_if_dead(session)

    def _end_if_dead(self, session: Session) -> bool:
        if self.attachments.is_held(session.number):
            return False
        engine = session.engine
        engine.tenant.index.release(session.holder)
        self._acknowledge_all(session)
        self.attachments.remove(session.number)
        del engine.sessions[session.rank]
        if session.rank != SCHEDULER:
            engine.tenant.num_workers -= 1
        self._quarantine.append((time.monotonic() + self.quarantine_seconds, engine, session.rank))
        self._settle_claims(engine)
        self._check_recovered(engine.tenant)
        if not engine.sessions:
            log.info("engine %s of pod %s/%s is gone", engine.engine_id, engine.pod.namespace, engine.pod.name)
            if engine.pod.engines.get(engine.engine_id) is engine:
                del engine.pod.engines[engine.engine_id]
        return True

    def sweep(self) -> None:
        """Ask the kernel about sessions without a connection; end quarantines that are over."""
        for engine in list(self.engines.values()):
            for session in list(engine.sessions.values()):
                if session.connection is None:
                    self._end_if_dead(session)
        now = time.monotonic()
        waiting = []
        for until, engine, rank in self._quarantine:
            if until > now:
                waiting.append((until, engine, rank))
                continue
            everyone = (1 << engine.world_size) - 1
            gone = everyone if not engine.sessions else (1 << rank if rank >= 0 else 0)
            engine.tenant.index.end_writes(engine, gone)
        self._quarantine = waiting
        if self._nobody is not None and now > self._nobody_until:
            for tenant in self.region.extents.tenants.values():
                if tenant.index.may_evict:
                    tenant.index.end_writes(self._nobody, 1)
        quarantined = {engine for _, engine, _ in waiting}
        for number, engine in list(self.engines.items()):
            if not engine.sessions and engine not in quarantined:
                del self.engines[number]

    # --- engines ----------------------------------------------------------------------------------------------------

    def mapped(self, session: Session) -> None:
        """A worker has mapped the region; the last one makes the engine ready."""
        session.mapped = True
        engine = session.engine
        row = engine.plan_row(sharing_allowed=self.region.sharing_allowed)
        if row is None:
            return
        if row.slot_bytes > self.region.extent_bytes:
            message = (
                f"a chunk's row is {row.slot_bytes} bytes, an extent of this pool {self.region.extent_bytes}; "
                "use a smaller block or chunk, or larger pages"
            )
            for member in engine.sessions.values():
                if member.connection is not None:
                    member.connection.refuse(SessionRefused(RefusalReason.SLOT_TOO_LARGE, message))
            return
        if engine.row != row:
            engine.namespaces.clear()
        engine.row = row
        engine.slab = engine.tenant.index.slab(row.slot_bytes)
        engine.ready = True
        for member in engine.sessions.values():
            self.announce(member)
        log.info(
            "engine %s of pod %s/%s is ready: %s, %d ranks, slots of %d bytes",
            engine.engine_id, engine.pod.namespace, engine.pod.name, engine.layout, engine.world_size, row.slot_bytes,
        )  # fmt: skip

    def announce(self, session: Session) -> None:
        """Tell a process of a ready engine where its bytes stand."""
        engine, row = session.engine, session.engine.row
        if not engine.ready or row is None or session.connection is None:
            return
        session.connection.send(
            EngineReady(
                replicated=row.is_replicated,
                slot_bytes=row.slot_bytes,
                part_offsets=row.part_offsets,
                sharers=row.sharers,
                sharer_index=row.sharer_index,
                reason=engine.reason,
            )
        )

    def _lose(self, session: Session, message: str) -> None:
        engine = session.engine
        if not engine.ready or session.rank == SCHEDULER:
            return
        engine.ready = False
        for member in engine.sessions.values():
            if member.connection is not None:
                member.connection.send(EngineLost(message))

    def bind(self, engine: Engine, none_hash: bytes, key_bytes: int, *, private: bool) -> Namespace:
        """The engine's namespaces, known once its row and its hash seed are. Raises SessionRefused."""
        if engine.row is None or not engine.ready:
            raise SessionRefused(RefusalReason.NOT_READY, "not all ranks of this engine have mapped the region yet")
        engine.none_hash, engine.key_bytes = none_hash, key_bytes
        engine.private = engine.private or private
        digest = hashlib.sha256()
        for part in (engine.identity, repr(engine.row).encode(), none_hash, key_bytes.to_bytes(2, "little")):
            digest.update(len(part).to_bytes(4, "little") + part)
        shared = digest.digest()
        digest.update(b"private" + engine.storer.to_bytes(8, "little"))
        private_digest = digest.digest()
        saved = engine.row.plain_bytes - engine.row.slot_bytes

        def namespace(digest: bytes) -> Namespace:
            return self.region.namespace(engine.tenant, digest, key_bytes=key_bytes, saved_per_slot=saved)

        engine.namespaces = {
            0: namespace(private_digest if engine.private else shared),
            1: namespace(private_digest + b"1"),
        }
        return engine.namespaces[0]

    def new_generation(self, engine: Engine, *, private: bool) -> None:
        """The engine's cache was reset: it no longer hits what it stored before; others do."""
        engine.retired.add(engine.storer)
        engine.storer = self.region.next_number()
        engine.private = engine.private or private
        if engine.none_hash is not None and engine.ready:
            self.bind(engine, engine.none_hash, engine.key_bytes, private=engine.private)

    # --- what engines do ---------------------------------------------------------------------------------------------

    def lookup(self, session: Session, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Offsets of the keys, -1 for a miss; each hit is leased to the session."""
        engine = session.engine
        index = engine.tenant.index
        get = namespace.ready.get
        offsets = [get(key, -1) for key in keys]
        hits = [offset for offset in offsets if offset >= 0]
        if engine.retired and hits:
            stale = {offset for offset in hits if index.ready[offset].storer in engine.retired}
            offsets = [-1 if offset in stale else offset for offset in offsets]
            hits = [offset for offset in hits if offset not in stale]
        self.count_lookups(len(hits), len(offsets) - len(hits))
        self.counters.cross_engine_hits += index.lease_hits(session.holder, hits, engine.storer)
        return offsets

    def reserve(self, engine: Engine, count: int) -> tuple[list[int], str]:
        """Up to `count` slots for the engine to write, and why not all came."""
        tenant, slab, account = engine.tenant, engine.slab, engine.pod.account
        if slab is None or not engine.ready:
            return [], RefusalReason.NOT_READY.value
        extents = self.region.extents
        reserved = tenant.index.reserve(
            slab,
            count,
            owner=engine,
            owner_number=engine.number,
            account=account,
            storer=engine.storer,
            ranks=engine.world_size,
            find_extent=lambda before: extents.find_extent(tenant, slab, account, before),
        )
        if len(tenant.index.spare) < HEADROOM_EXTENTS:
            extents.wake()
        return reserved

    def published(self, engine: Engine, offsets: Sequence[int]) -> None:
        """These slots of the engine became READY."""
        row = engine.row
        if offsets and row is not None:
            self.counters.stored_bytes += len(offsets) * row.slot_bytes
            self.counters.deduplicated_bytes += len(offsets) * (row.plain_bytes - row.slot_bytes)
            engine.saved_bytes += len(offsets) * (row.plain_bytes - row.slot_bytes)
            engine.stored_bytes += len(offsets) * row.slot_bytes

    def ended_before_restart(self, session: Session, offsets: Sequence[int]) -> None:
        """The process has ended writes that an earlier daemon gave out: they will not be READY, but are free sooner."""
        index = session.engine.tenant.index
        for offset in offsets:
            write = index.writes.get(offset)
            if write is not None and write.owner is session.engine and write.restored and session.rank >= 0:
                index.keep_pending(offset, write, ~(1 << session.rank))

    def report(self, session: Session, report: Report) -> None:
        """Count what a process says it moved."""
        engine, counters = session.engine, self.counters
        if report.stored_bytes:
            counters.copied_by_rank[session.rank] += report.stored_bytes
        engine.loaded_bytes += report.loaded_bytes
        counters.loaded_bytes += report.loaded_bytes
        counters.failed_loads += report.failed_loads
        counters.failed_stores += report.failed_stores
        counters.missed_deadlines += report.missed_deadlines
        engine.note = report.note or engine.note

    def count_lookups(self, hits: int, misses: int) -> None:
        """Count the keys of one look-up."""
        self.counters.hits += hits
        self.counters.misses += misses

    def count_refusal(self, pod: Pod, reason: RefusalReason) -> bool:
        """Count a refusal; True the first time for this pod and reason, which is then logged."""
        self.refusals[reason.value] += 1
        first = (pod.uid, reason.value) not in self._refused
        self._refused.add((pod.uid, reason.value))
        return first

    # --- after a restart --------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take up the attachments of an earlier daemon whose processes may still live."""
        for entry in list(self.attachments.read_all()):
            if not self.attachments.is_held(entry.number) or entry.tenant not in self.region.extents.tenants:
                self.attachments.remove(entry.number)
                continue
            pod = self.pods.get(entry.pod_uid)
            if pod is None:
                tenant = self.region.extents.tenants[entry.tenant]
                account = self.region.account(entry.pod_namespace)
                pod = Pod(entry.pod_uid, entry.pod_namespace, entry.pod_name, entry.predicted_layout, tenant, account)
                self.pods[entry.pod_uid] = pod
            engine = self.engines.get(entry.engine)
            if engine is None:
                engine = Engine(
                    entry.engine, pod, entry.engine_id, entry.world_size, entry.identity, self.region.next_number()
                )
                self.engines[entry.engine] = pod.engines[entry.engine_id] = engine
            session = Session(entry.number, engine, entry.rank, entry.process, recovered=True)
            engine.sessions[entry.rank] = session
            pod.tenant.num_workers += entry.rank != SCHEDULER
            pod.tenant.index.may_evict = False
        owners = {number: (engine, engine.world_size) for number, engine in self.engines.items()}
        nobody = object()
        for tenant in self.region.extents.tenants.values():
            tenant.index.restore(owners, self.region.accounts, nobody)
        self._nobody = nobody
        self._nobody_until = time.monotonic() + self.quarantine_seconds

    def reassert(self, session: Session, epoch: int, pins: list[int], writes: list[int]) -> None:
        """A process says what of before it still reads and writes; the rest is given up."""
        index = session.engine.tenant.index
        keep: dict[int, int] = {}
        for offset in pins:
            keep[offset] = keep.get(offset, 0) + 1
        if epoch == self.region.epoch:
            unknown = [offset for offset in keep if offset not in session.holder]
        else:
            unknown = [offset for offset in keep if offset not in index.ready]
        if unknown:
            raise ProtocolError(f"reassert of {len(unknown)} slots that this session cannot lease")
        old, session.holder = session.holder, {}
        index.lease(session.holder, pins)
        index.release(old)
        session.recovered = False
        session.claims = set(writes)
        engine = session.engine
        if session.rank == SCHEDULER and epoch == self.region.epoch:
            unused = [o for o, w in index.writes.items() if w.owner is engine and w.namespace is None]
            index.fail(engine, SCHEDULER, [offset for offset in unused if offset not in session.claims])
        self._settle_claims(engine)
        self._check_recovered(engine.tenant)

    def _settle_claims(self, engine: Engine) -> None:
        """Free the writes of before the restart that nobody claims, once each process has spoken or is dead."""
        if any(session.recovered for session in engine.sessions.values()):
            return
        index = engine.tenant.index
        writes = [(o, w) for o, w in index.writes.items() if w.owner is engine and w.restored]
        if not writes:
            return
        scheduler = engine.sessions.get(SCHEDULER)
        of_scheduler = scheduler.claims or set() if scheduler else set()
        alive = sum(1 << worker.rank for worker in engine.workers)
        for offset, write in writes:
            claimed = sum(1 << worker.rank for worker in engine.workers if worker.claims and offset in worker.claims)
            index.keep_pending(offset, write, alive if offset in of_scheduler else claimed)

    def _check_recovered(self, tenant: Tenant) -> None:
        """Eviction begins when every process of before the restart has spoken or is dead."""
        if tenant.index.may_evict:
            return
        sessions = (s for e in self.engines.values() if e.tenant is tenant for s in e.sessions.values())
        if not any(session.recovered for session in sessions):
            tenant.index.end_recovery()
            self.region.extents.wake()

    # --- revocation -------------------------------------------------------------------------------------------------

    async def revoke(self, tenant: Tenant, positions: list[int]) -> None:
        """Ask every worker of the tenant to unmap these extents; returns when each has, or is dead."""
        waiting = list(self._workers_of(tenant))
        if not waiting:
            return
        token = object()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._revocations[token] = (set(waiting), future)
        for session in waiting:
            for position in positions:
                session.unmapping[position * self.region.extent_bytes] = token
            self.ask_to_unmap(session)
        await future

    def ask_to_unmap(self, session: Session) -> None:
        """Tell a worker, also one that has connected again, which extents it still has to unmap."""
        if session.connection is not None and session.unmapping:
            session.connection.send(Revoke(pack_offsets(session.unmapping)))

    def revoked(self, session: Session, extents: list[int]) -> None:
        """A worker has unmapped these extents."""
        for extent in extents:
            token = session.unmapping.pop(extent, None)
            if token is not None:
                self._acknowledge(token, session)

    def _acknowledge_all(self, session: Session) -> None:
        for token in set(session.unmapping.values()):
            self._acknowledge(token, session)
        session.unmapping.clear()

    def _acknowledge(self, token: object, session: Session) -> None:
        waiting, future = self._revocations[token]
        waiting.discard(session)
        if not waiting:
            del self._revocations[token]
            if not future.done():
                future.set_result(None)

    def _workers_of(self, tenant: Tenant) -> Iterator[Session]:
        for engine in self.engines.values():
            if engine.tenant is tenant:
                yield from engine.workers


def _is_same_process(occupant: Session, hello: Hello) -> bool:
    """Whether the process was here before: by its own number; one without a number is judged by its lost connection."""
    if hello.process and occupant.process:
        return hello.process == occupant.process
    return occupant.connection is None
