"""What each message of an engine asks, and the answer: one function a message, and the table of them.

Runs in the node daemon's event loop, called by `connection.py` for every message after the `Hello`. A ProtocolError
that is raised here ends the connection, a SessionRefused is answered with its reason.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvoffload.errors import ProtocolError
from kvoffload.protocol.messages import (
    OFFSET_BYTES,
    Assign,
    Bind,
    Bound,
    Fail,
    Found,
    Generation,
    Lookup,
    Mapped,
    Pin,
    Reassert,
    Report,
    Reserve,
    Reserved,
    Revoked,
    Seal,
    Unpin,
)
from kvoffload_node.session.engines import SCHEDULER, Engine, Session
from kvoffload_node.session.packing import pack_offsets, unpack_keys, unpack_offsets
from kvoffload_node.session.readiness import bind, start_generation

if TYPE_CHECKING:
    from kvoffload_node.session.connection import Connection

_MISS = (-1).to_bytes(OFFSET_BYTES, "little", signed=True)


def _on_mapped(connection: "Connection", session: Session, _: Mapped) -> None:
    if session.rank == SCHEDULER:
        raise ProtocolError("Mapped from a scheduler")
    connection.registry.mapped(session)


def _on_bind(connection: "Connection", session: Session, message: Bind) -> None:
    engine = _engine_of_scheduler(session)
    namespace = bind(
        engine,
        connection.registry.region,
        message.none_hash,
        key_bytes=message.key_bytes,
        private=message.private,
    )
    connection.send(Bound(len(namespace.ready)))


def _on_lookup(connection: "Connection", session: Session, message: Lookup) -> None:
    engine = session.engine
    key_bytes = engine.key_bytes
    namespace = engine.namespaces.get(message.namespace)
    traffic = connection.registry.traffic
    if namespace is None or not engine.ready or traffic.paused:
        if key_bytes == 0:
            raise ProtocolError("Lookup before Bind")
        count = len(message.keys) // key_bytes
        connection.send(Found(message.request, _MISS * count))
        traffic.count_lookups(hits=0, misses=count)
        return
    keys = unpack_keys(message.keys, key_bytes)
    offsets = traffic.find(session, namespace, keys)
    # Answered first, leased next: nothing else is handled between, and the scheduler waits for the answer only.
    connection.send(Found(message.request, pack_offsets(offsets)))
    traffic.lease_found(session, offsets)


def _on_pin(_: "Connection", session: Session, message: Pin) -> None:
    session.engine.tenant.index.pin(session.holder, unpack_offsets(message.offsets))


def _on_unpin(_: "Connection", session: Session, message: Unpin) -> None:
    session.engine.tenant.index.unpin(session.holder, unpack_offsets(message.offsets))


def _on_reserve(connection: "Connection", session: Session, message: Reserve) -> None:
    engine = _engine_of_scheduler(session)
    offsets, reason = connection.registry.traffic.reserve(engine, message.count)
    connection.send(Reserved(message.request, connection.registry.region.epoch, pack_offsets(offsets), reason))


def _on_assign(connection: "Connection", session: Session, message: Assign) -> None:
    engine = _engine_of_scheduler(session)
    namespace, index = engine.namespaces.get(message.namespace), engine.tenant.index
    if engine.key_bytes == 0:
        raise ProtocolError("Assign before Bind")
    offsets = unpack_offsets(message.offsets)
    keys = unpack_keys(message.keys, engine.key_bytes)
    if len(keys) != len(offsets):
        raise ProtocolError(f"{len(keys)} keys for {len(offsets)} slots")
    if message.epoch != connection.registry.region.epoch:
        return
    if namespace is None:  # the row became another one, or the Bind was refused, while this was on its way
        index.assign_nothing(engine, offsets)
    else:
        connection.registry.traffic.published(engine, index.assign(engine, namespace, zip(offsets, keys, strict=True)))


def _on_seal(connection: "Connection", session: Session, message: Seal) -> None:
    if session.rank == SCHEDULER:
        raise ProtocolError("Seal from a scheduler")
    offsets = unpack_offsets(message.offsets)
    engine = session.engine
    if message.epoch != connection.registry.region.epoch:
        connection.registry.recovery.ended(session, offsets)
        return
    connection.registry.traffic.published(engine, engine.tenant.index.seal(engine, session.rank, offsets))


def _on_fail(connection: "Connection", session: Session, message: Fail) -> None:
    offsets = unpack_offsets(message.offsets)
    index = session.engine.tenant.index
    if message.drop:
        index.drop(session.holder, offsets)
    elif message.epoch != connection.registry.region.epoch:
        connection.registry.recovery.ended(session, offsets)
    else:
        index.fail(session.engine, session.rank, offsets)


def _on_generation(connection: "Connection", session: Session, message: Generation) -> None:
    start_generation(_engine_of_scheduler(session), connection.registry.region, private=message.private)
    connection.registry.forget_namespaces()


def _on_reassert(connection: "Connection", session: Session, message: Reassert) -> None:
    registry = connection.registry
    pins, writes = unpack_offsets(message.pins), unpack_offsets(message.writes)
    registry.recovery.reassert(session, message.epoch, pins, writes, more=message.more)
    registry.recovery.check(session.engine.tenant, registry.engines.values())


def _on_revoked(connection: "Connection", session: Session, message: Revoked) -> None:
    connection.registry.revocations.unmapped(session, unpack_offsets(message.extents))


def _on_report(connection: "Connection", session: Session, message: Report) -> None:
    connection.registry.traffic.report(session, message)


def _engine_of_scheduler(session: Session) -> Engine:
    if session.rank != SCHEDULER:
        raise ProtocolError(f"rank {session.rank} sent what only a scheduler may")
    return session.engine


HANDLERS: dict[type, "Callable[[Connection, Session, Any], None]"] = {
    Mapped: _on_mapped,
    Bind: _on_bind,
    Lookup: _on_lookup,
    Pin: _on_pin,
    Unpin: _on_unpin,
    Reserve: _on_reserve,
    Assign: _on_assign,
    Seal: _on_seal,
    Fail: _on_fail,
    Generation: _on_generation,
    Reassert: _on_reassert,
    Revoked: _on_revoked,
    Report: _on_report,
}
