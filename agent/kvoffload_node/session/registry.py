"""The registry: which pods, engines and sessions there are, and what begins and ends with them.

Runs in the node daemon. `connection.py` calls it for `Hello` and when a socket ends; the sweep asks the kernel, by the
attachment locks, which processes are gone.

    Hello of a process    known here (same number, or its connection was lost)    takes over its session
                          its rank is free, and none of the engine's is dead      joins the engine
                          otherwise                                               a new engine of the same id
"""

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, get_args

from kvoffload.api.pool import Mode, Sharing
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import RefusalReason, SessionRefused
from kvoffload.layout.rows import RankPart
from kvoffload.protocol.messages import LEFT_ALONE_PREFIX, Drain, FromEngine, Hello
from kvoffload_node.failures import Part, explain
from kvoffload_node.region.extents import Tenant
from kvoffload_node.region.region import Region
from kvoffload_node.session.admission import check_hello, check_room
from kvoffload_node.session.engines import SCHEDULER, EndReason, Engine, Pod, Session
from kvoffload_node.session.locks import AttachmentEntry, Attachments
from kvoffload_node.session.memory import (
    MAX_BYTES,
    MAX_BYTES_OF_POD,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_OF_POD,
    Budget,
)
from kvoffload_node.session.readiness import lose_rank, make_lost, make_ready
from kvoffload_node.session.recovery import Recovery
from kvoffload_node.session.revocation import Revocations
from kvoffload_node.session.timing import Durations
from kvoffload_node.session.traffic import Traffic
from kvoffload_node.session.turns import Floor, Turns

if TYPE_CHECKING:
    from kvoffload_node.session.connection import Connection

log = logging.getLogger(__name__)

MAX_UNCONFIRMED = 16
"""So many earlier attachments a process may hold that says nothing over the newest one; two are what an engine holds
that meets a daemon's death."""
SWEEP_SECONDS = 0.25
"""How often the locks of sessions without a connection are tested."""


