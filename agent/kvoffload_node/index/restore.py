"""Reading the journal back: a restarted daemon's index of one tenant.

Runs in the node daemon, once at start, called by `session/recovery.py`. What is READY is served. What may still be
touched by somebody belongs to the engine that was writing it, or to nobody until every engine of before has spoken.
"""

from collections.abc import Mapping, Sequence

from kvoffload_node.index.journal import UNCUT, SlotRecord, SlotState
from kvoffload_node.index.order import take_order
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import Extent, ReadySlot, Write, WriteOwner
from kvoffload_node.index.table import SlotTable


def restore(
    index: SlotTable, owners: Mapping[int, WriteOwner], accounts: Sequence[Account], nobody: WriteOwner
) -> None:
    """Fill an empty index from its journal. `owners` are the engines that may still live, by number."""
    for position, slot_bytes in index.journal.read_extents().items():
        if slot_bytes == UNCUT:
            index.spare.append(position)
            continue
        slab = index.slab(slot_bytes)
        extent = Extent(position, slab, index.extent_bytes // slot_bytes, free=[])
        index.extents[position] = slab.extents[position] = extent
        index.cold.add(extent)
        for record in index.journal.read_slots(position, slot_bytes):
            _restore_slot(index, extent, record, owners, accounts, nobody)
        if len(extent.free) == extent.num_slots:
            index.uncut(extent)
        elif extent.free:
            slab.partial[position] = extent
    _restore_order(index)


def _restore_order(index: SlotTable) -> None:
    """What was used last before an orderly stop is evicted last; without that all slots are equally cold."""
    for tick, offset in take_order(index.journal.path):
        slot = index.ready.get(offset)
        if slot is not None:
            slot.lru[offset] = tick
            slot.lru.move_to_end(offset)
            index.extents[offset // index.extent_bytes].last_used = tick
            index.clock.tick = max(index.clock.tick, tick)


def _restore_slot(
    index: SlotTable,
    extent: Extent,
    record: SlotRecord,
    owners: Mapping[int, WriteOwner],
    accounts: Sequence[Account],
    nobody: WriteOwner,
) -> None:
    namespace = index.namespaces.get(record.namespace)
    if record.state is SlotState.FREE:
        extent.free.append(record.offset)
    elif (
        record.state is SlotState.READY
        and namespace is not None
        and record.account < len(accounts)
        and record.key not in namespace.ready
    ):
        account = accounts[record.account]
        lru = index.lru(extent.slab, account)
        index.ready[record.offset] = ReadySlot(record.key, namespace, account, record.number, lru)
        namespace.ready[record.key] = record.offset
        lru[record.offset] = 0
        account.used_bytes += extent.slab.slot_bytes
    else:
        owner = owners.get(record.number, nobody) if record.state is SlotState.WRITING else nobody
        pending = (1 << owner.world_size) - 1
        index.writes[record.offset] = Write(owner, accounts[0], 0, pending, failed=True, restored=True)
        owner.num_writes += 1
        accounts[0].used_bytes += extent.slab.slot_bytes


def has_bytes(index: SlotTable, offset: int, nobody: WriteOwner) -> bool:
    """Whether a process of before may still read this slot: it is READY, or was dropped under its reader."""
    write = index.writes.get(offset)
    return offset in index.ready or (write is not None and write.owner is nobody)


def revive(index: SlotTable, offset: int, nobody: WriteOwner) -> None:
    """A reader of before the restart still reads a slot that was dropped: it is ORPHANED again, and can be leased."""
    write = index.writes.get(offset)
    if write is None or write.owner is not nobody:
        return
    del index.writes[offset]
    nobody.num_writes -= 1
    slab = index.extents[offset // index.extent_bytes].slab
    index.ready[offset] = ReadySlot(b"", index.dropped, write.account, 0, index.lru(slab, write.account))
    index.orphans.add(offset)


def restored_writes(index: SlotTable, owner: WriteOwner) -> list[tuple[int, Write]]:
    """What an earlier daemon gave this engine to write, as far as it is not settled."""
    return [(o, w) for o, w in index.writes.items() if w.owner is owner and w.restored]
