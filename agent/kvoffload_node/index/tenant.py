"""One tenant's index: leases, reservations and seals. The hot paths of the daemon.

Runs in the node daemon's event loop, one call a message, never two at once; called by `session/` and
`region/extents.py`. Offsets are byte offsets into the tenant's file. A holder is one session's leases: `dict` of
offset to count.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

from kvoffload.errors import ProtocolError, Shortage
from kvoffload_node.index.eviction import coldest_slot, coldest_unleased
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import Namespace, ReadySlot, Slab, Write, WriteOwner
from kvoffload_node.index.table import Eviction, SlotTable

Holder = dict[int, int]


class Supply(Enum):
    """What the pool can do for a slab without free slots."""

    SPARE = "spare"
    """An extent is spare now."""
    GROWING = "growing"
    """An extent is being allocated: ask again soon, evict nothing."""
    NONE = "none"
    """No extent can be had: evict a slot of the slab itself."""


class TenantIndex(SlotTable):
    """What is where in one tenant's file, and what sessions may do with it."""

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self, holder: Holder, offsets: Iterable[int], storer: int = 0) -> int:
        """One more lease on each, READY or ORPHANED. Returns how many of them others than `storer` have stored."""
        ready = self.ready
        of_others = 0
        for offset in offsets:
            slot = ready[offset]
            if slot.storer != storer:
                of_others += 1
            count = holder.get(offset)
            if count is None:
                holder[offset] = 1
                if slot.holders == 0:
                    self.num_leased += 1
                slot.holders += 1
            else:
                holder[offset] = count + 1
        return of_others

    def pin(self, holder: Holder, offsets: Sequence[int]) -> None:
        """One more lease on slots that the holder leases already. Raises ProtocolError."""
        for offset in offsets:
            if offset not in holder:
                raise ProtocolError(f"pin of slot {offset}, which this session does not lease")
        self.lease(holder, offsets)

    def unpin(self, holder: Holder, offsets: Iterable[int]) -> None:
        """One lease less on each. Raises ProtocolError."""
        released: list[int] = []
        for offset in offsets:
            count = holder.get(offset)
            if count is None:
                self._release(released)
                raise ProtocolError(f"unpin of slot {offset}, which this session does not lease")
            if count > 1:
                holder[offset] = count - 1
            else:
                del holder[offset]
                released.append(offset)
        self._release(released)

    def release(self, holder: Holder) -> None:
        """End all leases of a holder that is gone."""
        released = list(holder)
        holder.clear()
        self._release(released)

    def _release(self, offsets: list[int]) -> None:
        ready = self.ready
        self.clock.tick += 1
        tick = self.clock.tick
        extent_bytes = self.extent_bytes
        # Before the slots: one that is freed here may be the last of its extent.
        for position in {offset // extent_bytes for offset in offsets}:
            self.extents[position].last_used = tick
        for offset in offsets:
            slot = ready[offset]
            slot.holders -= 1
            if slot.holders == 0:
                self.num_leased -= 1
                if offset in self.orphans:
                    if self.may_evict:  # else a process of before the restart may still read it
                        self.orphans.discard(offset)
                        self.free(offset, ready.pop(offset).account)
                else:
                    slot.lru[offset] = tick
                    slot.lru.move_to_end(offset)

    # --- stores -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        slab: Slab,
        count: int,
        *,
        owner: WriteOwner,
        account: Account,
        find_extent: Callable[[int], Supply],
    ) -> tuple[list[int], str]:
        """Up to `count` slots to write, and why not all came ("" if they did).

        First free slots, then spare extents, then what is coldest: a slot of this slab, or a whole extent elsewhere
        that is colder than every slot here, for which `find_extent(tick of the coldest slot)` asks the pool.
        """
        self.clock.tick += 1
        offsets: list[int] = []
        nothing_found = False

        def find_once(before: int) -> Supply:
            """Where the pool has nothing for the first slot of a message, it has nothing for the others."""
            nonlocal nothing_found
            if nothing_found:
                return Supply.NONE
            supply = find_extent(before)
            nothing_found = supply is Supply.NONE
            return supply

        while len(offsets) < count:
            offset, why = self._take_slot(slab, account, find_once)
            if offset is None:
                return offsets, why
            account.used_bytes += slab.slot_bytes
            self.writes[offset] = Write(owner, account, owner.storer, (1 << owner.world_size) - 1)
            owner.num_writes += 1
            self.journal.writing(offset, slab.slot_bytes, owner.number)
            offsets.append(offset)
        return offsets, ""

    def _take_slot(self, slab: Slab, account: Account, find_extent: Callable[[int], Supply]) -> tuple[int | None, str]:
        """One slot that belongs to nobody from now on, or why there is none."""
        while not account.has_room(slab.slot_bytes):
            if not self._evict_own(account):
                return None, Shortage.QUOTA_LIMIT
        while True:
            if slab.partial:
                extent = next(iter(slab.partial.values()))
                offset = extent.free.pop()
                if not extent.free:
                    del slab.partial[extent.position]
                return offset, ""
            if self.spare:
                self.is_disk_full = not self.journal.make_room(self.spare[-1], slab.slot_bytes)
                if not self.is_disk_full:
                    self.cut(self.spare.pop(), slab)
                    continue
            oldest = coldest_slot(slab, self.ready, account) if self.may_evict else None
            # an extent that is still spare could not be cut: no other one could be
            supply = Supply.NONE if self.spare else find_extent(oldest[1] if oldest else self.clock.tick)
            if supply is Supply.GROWING:
                return None, Shortage.ALLOCATING
            if supply is Supply.NONE:
                if oldest is None:
                    return None, self._why_nothing_goes()
                self.evict(oldest[0], Eviction.CAPACITY)
                return oldest[0], ""

    def _why_nothing_goes(self) -> str:
        if self.spare:
            return Shortage.STATE_FULL
        return Shortage.ALL_LEASED if self.may_evict else Shortage.RECOVERING

    def assign(self, owner: WriteOwner, namespace: Namespace, pairs: Iterable[tuple[int, bytes]]) -> list[int]:
        """Say which key each reserved slot gets. Returns offsets that became READY. Raises ProtocolError."""
        published = []
        for offset, key in pairs:
            write = self._write_of(owner, offset)
            if write.namespace is not None:
                raise ProtocolError(f"slot {offset} has its key already")
            write.namespace = namespace
            write.key = key
            if not write.pending and self._complete(offset, write):
                published.append(offset)
        return published

    def seal(self, owner: WriteOwner, rank: int, offsets: Iterable[int]) -> list[int]:
        """Rank `rank` has written its part. Returns offsets that became READY. Raises ProtocolError."""
        published = []
        done = ~(1 << rank)
        for offset in offsets:
            write = self._write_of(owner, offset)
            write.pending &= done
            if not write.pending and write.namespace is not None and self._complete(offset, write):
                published.append(offset)
        return published

    def fail(self, owner: WriteOwner, rank: int, offsets: Iterable[int]) -> None:
        """These slots get no bytes from rank `rank` (-1: the scheduler). Raises ProtocolError.

        A slot without a key is free at once when the scheduler says so: nobody was told to write it. One that has a key
        is free when every rank has sealed or failed it, because until then a copy may still land in it. Ranks whose
        words overtake the scheduler's `Assign`, each on its own connection, leave the slot to it.
        """
        for offset in offsets:
            write = self._write_of(owner, offset)
            write.failed = True
            if rank >= 0:
                write.pending &= ~(1 << rank)
            elif write.namespace is None:
                write.pending = 0
            if not write.pending and (rank < 0 or write.namespace is not None):
                self._abandon(offset, write)

    def assign_nothing(self, owner: WriteOwner, offsets: Iterable[int]) -> None:
        """Ranks may have been told to write these slots, and which keys they are for will never be known: they are free
        when every rank has sealed or failed them. Raises ProtocolError."""
        for offset in offsets:
            write = self._write_of(owner, offset)
            if write.namespace is None:
                write.namespace, write.failed = self.dropped, True
                if not write.pending:
                    self._abandon(offset, write)

    def end_writes(self, owner: WriteOwner, ranks_gone: int) -> int:
        """The ranks in this bit mask will never write again. Returns how many slots became free.

        Called when their processes are dead and the quarantine is over.
        """
        freed = 0
        for offset, write in [(o, w) for o, w in self.writes.items() if w.owner is owner]:
            if write.pending & ranks_gone:
                write.failed = True
            write.pending &= ~ranks_gone
            if not write.pending and (write.failed or write.namespace is None):
                self._abandon(offset, write)
                freed += 1
        return freed

    def drop(self, holder: Holder, offsets: Iterable[int]) -> None:
        """The bytes of these slots, leased by the holder, are wrong: nobody hits them again. Raises ProtocolError."""
        for offset in offsets:
            if offset not in holder:
                raise ProtocolError(f"drop of slot {offset}, which this session does not lease")
            self.forget(offset)

    def unassigned(self, owner: WriteOwner) -> Iterator[int]:
        """Slots that the owner has reserved and not yet given a key."""
        for offset, write in self.writes.items():
            if write.owner is owner and write.namespace is None and not write.restored:
                yield offset

    def _write_of(self, owner: WriteOwner, offset: int) -> Write:
        write = self.writes.get(offset)
        if write is None or write.owner is not owner:
            raise ProtocolError(f"slot {offset} was not reserved by this engine")
        return write

    def _complete(self, offset: int, write: Write) -> bool:
        """Every rank is done and the key is known: publish, unless it failed or the key is READY already."""
        namespace = write.namespace
        if write.failed or namespace is None:
            self._abandon(offset, write)
            return False
        existing = namespace.ready.get(write.key)
        if existing is not None:
            if self.ready[existing].storer not in write.owner.retired:
                self._abandon(offset, write)
                return False
            self.forget(existing)
        del self.writes[offset]
        write.owner.num_writes -= 1
        extent = self.extents[offset // self.extent_bytes]
        lru = self.lru(extent.slab, write.account)
        self.journal.ready(
            offset, extent.slab.slot_bytes, namespace.number, write.account.number, write.storer, write.key
        )
        self.ready[offset] = ReadySlot(write.key, namespace, write.account, write.storer, lru)
        namespace.ready[write.key] = offset
        self.clock.tick += 1
        lru[offset] = extent.last_used = self.clock.tick
        return True

    def _abandon(self, offset: int, write: Write) -> None:
        del self.writes[offset]
        write.owner.num_writes -= 1
        self.free(offset, write.account)

    def keep_pending(self, offset: int, write: Write, ranks: int) -> None:
        """Of a restored write, only these ranks may still touch the slot."""
        write.pending &= ranks
        if not write.pending:
            self._abandon(offset, write)

    def _evict_own(self, account: Account) -> bool:
        """The account is at its limit: free its own coldest slot, of whatever size. False if none can be."""
        found = [
            (coldest[1], coldest[0])
            for slab in self.slabs.values()
            if (lru := slab.evictable.get(account)) and (coldest := coldest_unleased(lru, self.ready))
        ]
        if not found or not self.may_evict:
            return False
        _, offset = min(found)
        self.evict(offset, Eviction.QUOTA_LIMIT)
        account.used_bytes += self.extents[offset // self.extent_bytes].slab.slot_bytes
        self.free(offset, account)
        return True