class Registry:
    """All pods, engines and sessions of one daemon."""

    def __init__(self, *, region: Region, attachments: Attachments, quarantine_seconds: float) -> None:
        """Take up the processes of an earlier daemon, and read its journals."""
        self.region = region
        self.pods: dict[str, Pod] = {}
        self.engines: dict[int, Engine] = {}
        self.connections: set[Connection] = set()
        self.connection_budget = Budget(MAX_CONNECTIONS_OF_POD, MAX_CONNECTIONS)
        self.byte_budget = Budget(MAX_BYTES_OF_POD, MAX_BYTES)
        self.refusals: Counter[str] = Counter({reason.value: 0 for reason in RefusalReason})
        self.closed: Counter[str] = Counter({reason.value: 0 for reason in (*RefusalReason, *EndReason)})
        """Both with every reason from the start: Prometheus sees no increase in a series that begins with an event."""
        self.durations: dict[type, Durations] = {kind: Durations() for kind in get_args(FromEngine)}
        self.floor = Floor()
        self.traffic = Traffic(region)
        self.revocations = Revocations(region.extent_bytes)
        self.recovery = Recovery(region, self.floor, quarantine_seconds=quarantine_seconds)
        self.draining = ""
        """Why no engine is taken any more, empty while the daemon serves."""
        self._attachments = attachments
        self._quarantine_seconds = quarantine_seconds
        self._quarantine: list[tuple[float, Engine, int]] = []
        """When it is over, and the rank (or scheduler) of the engine that is dead."""
        self._refused: set[tuple[str, str]] = set()
        for entry in self.recovery.read_attachments(attachments):
            before = self.recovery.take_up(entry, self.pods, self.engines)
            if before is not None:
                attachments.remove(before.number)
        for engine in self.recovery.restore_slots(self.engines):
            engine.broken = True
            for rank in set(range(engine.world_size)) - engine.sessions.keys():
                self._put_in_quarantine(engine, rank)

    # --- pods -------------------------------------------------------------------------------------------------------

    def add_pod(self, uid: str, namespace: str, name: str, predicted_layout: str) -> Pod:
        """The pod of this uid, made if it is new."""
        pod = self.pods.get(uid)
        if pod is None:
            tenant = self.region.tenant_for(namespace, uid)
            account = self.region.account(namespace)
            pod = Pod(uid, namespace, name, predicted_layout, tenant, account, Turns(self.floor))
            self.pods[uid] = pod
        pod.detached = pod.tenant.is_abandoned = False
        return pod

    def remove_pod(self, uid: str) -> None:
        """The pod's folder is gone: forget the pod when its last engine is."""
        pod = self.pods.get(uid)
        if pod is not None:
            pod.detached = True

    # --- what the pool asks -----------------------------------------------------------------------------------------

    def take_spec(self, spec: KVOffloadRegionSpec) -> None:
        """The pool was changed: what can change while engines are attached does."""
        before = self.region.spec.mode
        self.region.take_spec(spec)
        if spec.mode is before or self.draining:
            return
        if spec.mode is Mode.ACTIVE:
            self.traffic.paused = ""
            for engine in self.engines.values():
                make_ready(engine, self.region)
        else:
            self.traffic.paused = f"the pool's mode is {spec.mode.value}"
            for engine in self.engines.values():
                make_lost(engine, self.traffic.paused)
            self._tell_to_leave(self.traffic.paused)

    def drain(self, message: str) -> None:
        """Serve nothing new, take no engine any more, and tell those that are here."""
        self.draining = self.traffic.paused = message
        self._tell_to_leave(message)

    def _tell_to_leave(self, message: str) -> None:
        for connection in list(self.connections):
            connection.send(Drain(message))

    def close(self) -> None:
        """End every connection; leases and locks stay as they are for a successor."""
        for connection in list(self.connections):
            connection.abort(EndReason.DAEMON_STOPS)

    async def revoke(self, tenant: Tenant, positions: list[int]) -> None:
        """Returns when no process of the tenant maps these extents any more."""
        workers = [
            worker
            for engine in self.engines.values()
            if engine.tenant is tenant
            for worker in engine.workers
            if worker.mapped or worker.recovered
        ]
        await self.revocations.revoke(workers, positions)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def greet(self, pod: Pod, hello: Hello, connection: "Connection") -> tuple[Session, int]:
        """A process says hello: its session, and the locked descriptor to pass to it. Raises SessionRefused."""
        check_hello(hello, self.region, draining=self.draining)
        engine = self._engine_for(pod, hello)
        before = engine.sessions.get(hello.rank)
        if before is not None:
            self._forget_let_go(before)
        session = Session(self.region.next_number(), engine, hello.rank, hello.process, connection)
        if hello.rank != SCHEDULER:
            session.part = RankPart(hello.part, hello.part_bytes)
        if hello.rank != SCHEDULER or engine.is_left_alone:
            session.reason, session.message = hello.reason, hello.message
        lock = self._create_attachment(
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
        # Only now: an engine without a session would be forgotten by the sweep, and be found by its id all the same.
        pod.engines[hello.engine_id] = self.engines[engine.number] = engine
        if before is not None:
            self._succeed(before, session)
        engine.sessions[hello.rank] = session
        engine.model = hello.model or engine.model
        engine.engine_version = hello.engine_version or engine.engine_version
        engine.agent_version = hello.agent_version or engine.agent_version
        if hello.rank != SCHEDULER:
            pod.tenant.num_workers += 1
            self.region.extents.wake()
        return session, lock

    def _create_attachment(self, entry: AttachmentEntry) -> int:
        try:
            lock = self._attachments.create(entry)
        except OSError as error:
            why = explain(error, self._attachments.folder)
            self.region.failures.note(Part.ATTACHMENT, f"engines cannot attach, what they hold cannot be kept: {why}")
            raise
        self.region.failures.clear(Part.ATTACHMENT)
        return lock

    def _engine_for(self, pod: Pod, hello: Hello) -> Engine:
        """The engine that the process belongs to, or a new one that nobody knows yet. Raises SessionRefused."""
        engine = pod.engines.get(hello.engine_id)
        if engine is not None:
            self._end_dead_sessions(engine)
            occupant = engine.sessions.get(hello.rank)
            if (engine.world_size, engine.identity) == (hello.world_size, hello.identity):
                if (occupant is None and not engine.broken) or (occupant and _is_same_process(occupant, hello)):
                    return engine
            elif engine.is_attached and not engine.broken:
                raise SessionRefused(
                    RefusalReason.RANK_CONFLICT,
                    f"engine {hello.engine_id} is attached with {engine.world_size} ranks and identity "
                    f"{engine.identity.hex()[:12]}; this process says {hello.world_size} ranks and identity "
                    f"{hello.identity.hex()[:12]}",
                )
        check_room(
            pod,
            self.engines.values(),
            self.region.spec.max_engines,
            is_left_alone=hello.engine_id.startswith(LEFT_ALONE_PREFIX),
            end_dead_sessions=self._end_dead_sessions,
        )
        number = self.region.next_number()
        return Engine(
            number=number,
            storer=number,
            world_size=hello.world_size,
            pod=pod,
            engine_id=hello.engine_id,
            identity=hello.identity,
        )

    def _succeed(self, before: Session, session: Session) -> None:
        """The same process has connected again: what it held stays held, until it says what it still needs."""
        lose_rank(before, "its process connects again")
        if before.connection is not None:
            before.connection.end(EndReason.SUCCEEDED)
        session.holder, before.holder = before.holder, {}
        session.recovered, session.is_part = before.recovered, before.is_part
        session.claims = before.claims
        self.revocations.succeeded(before, session)
        session.predecessors = [*before.predecessors, before.number]
        if before.rank != SCHEDULER:
            before.engine.tenant.num_workers -= 1

    def _forget_let_go(self, session: Session) -> None:
        """Earlier attachments that the process itself has let go of tell no more. Raises SessionRefused."""
        kept = []
        for number in session.predecessors:
            if self._attachments.is_held(number):
                kept.append(number)
            else:
                self._attachments.remove(number)
        session.predecessors = kept
        if len(kept) >= MAX_UNCONFIRMED:
            raise SessionRefused(
                RefusalReason.TOO_MANY_CONNECTIONS,
                f"this process holds {len(kept)} attachments and has sent nothing over the newest one; close them",
            )

    def confirm(self, session: Session) -> None:
        """The process has sent a message over its new connection: it has the new lock, so the old one tells no more."""
        for number in session.predecessors:
            self._attachments.remove(number)
        session.predecessors = []
        session.is_part = True

    def mapped(self, session: Session) -> None:
        """A worker has mapped the region; the last one makes the engine ready."""
        session.mapped = True
        if not self.traffic.paused:
            make_ready(session.engine, self.region)

    def disconnected(self, session: Session | None, reason: str) -> None:
        """A connection is closed; whether the session's process lives is another question."""
        self.closed[reason] += 1
        if session is None:
            return
        session.connection = None
        if session.engine.sessions.get(session.rank) is session:
            lose_rank(session, f"disconnected ({reason})")
            self._end_dead_sessions(session.engine)

    def is_first(self, pod: Pod, reason: str) -> bool:
        """Whether this is the pod's first refusal, or end of a connection, for this reason: that one is logged."""
        first = (pod.uid, reason) not in self._refused
        self._refused.add((pod.uid, reason))
        return first

    # --- ends -------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Ask the kernel about sessions without a connection; end quarantines that are over; forget what is gone.

        Raises OSError where a file could not be removed, or a lock not be asked: the next sweep goes on.
        """
        for engine in list(self.engines.values()):
            self._end_dead_sessions(engine)
        self._end_quarantines()
        self.recovery.end_quarantine()
        if self.region.extents.surplus:
            self.region.extents.wake()  # something may have been let go of
        for number, engine in list(self.engines.items()):
            if not engine.sessions and not engine.dying:
                del self.engines[number]
                self.forget_namespaces()
        slabs = {engine.slab for engine in self.engines.values()}
        for tenant in self.region.extents.tenants.values():
            tenant.index.forget_slabs(slabs)
        for uid, pod in list(self.pods.items()):
            if pod.detached and not any(engine.pod is pod for engine in self.engines.values()):
                del self.pods[uid]
                self._refused = {entry for entry in self._refused if entry[0] != uid}
                if self.region.spec.sharing is Sharing.POD:
                    pod.tenant.is_abandoned = True
        for tenant in [tenant for tenant in self.region.extents.tenants.values() if tenant.is_abandoned]:
            self.region.extents.abandon(tenant)
            if not tenant.positions:
                self.region.remove_tenant(tenant)
        self._attachments.remove_left()

    def forget_namespaces(self) -> None:
        """Drop namespaces that nobody is bound to and that hold nothing: an engine's end or generation leaves some."""
        self.region.forget_namespaces({n for e in self.engines.values() for n in e.namespaces.values()})

    def _end_dead_sessions(self, engine: Engine) -> None:
        for session in list(engine.sessions.values()):
            if session.connection is None and not any(
                self._attachments.is_held(number) for number in (session.number, *session.predecessors)
            ):
                self._end(session)

    def _end(self, session: Session) -> None:
        """The session's process is dead, or gave its first attempt to attach up: then it was never part of the engine,
        and comes again, maybe, to the others that are."""
        engine = session.engine
        engine.tenant.index.release(session.holder)
        self.revocations.died(session)
        for number in (session.number, *session.predecessors):
            self._attachments.remove(number)
        del engine.sessions[session.rank]
        if session.rank != SCHEDULER:
            engine.tenant.num_workers -= 1
        if session.is_part:
            engine.broken = True
            self._put_in_quarantine(engine, session.rank)
        self.recovery.settle(engine)
        self.recovery.check(engine.tenant, self.engines.values())
        if not engine.sessions:
            log.info("engine %s of pod %s/%s is gone", engine.engine_id, engine.pod.namespace, engine.pod.name)
            if engine.pod.engines.get(engine.engine_id) is engine:
                del engine.pod.engines[engine.engine_id]

    def _put_in_quarantine(self, engine: Engine, rank: int) -> None:
        """The rank's process is dead, but a copy that its device began may still land."""
        engine.dying |= 1 << (rank + 1)
        self._quarantine.append((time.monotonic() + self._quarantine_seconds, engine, rank))

    def _end_quarantines(self) -> None:
        now = time.monotonic()
        over = [entry for entry in self._quarantine if entry[0] <= now]
        self._quarantine = [entry for entry in self._quarantine if entry[0] > now]
        for _, engine, rank in over:
            engine.dying &= ~(1 << (rank + 1))
            if not engine.sessions and not engine.dying:
                engine.tenant.index.end_writes(engine, (1 << engine.world_size) - 1)
            elif rank != SCHEDULER:
                engine.tenant.index.end_writes(engine, 1 << rank)


def _is_same_process(occupant: Session, hello: Hello) -> bool:
    """Whether the process was here before: told by its own number, or, where it has none, by its lost connection."""
    if hello.process and occupant.process:
        return hello.process == occupant.process
    return occupant.connection is None
