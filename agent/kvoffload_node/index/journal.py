"""The slot journal: what a restarted daemon may believe.

Runs in the node daemon; written by `tenant.py` and `table.py` as slots change, by `region/extents.py` as extents come
and go, and read once at start. A file that only the daemon maps, one fixed record a slot; the page cache outlives a
killed daemon, and a record torn by the kill does not match its checksum.

    <state>/tenant-<digest>.journal
    | entry of position 0 | its records ... | entry of position 1 | its records ... |          (grows at its end)

    entry     0: no pages; UNCUT: pages and no slots; else: pages, cut into slots of so many bytes

    state     written                                        a restarted daemon
    FREE      when nobody can touch the slot any more        hands it out
    WRITING   before the slot is handed out                  holds it until the engine of that number has spoken
    READY     after the last rank's seal, before it is hit   serves it
    ORPHANED  dropped while leased                           holds it until all engines of before have spoken
    torn      (checksum)                                     as ORPHANED
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kvoffload_node.failures import explain
from kvoffload_node.index.slots import MIN_SLOT_BYTES

_RECORD = struct.Struct("<BBHQQ64sI")
_NUMBERS = struct.Struct("<QQ")
_EXTENT = struct.Struct("<QI4x")
UNCUT = 1
RECORD_BYTES = _RECORD.size


class SlotState(IntEnum):
    """State of a slot in the journal."""

    FREE = 0
    WRITING = 1
    READY = 2
    ORPHANED = 3


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot as the journal knows it."""

    offset: int
    state: SlotState
    namespace: int
    account: int
    number: int
    """READY: who stored it. WRITING: the engine it was given to."""
    key: bytes


class TenantJournal:
    """The journal of one tenant's file. Its methods are the only writers."""

    def __init__(self, path: Path, *, num_extents: int, extent_bytes: int) -> None:
        """Open or create the (sparse) file and map it."""
        self.path = path
        self.extent_bytes = extent_bytes
        self._num_extents = num_extents
        most_slots = extent_bytes // MIN_SLOT_BYTES
        self._position_bytes = -(-(_EXTENT.size + most_slots * RECORD_BYTES) // 4096) * 4096
        length = num_extents * self._position_bytes
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size < length:
                os.ftruncate(descriptor, length)
            self._map = mmap.mmap(descriptor, length)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.refusal = ""
        """Why the disk did not take records when it last did not, with the remedy."""

    def make_room(self, position: int, slot_bytes: int) -> bool:
        """Give the records of an extent with slots of this size (or UNCUT) their place on the disk.

        False where the disk does not take them, and `refusal` says why: writing through the mapping to a full disk
        would be SIGBUS, and the daemon's end.
        """
        num_slots = 0 if slot_bytes == UNCUT else self.extent_bytes // slot_bytes
        num_bytes = _EXTENT.size + num_slots * RECORD_BYTES
        try:
            os.posix_fallocate(self._descriptor, position * self._position_bytes, num_bytes)
        except OSError as error:
            self.refusal = explain(error, self.path.parent)
            return False
        return True

    def writing(self, offset: int, slot_bytes: int, engine: int) -> None:
        """The slot is about to be handed out to this engine."""
        self._put(offset, slot_bytes, SlotState.WRITING, 0, 0, engine, b"")

    def ready(self, offset: int, slot_bytes: int, namespace: int, account: int, storer: int, key: bytes) -> None:
        """Every rank has sealed the slot."""
        self._put(offset, slot_bytes, SlotState.READY, namespace, account, storer, key)

    def orphaned(self, offset: int, slot_bytes: int) -> None:
        """The slot's key is gone, readers are not."""
        self._put(offset, slot_bytes, SlotState.ORPHANED, 0, 0, 0, b"")

    def free(self, offset: int, slot_bytes: int) -> None:
        """Nobody can touch the slot any more."""
        begin = self._begin(offset, slot_bytes)
        self._map[begin : begin + RECORD_BYTES] = _ZEROS

    def extent(self, position: int, slot_bytes: int) -> None:
        """The extent at `position` has no pages (0), is UNCUT, or is cut into slots of this size; none is in use."""
        packed = _EXTENT.pack(slot_bytes, zlib.crc32(slot_bytes.to_bytes(8, "little"))) if slot_bytes else _NO_EXTENT
        begin = position * self._position_bytes
        self._map[begin : begin + _EXTENT.size] = packed

    def read_extents(self) -> dict[int, int]:
        """Slot bytes of each position that has pages, UNCUT where it has no slots (or a torn entry)."""
        found = {}
        for position in range(self._num_extents):
            slot_bytes, checksum = _EXTENT.unpack_from(self._map, position * self._position_bytes)
            if slot_bytes or checksum:
                whole = zlib.crc32(slot_bytes.to_bytes(8, "little")) == checksum
                found[position] = slot_bytes if whole else UNCUT
        return found

    def read_slots(self, position: int, slot_bytes: int) -> Iterator[SlotRecord]:
        """The records of one extent, in order of offset."""
        for number in range(self.extent_bytes // slot_bytes):
            offset = position * self.extent_bytes + number * slot_bytes
            begin = self._begin(offset, slot_bytes)
            raw = self._map[begin : begin + RECORD_BYTES]
            if raw == _ZEROS:
                yield SlotRecord(offset, SlotState.FREE, 0, 0, 0, b"")
                continue
            state, key_bytes, account, namespace, number, padded, checksum = _RECORD.unpack(raw)
            key = padded[:key_bytes]
            if checksum != _checksum(state, namespace, account, number, key):
                yield SlotRecord(offset, SlotState.ORPHANED, 0, 0, 0, b"")
            else:
                yield SlotRecord(offset, SlotState(state), namespace, account, number, key)

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()
        os.close(self._descriptor)

    def unlink(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def _begin(self, offset: int, slot_bytes: int) -> int:
        position, within = divmod(offset, self.extent_bytes)
        return position * self._position_bytes + _EXTENT.size + within // slot_bytes * RECORD_BYTES

    def _put(
        self, offset: int, slot_bytes: int, state: int, namespace: int, account: int, number: int, key: bytes
    ) -> None:
        checksum = _checksum(state, namespace, account, number, key)
        begin = self._begin(offset, slot_bytes)
        _RECORD.pack_into(self._map, begin, state, len(key), account, namespace, number, key, checksum)


def _checksum(state: int, namespace: int, account: int, number: int, key: bytes) -> int:
    """Over all fields, every bit of them: the upper half of `namespace` and `number` is the epoch."""
    return zlib.crc32(key, zlib.crc32(_NUMBERS.pack(namespace, number), account << 8 | state))


_ZEROS = bytes(RECORD_BYTES)
_NO_EXTENT = bytes(_EXTENT.size)
