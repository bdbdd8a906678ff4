"""Messages of the session protocol, one msgspec struct each; `docs/design/0001-contracts.md` tells the order of a
session.

Runs in the node daemon, the attacher and every vLLM process. A struct is encoded as a msgpack array whose first item
is its tag, so field order is the wire format: append only, and raise `PROTOCOL_VERSION` when an old peer would
misread a message. Bounds stand in the types: decoding refuses what is outside them. Offsets are packed little-endian
int64, keys are packed bytes of one length, because a list of a thousand Python objects costs more than the look-up
itself.
"""

from itertools import zip_longest
from typing import Annotated

import msgspec

from kvoffload.layout.rows import MAX_RANKS

PROTOCOL_VERSION = 2
"""The version this code speaks; `Hello` carries the range that its sender can speak."""

MAX_FRAME_BYTES = 1 << 20
MAX_HELLO_BYTES = 1 << 16
"""The daemon takes no longer frame before it knows who speaks; the longest `Hello` has 39,000 bytes."""
MAX_KEYS = 8192
"""Keys in one message: a request of 131,072 tokens has 8,192 chunks of 16 tokens."""
OFFSET_BYTES = 8
LEFT_ALONE_PREFIX = "without-"
"""Begins the `engine_id` of a scheduler whose engine runs without offload and only tells why: it has no ranks, gets no
bytes, and does not count as an engine."""

Text = Annotated[str, msgspec.Meta(max_length=256)]
LongText = Annotated[str, msgspec.Meta(max_length=8192)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Offsets = Annotated[bytes, msgspec.Meta(max_length=OFFSET_BYTES * MAX_KEYS)]
Keys = Annotated[bytes, msgspec.Meta(max_length=64 * MAX_KEYS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


# --- attacher -> daemon
# -------------------------------------------------------------------------------------------------


class AttachPod(Message, frozen=True, tag="attach"):
    """A pod's listening socket comes with this frame as its one descriptor."""

    pod_uid: Annotated[str, msgspec.Meta(pattern="^[0-9a-zA-Z-]{1,64}$")]
    namespace: Text
    name: Text
    predicted_layout: Text
    """Annotation `kvoffload.io/replicated-layout`, empty if none."""


class DetachPod(Message, frozen=True, tag="detach"):
    """The pod's folder is gone; its socket is closed, its sessions live on until they end."""

    pod_uid: Text


class Attached(Message, frozen=True, tag="attached"):
    """Answer to `AttachPod`."""

    pod_uid: Text


# --- engine -> daemon
# ---------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message of a session, from a scheduler (`rank` -1) or a worker."""

    protocol_min: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    protocol_max: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    role: Annotated[str, msgspec.Meta(pattern="^(scheduler|worker)$")]
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    identity: Digest
    """`kvoffload.layout.fingerprint`: equal only for engines whose bytes mean the same."""
    part: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Which part of a row this rank holds: `all`, `head-<h>` or `rank-<r>`; empty for a scheduler."""
    part_bytes: Count = 0
    """Bytes of this rank's part of one chunk."""
    reason: Text = ""
    """First failed condition of the replication gate (CamelCase), empty where replicated."""
    message: LongText = ""
    model: Text = ""
    engine_version: Text = ""
    agent_version: Text = ""
    process: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """16 random bytes, drawn once in each process and the same in every `Hello` of it. By it the daemon knows a
    process that connects again (it takes over what it held) from a successor with the same engine id (which must
    not)."""


class Mapped(Message, frozen=True, tag="mapped"):
    """This worker has mapped the region."""


class Bind(Message, frozen=True, tag="bind"):
    """The scheduler's hash seed and key length, known at its first request; answered by `Bound`."""

    none_hash: Annotated[bytes, msgspec.Meta(max_length=64)]
    key_bytes: Annotated[int, msgspec.Meta(ge=8, le=64)]
    private: bool = False
    """Keys of this namespace are for this engine alone (weights were updated in place)."""


class Lookup(Message, frozen=True, tag="lookup"):
    """Which of these keys are READY; each hit is leased once to this session. Answered by `Found`."""

    request: Count
    keys: Keys
    namespace: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    """0: the bound namespace; 1: the private one of this engine (adapters, multimodal input)."""


class Pin(Message, frozen=True, tag="pin"):
    """One more lease on slots that this session has leased already."""

    offsets: Offsets


class Unpin(Message, frozen=True, tag="unpin"):
    """One lease less on each of these slots."""

    offsets: Offsets


class Reserve(Message, frozen=True, tag="reserve"):
    """Asks for slots to write, ahead of need; answered by `Reserved` with as many as there are."""

    request: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_KEYS)]


class Assign(Message, frozen=True, tag="assign"):
    """The keys that will be written to these reserved slots."""

    epoch: Count
    offsets: Offsets
    keys: Keys
    namespace: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


class Seal(Message, frozen=True, tag="seal"):
    """This worker has written its part of these slots."""

    epoch: Count
    offsets: Offsets


class Fail(Message, frozen=True, tag="fail"):
    """These slots will not be written (scheduler or worker), or their bytes are wrong (`drop`)."""

    epoch: Count
    offsets: Offsets
    drop: bool = False
    """True: the slots are READY, leased by this session, and their bytes are wrong: nobody may hit them again."""


class Generation(Message, frozen=True, tag="generation"):
    """The engine's cache was reset: what it stored before is not hit by it again."""

    private: bool = False


class Reassert(Message, frozen=True, tag="reassert"):
    """After a daemon's restart: what this session still reads (`pins`) and writes (`writes`); nothing else is
    touched. `build_reassertion` makes as many as it takes."""

    epoch: Count
    """The epoch in which these were given out."""
    pins: Offsets
    writes: Offsets
    more: bool = False
    """Another one follows at once: only with the last is it known what is not touched any more."""


class Revoked(Message, frozen=True, tag="revoked"):
    """Acknowledges `Revoke`: these extents are unregistered and unmapped here."""

    extents: Offsets


class Report(Message, frozen=True, tag="report"):
    """Counters of one engine process since its last report."""

    stored_bytes: Count = 0
    loaded_bytes: Count = 0
    failed_loads: Count = 0
    failed_stores: Count = 0
    missed_deadlines: Count = 0
    steps: Count = 0
    note: LongText = ""
    """What the daemon should say in the region's status, for example that pages are not registered with the GPU."""


# --- daemon -> engine
# ---------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to `Hello`. Descriptors with it: a worker gets [region, lock], a scheduler [lock]."""

    protocol: int
    """What the daemon speaks from here on: one of the versions that the `Hello` offered."""
    epoch: Count
    region_bytes: Count
    """Length to map from offset 0 of the region descriptor."""
    extent_bytes: Count
    daemon_version: Text = ""


class Refused(Message, frozen=True, tag="refused"):
    """Answer to a request that is not allowed; after a `Hello` the session ends."""

    reason: Text
    message: LongText


class EngineReady(Message, frozen=True, tag="ready"):
    """Pushed to the scheduler and the workers when all ranks have mapped, and when a paused pool is active again: ends
    `EngineLost` and `Drain`. The row may be another one than before; unused slots then go back by `Fail`."""

    replicated: bool
    slot_bytes: Positive
    part_offsets: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)]
    sharers: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=MAX_RANKS)]
    sharer_index: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)]
    reason: Text = ""


