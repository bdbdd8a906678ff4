"""Which extent and which slot is given up first, and that looking for it stays cheap."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload_node.index.journal import TenantJournal
from kvoffload_node.index.order import write_order
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.restore import restore
from kvoffload_node.index.slots import Namespace, WriteOwner
from kvoffload_node.index.table import Clock
from kvoffload_node.index.tenant import Supply, TenantIndex

EXTENT_BYTES = 1 << 20
NUM_EXTENTS = 16
SMALL, LARGE = 8192, 16384


class Filled:
    """An index of `NUM_EXTENTS` extents, all of them full of small slots, stored in order."""

    def __init__(self, folder: Path) -> None:
        journal = TenantJournal(folder / "journal", num_extents=NUM_EXTENTS, extent_bytes=EXTENT_BYTES)
        self.index = TenantIndex(1, extent_bytes=EXTENT_BYTES, clock=Clock(), journal=journal)
        self.account = Account(0, "a")
        self.owner = WriteOwner(number=1, storer=1, world_size=1)
        self.namespace = Namespace(1, b"", 8)
        self.stored = 0
        self.looked_at = 0
        for position in range(NUM_EXTENTS):
            self.index.add_spare(position)
        for _ in range(NUM_EXTENTS):
            self.store(SMALL, EXTENT_BYTES // SMALL)
        is_busy = self.index.is_busy

        def counted(extent: object) -> bool:
            self.looked_at += 1
            return is_busy(extent)  # type: ignore[arg-type]

        self.index.is_busy = counted  # type: ignore[method-assign]

    def store(self, slot_bytes: int, count: int, account: Account | None = None) -> list[int]:
        slab = self.index.slab(slot_bytes)
        account = account or self.account

        def find_extent(before: int) -> Supply:
            extent = self.index.cold.coldest(before=before, account=account)
            if extent is None or extent.slab is slab:
                return Supply.NONE
            self.index.evict_extent(extent)
            return Supply.SPARE

        offsets, _ = self.index.reserve(slab, count, owner=self.owner, account=account, find_extent=find_extent)
        keys = [(self.stored + number).to_bytes(8, "little") for number in range(len(offsets))]
        self.stored += len(offsets)
        self.index.assign(self.owner, self.namespace, zip(offsets, keys, strict=True))
        self.index.seal(self.owner, 0, offsets)
        return offsets

    def restart(self) -> None:
        """Another daemon reads the journal."""
        path = self.index.journal.path
        self.index.journal.close()
        journal = TenantJournal(path, num_extents=NUM_EXTENTS, extent_bytes=EXTENT_BYTES)
        self.index = TenantIndex(1, extent_bytes=EXTENT_BYTES, clock=Clock(), journal=journal)
        self.namespace = self.index.namespaces[1] = Namespace(1, b"", 8)
        restore(self.index, {}, [self.account], WriteOwner(number=0, storer=0, world_size=1))

    def offsets(self, position: int) -> list[int]:
        return list(self.index.extents[position].offsets(EXTENT_BYTES))


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    filled = Filled(tmp_path)
    yield filled
    filled.index.journal.close()


def test_another_size_takes_the_extent_that_was_used_longest_ago(filled: Filled) -> None:
    coldest = min(filled.index.extents.values(), key=lambda extent: extent.last_used).position
    offsets = filled.store(LARGE, 4)
    assert {offset // EXTENT_BYTES for offset in offsets} == {coldest}


def test_an_extent_that_was_just_used_is_taken_last(filled: Filled) -> None:
    coldest = min(filled.index.extents.values(), key=lambda extent: extent.last_used).position
    holder: dict[int, int] = {}
    filled.index.lease(holder, filled.offsets(coldest)[:1])
    filled.index.release(holder)
    offsets = filled.store(LARGE, EXTENT_BYTES // LARGE * (NUM_EXTENTS - 1))
    assert coldest not in {offset // EXTENT_BYTES for offset in offsets}


def test_an_extent_with_one_leased_slot_is_never_taken(filled: Filled) -> None:
    holder: dict[int, int] = {}
    leased = [filled.offsets(position)[5] for position in range(NUM_EXTENTS)]
    filled.index.lease(holder, leased)
    assert filled.store(LARGE, 1) == []
    filled.index.release(holder)
    assert len(filled.store(LARGE, 1)) == 1


def test_leased_extents_are_looked_at_once_and_not_for_every_slot(filled: Filled) -> None:
    holder: dict[int, int] = {}
    filled.index.lease(holder, [offset for position in range(8) for offset in filled.offsets(position)])
    filled.looked_at = 0
    filled.store(SMALL, 500)
    assert filled.looked_at <= 2 * NUM_EXTENTS


def test_after_an_orderly_stop_what_was_used_last_is_evicted_last(filled: Filled) -> None:
    first, second = NUM_EXTENTS - 1, NUM_EXTENTS - 2  # in the order of their stores
    holder: dict[int, int] = {}
    filled.index.lease(holder, filled.offsets(first))
    filled.index.release(holder)
    filled.index.lease(holder, filled.offsets(second)[:1])
    write_order(filled.index.journal.path, filled.index.ready, filled.index.clock.tick)
    filled.restart()
    assert filled.store(SMALL, 3) == filled.offsets(second)[1:4]
    evicted = filled.store(LARGE, EXTENT_BYTES // LARGE * (NUM_EXTENTS - 2))
    assert not {first, second} & {offset // EXTENT_BYTES for offset in evicted}
    filled.restart()
    assert filled.index.clock.tick == 0, "the order of an earlier stop was used again"


def test_a_guarantee_holds_up_others_and_not_the_pool_itself(filled: Filled) -> None:
    filled.account.guaranteed_bytes = filled.account.used_bytes
    other = Account(2, "b")
    assert filled.store(LARGE, 1, other) == []
    assert filled.index.cold.coldest(before=1 << 62, account=None) is not None


def test_a_namespace_evicts_its_own_guaranteed_slots(filled: Filled) -> None:
    filled.account.guaranteed_bytes = filled.account.used_bytes
    assert len(filled.store(SMALL, 10)) == 10


def test_a_failure_that_overtakes_its_key_leaves_the_slot_to_the_key(filled: Filled) -> None:
    owner = WriteOwner(number=7, storer=7, world_size=1)
    find = {"find_extent": lambda _: Supply.NONE}
    (offset,), _ = filled.index.reserve(filled.index.slab(SMALL), 1, owner=owner, account=filled.account, **find)
    filled.index.fail(owner, 0, [offset])
    assert filled.index.assign(owner, filled.namespace, [(offset, b"late key")]) == []
    assert offset not in filled.index.writes
    assert b"late key" not in filled.namespace.ready


def test_generations_of_which_nothing_is_left_are_not_remembered(filled: Filled) -> None:
    reserved, _ = filled.index.reserve(
        filled.index.slab(SMALL), 1, owner=WriteOwner(number=7, storer=8, world_size=1), account=filled.account,
        find_extent=lambda _: Supply.NONE,
    )  # fmt: skip
    assert len(reserved) == 1
    assert filled.index.storers() == {1, 8}


def test_slot_sizes_that_nobody_uses_any_more_are_forgotten(tmp_path: Path) -> None:
    filled = Filled(tmp_path)
    used = filled.index.slab(LARGE)
    for slot_bytes in range(20_000, 21_000):
        filled.index.slab(slot_bytes)
    filled.index.forget_slabs({used, None})
    assert set(filled.index.slabs) == {SMALL, LARGE}
