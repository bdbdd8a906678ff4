"""The slot journal: what was written is read back, and what was torn is not believed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload_node.index.journal import _EXTENT, RECORD_BYTES, UNCUT, SlotState, TenantJournal

EXTENT_BYTES = 65536
SLOT_BYTES = 8192


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[TenantJournal]:
    journal = TenantJournal(tmp_path / "journal", num_extents=3, extent_bytes=EXTENT_BYTES)
    yield journal
    journal.close()


def reopened(journal: TenantJournal, num_extents: int = 3) -> TenantJournal:
    return TenantJournal(journal.path, num_extents=num_extents, extent_bytes=EXTENT_BYTES)


def test_what_was_written_is_read_back_by_the_next_daemon(journal: TenantJournal) -> None:
    journal.extent(1, SLOT_BYTES)
    journal.extent(2, UNCUT)
    begin = EXTENT_BYTES
    journal.writing(begin, SLOT_BYTES, engine=7)
    journal.ready(begin + SLOT_BYTES, SLOT_BYTES, namespace=3, account=2, storer=1 << 40, key=b"k" * 64)
    journal.orphaned(begin + 2 * SLOT_BYTES, SLOT_BYTES)
    journal.writing(begin + 3 * SLOT_BYTES, SLOT_BYTES, engine=8)
    journal.free(begin + 3 * SLOT_BYTES, SLOT_BYTES)
    after = reopened(journal)
    assert after.read_extents() == {1: SLOT_BYTES, 2: UNCUT}
    records = list(after.read_slots(1, SLOT_BYTES))
    assert [record.state for record in records[:4]] == [
        SlotState.WRITING, SlotState.READY, SlotState.ORPHANED, SlotState.FREE,
    ]  # fmt: skip
    assert records[0].number == 7
    assert (records[1].namespace, records[1].account, records[1].number) == (3, 2, 1 << 40)
    assert records[1].key == b"k" * 64
    assert all(record.state is SlotState.FREE for record in records[4:])
    after.close()


def test_a_record_torn_at_any_byte_is_held_and_never_served(journal: TenantJournal) -> None:
    journal.extent(0, SLOT_BYTES)
    journal.ready(0, SLOT_BYTES, namespace=3, account=2, storer=9, key=b"old" * 10)
    before = journal.path.read_bytes()
    journal.ready(0, SLOT_BYTES, namespace=4, account=1, storer=10, key=b"new" * 10)
    after = journal.path.read_bytes()
    begin = next(place for place, (a, b) in enumerate(zip(before, after, strict=True)) if a != b) // 16 * 16
    for place in range(begin, begin + RECORD_BYTES):
        torn = after[:place] + before[place:]
        if torn in (before, after):
            continue
        journal.path.write_bytes(torn)
        (record, *_) = reopened(journal).read_slots(0, SLOT_BYTES)
        assert record.state is SlotState.ORPHANED, f"torn at byte {place - begin}"


def test_a_journal_that_grows_keeps_what_it_holds(journal: TenantJournal) -> None:
    journal.extent(2, SLOT_BYTES)
    journal.ready(2 * EXTENT_BYTES, SLOT_BYTES, namespace=3, account=2, storer=9, key=b"key")
    after = reopened(journal, num_extents=9)
    after.extent(8, UNCUT)
    assert after.read_extents() == {2: SLOT_BYTES, 8: UNCUT}
    assert next(after.read_slots(2, SLOT_BYTES)).key == b"key"
    after.close()


def test_an_extent_without_pages_is_not_there(journal: TenantJournal) -> None:
    journal.extent(1, SLOT_BYTES)
    journal.extent(1, 0)
    assert journal.read_extents() == {}


@pytest.mark.parametrize("at", [4, 12], ids=["namespace", "number"])
def test_a_record_whose_epoch_alone_is_another_is_not_believed(journal: TenantJournal, at: int) -> None:
    """The epoch is the upper half of both numbers, and a restart makes all of them differ there alone."""
    begin = _EXTENT.size
    journal.extent(0, SLOT_BYTES)
    journal.ready(0, SLOT_BYTES, namespace=5 << 32 | 3, account=2, storer=5 << 32 | 9, key=b"key" * 10)
    content = bytearray(journal.path.read_bytes())
    field = slice(begin + at, begin + at + 8)
    number = int.from_bytes(content[field], "little")
    assert number >> 32 == 5
    content[field] = (number ^ 3 << 32).to_bytes(8, "little")
    journal.path.write_bytes(content)
    assert next(journal.read_slots(0, SLOT_BYTES)).state is SlotState.ORPHANED