class EngineLost(Message, frozen=True, tag="lost"):
    """Pushed when a rank's session ended or the pool is paused: until `EngineReady` comes again every look-up is a
    miss."""

    message: LongText


class Bound(Message, frozen=True, tag="bound"):
    """Answer to `Bind`."""

    num_ready: Count
    """READY slots in the namespace, for the log."""


class Found(Message, frozen=True, tag="found"):
    """Answer to `Lookup`: an offset for each key, -1 for a miss."""

    request: Count
    offsets: Offsets


class Reserved(Message, frozen=True, tag="reserved"):
    """Answer to `Reserve`."""

    request: Count
    epoch: Count
    offsets: Offsets
    reason: Text = ""
    """Why fewer came than were asked for, empty if not."""


class Revoke(Message, frozen=True, tag="revoke"):
    """These extents will be taken back: stop, unregister, unmap, then answer `Revoked`."""

    extents: Offsets


class Drain(Message, frozen=True, tag="drain"):
    """The daemon stops, and its successor is to be connected to, or the pool is paused, and `EngineReady` comes over
    this session again: finish what is in flight, start nothing new until then."""

    message: LongText


def split_offsets(packed: bytes) -> list[bytes]:
    """Packed offsets in pieces that a message may have; one empty piece where there are none."""
    step = OFFSET_BYTES * MAX_KEYS
    return [packed[at : at + step] for at in range(0, len(packed), step)] or [b""]


def build_reassertion(epoch: int, pins: bytes, writes: bytes) -> list[Reassert]:
    """What a process says first over a new connection: packed offsets, however many, in messages within the bounds."""
    pieces = list(zip_longest(split_offsets(pins), split_offsets(writes), fillvalue=b""))
    return [Reassert(epoch, *piece, more=number < len(pieces)) for number, piece in enumerate(pieces, 1)]


FromAttacher = AttachPod | DetachPod
FromEngine = (
    Hello
    | Mapped
    | Bind
    | Lookup
    | Pin
    | Unpin
    | Reserve
    | Assign
    | Seal
    | Fail
    | Generation
    | Reassert
    | Revoked
    | Report
)
FromDaemon = Welcome | Refused | EngineReady | EngineLost | Bound | Found | Reserved | Revoke | Drain | Attached
