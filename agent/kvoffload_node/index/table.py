"""One tenant's table: what is where in its file, and the ways from one state to another, each journaled.

Runs in the node daemon; `tenant.py` adds what sessions ask, `restore.py` fills it after a restart, `eviction.py` looks
for what is cold in it. Offsets are byte offsets into the tenant's file.
"""

from collections import Counter, OrderedDict
from collections.abc import Set
from enum import StrEnum

from kvoffload_node.index.eviction import ColdExtents
from kvoffload_node.index.journal import UNCUT, TenantJournal
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import MIN_SLOT_BYTES, Extent, Namespace, ReadySlot, Slab, Write


class Clock:
    """Ticks with every message that uses a slot: the order of uses, for eviction. Shared by all tenants."""

    __slots__ = ("tick",)

    def __init__(self) -> None:
        self.tick = 0


class Eviction(StrEnum):
    """Why slots were evicted; a closed set, used as metric label."""

    CAPACITY = "Capacity"
    """A slot of the same size was needed, and the pool was full."""
    QUOTA_LIMIT = "QuotaLimit"
    """The Kubernetes namespace was at its limit: its own coldest."""
    EXTENT_MOVED = "ExtentMoved"
    """Its extent was needed for slots of another size."""
    TENANT_MOVED = "TenantMoved"
    """Its extent was needed by another tenant."""
    CAPACITY_LOWERED = "CapacityLowered"
    """The pool was made smaller."""
    TENANT_GONE = "TenantGone"
    """The tenant will not come back."""


