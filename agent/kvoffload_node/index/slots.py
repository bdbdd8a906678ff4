"""The things the index is made of: extents cut into slots, slabs of one slot size, namespaces of keys, writes under
way.

Runs in the node daemon; the index changes them, the region and sessions hold on to some.

    tenant's file   | extent 0 (slab of 73,728) | extent 1 (spare) | extent 2 (slab of 147,456) |    hole    |
    extent 0        | slot | slot | slot | ... | waste |              a slot never straddles extents

    a slot     FREE ──reserve──> WRITING ──every rank sealed, key assigned──> READY ──evict──> FREE
                 ^                  │ failed: every rank said so, or is dead and its quarantine over   │
                 └──────────────────┴──────────<── last lease gone ── ORPHANED <── dropped, leased ────┘
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvoffload_node.index.quotas import Account

MIN_SLOT_BYTES = 4096
"""Slots are no closer than this: it bounds the journal's table."""


@dataclass(slots=True, eq=False)
class Namespace:
    """Keys that mean the same to every engine bound to it."""

    number: int
    digest: bytes
    key_bytes: int
    saved_per_slot: int = 0
    """Bytes that a plain layout would take for one of its slots beside those that it takes."""
    ready: dict[bytes, int] = field(default_factory=dict)
    """Key to byte offset of its READY slot."""


@dataclass(slots=True, eq=False)
class Extent:
    """A range of a tenant's file that has pages, cut into slots of one slab."""

    position: int
    slab: "Slab"
    num_slots: int
    free: list[int]
    """Offsets of FREE slots."""
    last_used: int = 0
    """Tick of the last release or seal in it: the whole extent is at least this cold."""

    def offsets(self, extent_bytes: int) -> range:
        """Offset of every slot in it."""
        begin = self.position * extent_bytes
        return range(begin, begin + self.num_slots * self.slab.slot_bytes, self.slab.slot_bytes)


@dataclass(slots=True, eq=False)
class Slab:
    """All extents of a tenant that are cut into slots of one size."""

    slot_bytes: int
    extents: dict[int, Extent] = field(default_factory=dict)
    partial: dict[int, Extent] = field(default_factory=dict)
    """Extents with FREE slots."""
    evictable: dict[Account, "OrderedDict[int, int]"] = field(default_factory=dict)
    """READY slots with the tick of their last use, the coldest first. All that nobody leases are here; a leased one may
    be, and is passed over: taking it out and in again with every look-up would cost more than the look-up."""


@dataclass(slots=True, eq=False)
class ReadySlot:
    """What stands in a READY (or ORPHANED) slot."""

    key: bytes
    namespace: Namespace
    account: Account
    storer: int
    """Number of the engine (and generation) that stored it."""
    lru: "OrderedDict[int, int]"
    """Where it waits to be evicted while nobody leases it."""
    holders: int = 0
    """Sessions that lease it."""


@dataclass(slots=True, eq=False, kw_only=True)
class WriteOwner:
    """Who was given slots to write: an engine, or nobody any more."""

    number: int
    """In the journal."""
    storer: int
    """What READY slots are marked with; an engine takes another number for each generation."""
    world_size: int
    num_writes: int = 0
    """Slots it has in state WRITING."""
    retired: set[int] = field(default_factory=set)
    """Storer numbers of its earlier generations: it does not hit those, and replaces them."""


@dataclass(slots=True, eq=False)
class Write:
    """A slot in state WRITING."""

    owner: WriteOwner
    account: Account
    storer: int
    pending: int
    """Bit r is set while rank r may still write."""
    namespace: Namespace | None = None
    key: bytes = b""
    failed: bool = False
    restored: bool = False
    """Given out by an earlier daemon: it will never be READY, and is free when nobody writes to it any more."""
