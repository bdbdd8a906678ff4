"""Pods, engines and sessions: who they are, what they hold. No sockets here.

Runs in the node daemon; made and changed by `registry.py`, used by `connection.py`, read by `status.py` and
`metrics.py`.

    Pod ──< Engine (one incarnation of an engine id) ──< Session (scheduler or rank) ──1 Connection or none
                 owns writes (index)                        holds leases (index), and a lock on its attachment file

A connection can break while its process lives: the session then stays, without a connection, until the process
connects again (and takes over what it held) or its lock is gone.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvoffload.api.region import ConfirmedLayout
from kvoffload.layout.rows import RankPart, Row, plan_row
from kvoffload.protocol.messages import LEFT_ALONE_PREFIX
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import Namespace, Slab, WriteOwner
from kvoffload_node.index.tenant import Holder
from kvoffload_node.region.extents import Tenant
from kvoffload_node.session.turns import Turns

if TYPE_CHECKING:
    from kvoffload_node.session.connection import Connection

SCHEDULER = -1
"""Rank of the scheduler's session."""


class EndReason(StrEnum):
    """Why a connection ended that was not refused; a closed set, used as metric label beside RefusalReason."""

    PEER_CLOSED = "PeerClosed"
    NO_HELLO = "NoHello"
    SLOW_READER = "SlowReader"
    SUCCEEDED = "Succeeded"
    """By another connection of the same process."""
    DAEMON_STOPS = "DaemonStops"
    SYSTEM_ERROR = "SystemError"
    INTERNAL_ERROR = "InternalError"


@dataclass(slots=True, eq=False)
class Pod:
    """A pod that the attacher handed over, or that a journaled attachment names."""

    uid: str
    namespace: str
    name: str
    predicted_layout: str
    tenant: Tenant
    account: Account
    turns: Turns
    engines: dict[str, "Engine"] = field(default_factory=dict)
    """The newest incarnation of each engine id."""
    num_connections: int = 0
    held_bytes: int = 0
    """Of the daemon's memory, by its connections: unfinished messages, and answers that are not read."""
    detached: bool = False
    """Its folder is gone; it is forgotten when its last engine is."""


@dataclass(slots=True, eq=False)
class Session:
    """One process of an engine, from its `Hello` until its lock is gone."""

    number: int
    engine: "Engine"
    rank: int
    process: bytes
    connection: "Connection | None" = None
    holder: Holder = field(default_factory=dict)
    mapped: bool = False
    part: RankPart | None = None
    reason: str = ""
    message: str = ""
    predecessors: list[int] = field(default_factory=list)
    """Numbers of the same process' earlier attachments: they count until it is known to have got this one's lock."""
    is_part: bool = False
    """Something was heard of the process but its `Hello`, over this connection or one before, or an earlier daemon
    journaled it: only then is its end a death that the engine misses."""
    recovered: bool = False
    """Journaled by an earlier daemon, and has not yet said what it still reads and writes."""
    claims: set[int] | None = None
    """Slots of before the restart that it said it still writes."""
    said_pins: Holder = field(default_factory=dict)
    """Leases of the parts of a re-assertion whose last part has not come."""
    said_writes: set[int] = field(default_factory=set)
    """And the writes in them."""
    unmapping: dict[int, object] = field(default_factory=dict)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether the next message over its connection says something new: that the process has this one's lock."""
        return not self.is_part or bool(self.predecessors)


@dataclass(slots=True, eq=False, kw_only=True)
class Engine(WriteOwner):
    """One incarnation of a vLLM engine: a scheduler and `world_size` ranks."""

    pod: Pod
    engine_id: str
    identity: bytes
    model: str = ""
    engine_version: str = ""
    agent_version: str = ""
    sessions: dict[int, Session] = field(default_factory=dict)
    row: Row | None = None
    slab: Slab | None = None
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    """0: the bound one, 1: the private one."""
    none_hash: bytes | None = None
    key_bytes: int = 0
    private: bool = False
    ready: bool = False
    broken: bool = False
    """One of its processes is dead: no other may take its place, a successor is another engine."""
    dying: int = 0
    """Bit r + 1 is set while rank r is dead and in quarantine, bit 0 for the scheduler."""
    stored_bytes: int = 0
    loaded_bytes: int = 0
    note: str = ""
    attached_since: float = field(default_factory=time.time)

    @property
    def tenant(self) -> Tenant:
        """The tenant of its pod."""
        return self.pod.tenant

    @property
    def is_left_alone(self) -> bool:
        """Whether it runs without offload, and only tells why."""
        return self.engine_id.startswith(LEFT_ALONE_PREFIX)

    @property
    def is_attached(self) -> bool:
        """Whether any of its processes is connected."""
        return any(session.connection is not None for session in self.sessions.values())

    @property
    def workers(self) -> list[Session]:
        """The ranks' sessions, in order of rank."""
        return [session for rank, session in sorted(self.sessions.items()) if rank >= 0]

    def plan_row(self, *, sharing_allowed: bool) -> Row | None:
        """The row, once every rank is connected and has mapped the region; None until then."""
        workers = [worker for worker in self.workers if worker.mapped and worker.connection is not None]
        if len(workers) < self.world_size:
            return None
        return plan_row([worker.part for worker in workers if worker.part], sharing_allowed=sharing_allowed)

    @property
    def layout(self) -> str:
        """`replicated`, `per-rank`, `shared` (some ranks share a part), `left-alone`, or empty until all ranks have
        said."""
        if self.is_left_alone:
            return ConfirmedLayout.LEFT_ALONE
        if self.row is None:
            return ""
        if self.row.is_replicated:
            return ConfirmedLayout.REPLICATED
        return ConfirmedLayout.SHARED if max(self.row.sharers) > 1 else ConfirmedLayout.PER_RANK

    @property
    def reason(self) -> str:
        """The first rank's reason why it is not replicated, or why the engine is left alone."""
        return next((session.reason for _, session in sorted(self.sessions.items()) if session.reason), "")

    @property
    def message(self) -> str:
        """That reason in words."""
        return next((session.message for _, session in sorted(self.sessions.items()) if session.message), "")
