"""The error tree of kvoffload, in every process. Every message says what was found, what was needed and what to change.

KVOffloadError
├── InvalidSpec            a pool, region or setting asks what cannot be; retrying does not help
├── PagesUnavailable       the node cannot give the bytes now (asked, limit and free are in the message)
├── RegionUnusable         the mount, file or state folder is not what it must be
├── ProtocolError          a peer sent what the protocol does not allow: its session ends
│   └── FrameTooLarge
├── SessionRefused         a well-formed request is not allowed; carries a `RefusalReason`
├── DaemonUnavailable      no daemon answers in time: the engine goes on without offload
└── UnsupportedEngine      this vLLM, or its configuration, is one we leave alone

What becomes of them: the operator's tasks log them and try again, a pool's pass says an invalid spec in its condition
Ready, and kopf sees none of them; `kvoffload_node.session` alone makes them answers on a socket,
`kvoffload_engine.plugin` and `connector` alone "serve without offload".
"""

from enum import Enum


class RefusalReason(str, Enum):
    """Why a session or a request was refused; a closed set, used as metric label."""

    PROTOCOL_VERSION = "ProtocolVersion"
    MALFORMED = "Malformed"
    TOO_MANY_ENGINES = "TooManyEngines"
    TOO_MANY_ENGINES_IN_POD = "TooManyEnginesInPod"
    TOO_MANY_CONNECTIONS = "TooManyConnections"
    TOO_MANY_BYTES = "TooManyBytes"
    POOL_PAUSED = "PoolPaused"
    POOL_OBSERVED = "PoolObserved"
    DRAINING = "Draining"
    NOT_READY = "NotReady"
    RANK_CONFLICT = "RankConflict"
    SLOT_TOO_LARGE = "SlotTooLarge"
    RATE = "Rate"


class Shortage(str, Enum):
    """Why a reservation brings fewer slots than were asked for; on the wire in `Reserved.reason`, beside some of the
    above; a closed set, used as metric label."""

    QUOTA_LIMIT = "QuotaLimit"
    """The Kubernetes namespace is at its limit, and nothing of its own can be evicted."""
    ALLOCATING = "Allocating"
    """Pages are being allocated: ask again soon."""
    ALL_LEASED = "AllLeased"
    """Every slot is leased, being written, or guaranteed to others."""
    STATE_FULL = "StateFull"
    """The disk of the state folder does not take the records of more slots."""
    RECOVERING = "Recovering"
    """An engine of before the restart has not yet said what it holds: nothing is evicted until it has, or is dead."""


class KVOffloadError(Exception):
    """Root of the tree."""


class InvalidSpec(KVOffloadError):
    """A pool, region or setting asks what cannot be; retrying does not help."""


class PagesUnavailable(KVOffloadError):
    """The node cannot give the bytes now."""


class RegionUnusable(KVOffloadError):
    """The hugetlbfs mount, a region file or the state folder is not what it must be."""


class ProtocolError(KVOffloadError):
    """A peer sent what the protocol does not allow."""


class FrameTooLarge(ProtocolError):
    """A frame's length is zero or above the limit."""


class SessionRefused(KVOffloadError):
    """A well-formed request is not allowed."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DaemonUnavailable(KVOffloadError):
    """No daemon answers in time."""


class UnsupportedEngine(KVOffloadError):
    """This vLLM, or its configuration, is one we leave alone."""
