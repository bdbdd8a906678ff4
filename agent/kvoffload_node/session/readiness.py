"""When an engine may be served: all its ranks have mapped, the row is planned, the scheduler has bound its namespaces.

Runs in the node daemon, called by `registry.py`, `connection.py` and `requests.py`. Until then, and again when a rank
is lost, every look-up is a miss and nothing is stored.
"""

import hashlib
import logging

from kvoffload.errors import RefusalReason, SessionRefused
from kvoffload.protocol.messages import EngineLost, EngineReady
from kvoffload_node.index.slots import Namespace
from kvoffload_node.region.region import Region
from kvoffload_node.session.engines import SCHEDULER, Engine, Session

log = logging.getLogger(__name__)

MAX_RETIRED = 1024
"""Generations that an engine remembers as its own before those of which nothing is stored any more are forgotten."""


def make_ready(engine: Engine, region: Region) -> None:
    """Plan the row if every rank has mapped, and tell all of the engine's processes."""
    row = engine.plan_row(sharing_allowed=region.sharing_allowed)
    if row is None or engine.ready:
        return
    if row.slot_bytes > region.extent_bytes:
        refused = SessionRefused(
            RefusalReason.SLOT_TOO_LARGE,
            f"a chunk's row is {row.slot_bytes} bytes, an extent of this pool {region.extent_bytes}; use a smaller "
            "block or chunk, or a pool of more capacity or larger pages",
        )
        engine.note = str(refused)
        for member in engine.sessions.values():
            if member.connection is not None:
                member.connection.refuse(refused)
        return
    if engine.row != row:
        engine.namespaces.clear()
    engine.row = row
    engine.slab = engine.tenant.index.slab(row.slot_bytes)
    engine.ready = True
    for member in engine.sessions.values():
        announce(member)
    log.info(
        "engine %s of pod %s/%s (vLLM %s, agent %s) is ready: %s%s, %d ranks, slots of %d bytes",
        engine.engine_id,
        engine.pod.namespace,
        engine.pod.name,
        engine.engine_version or "unknown",
        engine.agent_version or "unknown",
        engine.layout,
        f" ({engine.reason})" if engine.reason else "",
        engine.world_size,
        row.slot_bytes,
    )


def announce(session: Session) -> None:
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
            reason=engine.reason[:256],
        )
    )


def make_lost(engine: Engine, message: str) -> None:
    """A rank is gone: the engine is served again when all are back."""
    if not engine.ready:
        return
    engine.ready = False
    for member in engine.sessions.values():
        if member.connection is not None:
            member.connection.send(EngineLost(message))


def lose_rank(session: Session, message: str) -> None:
    """The session's process is gone or connects again; without a scheduler the ranks stay ready."""
    if session.rank != SCHEDULER:
        make_lost(session.engine, f"rank {session.rank}: {message}")


def bind(engine: Engine, region: Region, none_hash: bytes, *, key_bytes: int, private: bool) -> Namespace:
    """The engine's namespaces, known once its row and its hash seed are. Raises SessionRefused."""
    # Kept although it may be refused: the look-up that follows at once is a miss then, and no breach of the protocol.
    engine.none_hash, engine.key_bytes = none_hash, key_bytes
    engine.private = engine.private or private
    if engine.row is None or not engine.ready:
        engine.namespaces.clear()  # they may have been of keys of another length
        raise SessionRefused(RefusalReason.NOT_READY, "not all ranks of this engine have mapped the region yet")
    digest = hashlib.sha256()
    for part in (engine.identity, repr(engine.row).encode(), none_hash, key_bytes.to_bytes(2, "little")):
        digest.update(len(part).to_bytes(4, "little") + part)
    shared = digest.digest()
    digest.update(b"private" + engine.storer.to_bytes(8, "little"))
    own = digest.digest()
    saved = engine.row.plain_bytes - engine.row.slot_bytes

    def namespace(digest: bytes) -> Namespace:
        return region.namespace(engine.tenant, digest, key_bytes=key_bytes, saved_per_slot=saved)

    engine.namespaces = {0: namespace(own if engine.private else shared), 1: namespace(own + b"1")}
    return engine.namespaces[0]


def start_generation(engine: Engine, region: Region, *, private: bool) -> None:
    """The engine's cache was reset: it no longer hits what it stored before; others do."""
    engine.retired.add(engine.storer)
    if len(engine.retired) > MAX_RETIRED:
        engine.retired &= engine.tenant.index.storers()
    engine.storer = region.next_number()
    engine.private = engine.private or private
    if engine.none_hash is not None and engine.ready:
        bind(engine, region, engine.none_hash, key_bytes=engine.key_bytes, private=engine.private)
