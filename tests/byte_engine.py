"""An engine that copies real bytes into the real region and checks every byte it loads; it survives the daemon's
restarts.

It speaks the protocol as `kvoffload_engine` does: leases by look-up, credits by reserve, seals by rank, and
re-asserts what it holds when the daemon is another one. Used in one process by the kill rounds, and as a process of
its own by the tests that stop and kill engines.
"""

import contextlib
import hashlib
import mmap
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvoffload.errors import DaemonUnavailable, SessionRefused
from kvoffload.protocol.client import Session
from kvoffload.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    Bind,
    Bound,
    EngineReady,
    Fail,
    Found,
    Hello,
    Lookup,
    Mapped,
    Message,
    Reserve,
    Reserved,
    Revoke,
    Revoked,
    Seal,
    Unpin,
    build_reassertion,
)

KEY_BYTES = 32
_MAP_NORESERVE = 0x4000


def pack(offsets: "list[int]") -> bytes:
    return struct.pack(f"<{len(offsets)}q", *offsets)


def unpack(packed: bytes) -> "list[int]":
    return list(struct.unpack(f"<{len(packed) // 8}q", packed))


def key_of(number: int, salt: int = 0) -> bytes:
    return hashlib.sha256(f"{number}/{salt}".encode()).digest()


def content_of(key: bytes, part: int, num_bytes: int) -> "np.ndarray":
    """The bytes of one part of a key's chunk: told by the key alone, so that any engine can check them."""
    word = hashlib.sha256(key + part.to_bytes(4, "little")).digest()
    return np.frombuffer(word * (num_bytes // 32), dtype=np.uint8)


@dataclass
class Held:
    """What the engine holds in the region now."""

    pins: "dict[int, bytes]" = field(default_factory=dict)
    """Leased slot to its key."""
    writes: "dict[int, tuple[bytes, set[int], int]]" = field(default_factory=dict)
    """Slot it writes: key, ranks that have not ended, epoch in which it was given out."""


class ByteEngine:
    """One engine, `ranks` parts of `part_bytes` each, no part shared: every rank's bytes are told apart."""

    def __init__(
        self,
        path: Path,
        engine_id: str,
        *,
        ranks: int = 2,
        part_bytes: int = 32768,
        identity: int = 1,
        none_hash: bytes = b"none",
        key_bytes: int = KEY_BYTES,
    ) -> None:
        self.path = path
        self.engine_id = engine_id
        self.ranks = ranks
        self.part_bytes = part_bytes
        self.identity = identity.to_bytes(32, "little")
        self.none_hash = none_hash
        self.key_bytes = key_bytes
        self.processes = [os.urandom(16) for _ in range(ranks + 1)]
        self.held = Held()
        self.workers: list[Session] = []
        self.scheduler: Session | None = None
        self.regions: list[np.ndarray] = []
        self.locks: list[int] = []
        self.epoch = 0

    @property
    def slot_bytes(self) -> int:
        return self.ranks * self.part_bytes

    # --- sessions ---------------------------------------------------------------------------------------------------

    def connect(self, timeout_seconds: float = 60.0) -> None:
        """Attach, or attach again; re-asserts what is held if this daemon is another one."""
        before = list(self.locks)
        for session in self.sessions:
            session.close()
        self.workers = [self._hello(rank, timeout_seconds) for rank in range(self.ranks)]
        for worker in self.workers:
            region, lock = worker.take_descriptors()
            self.locks.append(lock)
            if len(self.regions) < self.ranks:
                mapping = mmap.mmap(region, worker.welcome.region_bytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
                self.regions.append(np.frombuffer(mapping, np.uint8))
            os.close(region)
        self.scheduler = self._hello(-1, timeout_seconds)
        self.locks += self.scheduler.take_descriptors()
        epoch, self.epoch = self.epoch, self.scheduler.welcome.epoch
        for rank, worker in enumerate(self.workers):
            if epoch:
                writes = [offset for offset, (_, left, _) in self.held.writes.items() if rank in left]
                worker.send(*build_reassertion(epoch, pack(list(self.held.pins)), pack(writes)))
            worker.send(Mapped())
        if epoch:
            held = pack(list(self.held.pins)), pack(list(self.held.writes))
            self.scheduler.send(*build_reassertion(epoch, *held))
        self._await(EngineReady)
        self.scheduler.send(Bind(self.none_hash, self.key_bytes))
        self.bound = self._await(Bound)
        for lock in before:
            os.close(lock)
            self.locks.remove(lock)

    def _hello(self, rank: int, timeout_seconds: float) -> Session:
        hello = Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            engine_id=self.engine_id,
            role="scheduler" if rank < 0 else "worker",
            rank=rank,
            world_size=self.ranks,
            identity=self.identity,
            part="" if rank < 0 else f"rank-{rank}",
            part_bytes=0 if rank < 0 else self.part_bytes,
            process=self.processes[rank],
        )
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return Session.connect(str(self.path), hello)
            except SessionRefused as error:
                if error.reason.value != "NotReady" or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @property
    def sessions(self) -> "list[Session]":
        return [*self.workers, *([self.scheduler] if self.scheduler else [])]

    def close(self) -> None:
        """Die: every session, lock and mapping is gone (one left in this process would keep the region's pages)."""
        for session in self.sessions:
            session.close()
        for lock in self.locks:
            with contextlib.suppress(OSError):
                os.close(lock)
        self.locks = []
        self.regions = []  # the arrays are the mappings' only users

    def _await(self, wanted: "type[Message]", timeout_seconds: float = 10.0) -> "Message":
        assert self.scheduler is not None
        return self.scheduler.wait_for(wanted, timeout_seconds)

    # --- what an engine does ----------------------------------------------------------------------------------------

    def lookup(self, keys: "list[bytes]") -> "list[int]":
        """Look up, and check every byte of every hit; hits are leased and remembered."""
        assert self.scheduler is not None
        self.scheduler.send(Lookup(1, b"".join(keys)))
        found = self._await(Found)
        assert isinstance(found, Found)
        offsets = unpack(found.offsets)
        again = []
        for key, offset in zip(keys, offsets, strict=True):
            if offset >= 0:
                self.check(key, offset)
                if offset in self.held.pins:
                    again.append(offset)
                self.held.pins[offset] = key
        if again:
            self.scheduler.send(Unpin(pack(again)))
        return offsets

    def check(self, key: bytes, offset: int) -> None:
        """Every part of the slot has the bytes of its key."""
        for rank in range(self.ranks):
            begin = offset + rank * self.part_bytes
            found = self.regions[rank][begin : begin + self.part_bytes]
            assert np.array_equal(found, content_of(key, rank, self.part_bytes)), (
                f"wrong bytes at {offset}, rank {rank}"
            )

    def check_held(self) -> None:
        """What is leased still has its bytes."""
        for offset, key in self.held.pins.items():
            self.check(key, offset)

    def unpin(self, offsets: "list[int]") -> None:
        assert self.scheduler is not None
        for offset in offsets:
            del self.held.pins[offset]
        self.scheduler.send(Unpin(pack(offsets)))

    def reserve(self, count: int) -> "list[int]":
        assert self.scheduler is not None
        self.scheduler.send(Reserve(1, count))
        reserved = self._await(Reserved)
        assert isinstance(reserved, Reserved)
        self.reason = reserved.reason
        return unpack(reserved.offsets)

    def begin_store(self, keys: "list[bytes]") -> "list[int]":
        """Reserve and assign; the ranks have not written yet."""
        assert self.scheduler is not None
        offsets = self.reserve(len(keys))
        keys = keys[: len(offsets)]
        for offset, key in zip(offsets, keys, strict=True):
            self.held.writes[offset] = (key, set(range(self.ranks)), self.epoch)
        self.scheduler.send(Assign(self.epoch, pack(offsets), b"".join(keys)))
        return offsets

    def write(self, rank: int, offsets: "list[int]") -> None:
        """The rank's copy lands; nobody is told."""
        for offset in offsets:
            key, _, _ = self.held.writes[offset]
            begin = offset + rank * self.part_bytes
            self.regions[rank][begin : begin + self.part_bytes] = content_of(key, rank, self.part_bytes)

    def end_write(self, rank: int, offsets: "list[int]", *, failed: bool = False) -> None:
        """The rank tells the daemon that it has written, or failed to."""
        by_epoch: dict[int, list[int]] = {}
        for offset in offsets:
            _, left, epoch = self.held.writes[offset]
            left.discard(rank)
            if not left:
                del self.held.writes[offset]
            by_epoch.setdefault(epoch, []).append(offset)
        for epoch, of_epoch in by_epoch.items():
            self.workers[rank].send((Fail if failed else Seal)(epoch, pack(of_epoch)))

    def store(self, keys: "list[bytes]") -> "list[int]":
        """A whole store, until the daemon has taken it: returns the offsets that keys were given."""
        offsets = self.begin_store(keys)
        for rank in range(self.ranks):
            self.write(rank, offsets)
            self.end_write(rank, offsets)
        return offsets

    def acknowledge_revocations(self) -> "set[int]":
        """Answer what the daemon wants back; returns these extents, none of which may be in use here."""
        taken: set[int] = set()
        for worker in self.workers:
            for message in worker.receive(0.0):
                if isinstance(message, Revoke):
                    extents = set(unpack(message.extents))
                    in_use = {o // worker.welcome.extent_bytes * worker.welcome.extent_bytes for o in self.in_use}
                    assert not extents & in_use, "an extent in use was revoked"
                    worker.send(Revoked(message.extents))
                    taken |= extents
        return taken

    @property
    def in_use(self) -> "set[int]":
        """Slots that this engine may touch."""
        return {*self.held.pins, *self.held.writes}

    def reserve_and_return(self, count: int) -> "list[int]":
        """Credits that go back at once."""
        assert self.scheduler is not None
        offsets = self.reserve(count)
        if offsets:
            self.scheduler.send(Fail(self.epoch, pack(offsets)))
        return offsets

    def wait_for_room(self, count: int, timeout_seconds: float = 20.0) -> None:
        """Wait until extents are allocated: the credits go back at once."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if len(self.reserve_and_return(count)) == count:
                return
            time.sleep(0.01)
        raise DaemonUnavailable(f"no {count} slots within {timeout_seconds:g} s: {self.reason}")