class SlotTable:
    """Slots, extents, slabs and namespaces of one tenant."""

    def __init__(self, number: int, *, extent_bytes: int, clock: Clock, journal: TenantJournal) -> None:
        self.number = number
        self.extent_bytes = extent_bytes
        self.clock = clock
        self.journal = journal
        self.namespaces: dict[int, Namespace] = {}
        self.dropped = Namespace(0, b"", 0)
        """Of ORPHANED slots whose key was lost in a restart."""
        self.slabs: dict[int, Slab] = {}
        self.extents: dict[int, Extent] = {}
        """By position, those that belong to a slab."""
        self.spare: list[int] = []
        """Positions that have pages and belong to no slab."""
        self.ready: dict[int, ReadySlot] = {}
        self.writes: dict[int, Write] = {}
        self.orphans: set[int] = set()
        self.cold = ColdExtents(self)
        self.num_leased = 0
        """Slots that somebody leases."""
        self.evicted_bytes: Counter[str] = Counter()
        """By reason."""
        self.may_evict = True
        """False after a restart until every engine of before has said what it holds, or is dead."""
        self.is_disk_full = False
        """The last spare extent that was needed could not be cut: the disk did not take its records."""

    # --- slots --------------------------------------------------------------------------------------------------------

    def slab(self, slot_bytes: int) -> Slab:
        """The slab for slots of this size, made if there is none."""
        stride = max(slot_bytes, MIN_SLOT_BYTES)
        slab = self.slabs.get(stride)
        if slab is None:
            slab = self.slabs[stride] = Slab(slot_bytes=stride)
        return slab

    def forget_slabs(self, in_use: Set[Slab | None]) -> None:
        """Drop slabs without an extent that no engine stores to: each slot size that a pod ever had left one."""
        for stride in [stride for stride, slab in self.slabs.items() if not slab.extents and slab not in in_use]:
            del self.slabs[stride]

    def lru(self, slab: Slab, account: Account) -> "OrderedDict[int, int]":
        """Where the account's READY slots of this slab wait to be evicted."""
        lru = slab.evictable.get(account)
        if lru is None:
            lru = slab.evictable[account] = OrderedDict()
        return lru

    def forget(self, offset: int) -> None:
        """Take a READY slot from its key; it is free when nobody leases it any more."""
        if offset in self.orphans:
            return
        slot = self.ready[offset]
        del slot.namespace.ready[slot.key]
        slot.lru.pop(offset, None)
        if slot.holders:
            self.orphans.add(offset)
            self.journal.orphaned(offset, self.extents[offset // self.extent_bytes].slab.slot_bytes)
        else:
            del self.ready[offset]
            self.free(offset, slot.account)

    def end_recovery(self) -> None:
        """Everybody of before the restart has spoken: orphans that nobody leases are free, and eviction begins."""
        self.may_evict = True
        for offset in [offset for offset in self.orphans if not self.ready[offset].holders]:
            self.orphans.discard(offset)
            self.free(offset, self.ready.pop(offset).account)

    def evict(self, offset: int, reason: Eviction) -> None:
        """Take a READY, unleased slot from its key; it is the caller's to use or to free."""
        slot = self.ready.pop(offset)
        del slot.lru[offset]
        del slot.namespace.ready[slot.key]
        num_bytes = self.extents[offset // self.extent_bytes].slab.slot_bytes
        slot.account.used_bytes -= num_bytes
        self.evicted_bytes[reason] += num_bytes

    def free(self, offset: int, account: Account) -> None:
        """Nobody can touch this slot any more; an extent of which that was the last one becomes spare."""
        extent = self.extents[offset // self.extent_bytes]
        stride = extent.slab.slot_bytes
        account.used_bytes -= stride
        self.journal.free(offset, stride)
        extent.free.append(offset)
        if len(extent.free) == extent.num_slots:
            self.uncut(extent)
        else:
            extent.slab.partial[extent.position] = extent

    def storers(self) -> set[int]:
        """Numbers of the engines (and generations) of which anything is here."""
        return {slot.storer for slot in self.ready.values()} | {write.storer for write in self.writes.values()}

    # --- extents ------------------------------------------------------------------------------------------------------

    def add_spare(self, position: int) -> None:
        """The extent at this position has got its pages."""
        self.journal.extent(position, UNCUT)
        self.spare.append(position)

    def cut(self, position: int, slab: Slab) -> None:
        """A spare extent becomes the slab's, all its slots FREE."""
        num_slots = self.extent_bytes // slab.slot_bytes
        extent = Extent(position, slab, num_slots, free=[], last_used=self.clock.tick)
        extent.free = list(reversed(extent.offsets(self.extent_bytes)))
        self.journal.extent(position, slab.slot_bytes)
        self.extents[position] = slab.extents[position] = slab.partial[position] = extent
        self.cold.add(extent)

    def uncut(self, extent: Extent) -> None:
        """An extent whose slots are all FREE belongs to no slab any more."""
        del self.extents[extent.position]
        del extent.slab.extents[extent.position]
        extent.slab.partial.pop(extent.position, None)
        self.journal.extent(extent.position, UNCUT)
        self.spare.append(extent.position)

    def evict_extent(self, extent: Extent, reason: Eviction = Eviction.EXTENT_MOVED) -> None:
        """Evict every slot of an extent in which none is leased or being written; it is spare afterwards."""
        stride = extent.slab.slot_bytes
        for offset in extent.offsets(self.extent_bytes):
            if offset in self.ready:
                self.evict(offset, reason)
                self.journal.free(offset, stride)
        self.uncut(extent)

    def is_busy(self, extent: Extent) -> bool:
        """Whether any slot in it is leased or being written."""
        ready, writes = self.ready, self.writes
        return any(
            offset in writes or (offset in ready and ready[offset].holders)
            for offset in extent.offsets(self.extent_bytes)
        )

    # --- figures ------------------------------------------------------------------------------------------------------

    @property
    def has_assigned_writes(self) -> bool:
        """Whether an engine is about to seal something."""
        return any(write.namespace is not None and not write.failed for write in self.writes.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are not FREE."""
        return sum((e.num_slots - len(e.free)) * e.slab.slot_bytes for e in self.extents.values())

    @property
    def writing_bytes(self) -> int:
        """Bytes of slots that are reserved or being written."""
        return sum(self.extents[offset // self.extent_bytes].slab.slot_bytes for offset in self.writes)

    @property
    def saved_bytes(self) -> int:
        """Bytes that READY slots would take beside those they do in a plain layout."""
        return sum(namespace.saved_per_slot * len(namespace.ready) for namespace in self.namespaces.values())

    @property
    def waste_bytes(self) -> int:
        """Bytes at the ends of extents that hold no slot."""
        return sum(self.extent_bytes - e.num_slots * e.slab.slot_bytes for e in self.extents.values())
