"""What to evict: the coldest slot of a slab, or the coldest whole extent of a tenant.

Runs in the node daemon, called by `tenant.py` and by the pool when an extent has to move. Coldness is the tick of the
last use. A slab takes its own coldest slot, unless a whole extent elsewhere is colder than that: so extents follow
demand, and what is evicted is always (by the extent's own measure, its last use) the least recently used.
"""

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import Extent, ReadySlot, Slab

if TYPE_CHECKING:
    from kvoffload_node.index.table import SlotTable


def coldest_unleased(lru: "OrderedDict[int, int]", ready: Mapping[int, ReadySlot]) -> tuple[int, int] | None:
    """Offset and tick of the coldest slot that nobody leases; leased ones before it are taken out of the order."""
    while lru:
        offset = next(iter(lru))
        if not ready[offset].holders:
            return offset, lru[offset]
        del lru[offset]  # it comes back, as the warmest, when its last lease ends
    return None


def coldest_slot(slab: Slab, ready: Mapping[int, ReadySlot], account: Account) -> tuple[int, int] | None:
    """Offset and tick of the slot to evict for `account`, None if all are leased or guaranteed to others."""
    best: tuple[int, int] | None = None
    for owner, lru in slab.evictable.items():
        if owner.may_lose(slab.slot_bytes, to=account):
            coldest = coldest_unleased(lru, ready)
            if coldest is not None and (best is None or coldest[1] < best[1]):
                best = coldest
    return best


class ColdExtents:
    """A tenant's extents by coldness: a heap whose entries may lag behind, which is harmless as ticks only grow."""

    def __init__(self, index: "SlotTable") -> None:
        self._index = index
        self._heap: list[tuple[int, int]] = []
        self._positions: set[int] = set()
        """In the heap, each once: one that was cut again is found under its older tick."""

    def add(self, extent: Extent) -> None:
        """Count an extent that was just cut."""
        if extent.position not in self._positions:
            self._positions.add(extent.position)
            heapq.heappush(self._heap, (extent.last_used, extent.position))

    def coldest(self, *, before: int, account: Account | None) -> Extent | None:
        """The coldest extent last used before tick `before` that is not busy and that `account` may evict.

        One that is busy, or guaranteed to somebody, counts as used now: else it would be looked at for every slot that
        is evicted. No account: the pool itself, which nobody's guarantee holds up.
        """
        heap, index = self._heap, self._index
        while heap and heap[0][0] < before:
            tick, position = heap[0]
            extent = index.extents.get(position)
            if extent is None:
                heapq.heappop(heap)
                self._positions.discard(position)
                continue
            if extent.last_used == tick:
                if not index.is_busy(extent) and (account is None or self._may_evict(extent, account)):
                    return extent
                extent.last_used = index.clock.tick
            heapq.heapreplace(heap, (extent.last_used, position))
            if tick == index.clock.tick:
                return None
        return None

    def _may_evict(self, extent: Extent, account: Account) -> bool:
        held: dict[Account, int] = {}
        stride = extent.slab.slot_bytes
        for offset in extent.offsets(self._index.extent_bytes):
            slot = self._index.ready.get(offset)
            if slot is not None:
                held[slot.account] = held.get(slot.account, 0) + stride
        return all(owner.may_lose(num_bytes, to=account) for owner, num_bytes in held.items())
