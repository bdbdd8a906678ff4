"""A node daemon for tests of the engine: the whole protocol over a memfd, no eviction, and faults on command.

It is no proof of the daemon (`kvoffload_node` has its own tests); it is there to be slow, to fall silent or to talk
nonsense in the way that a test asks for, which the real one cannot be asked to do.

    python -m scripted_daemon SOCKET REGION_BYTES       serves until it is killed; the first line of stdout says
    "ready"

Faults, as lines on stdin: `delay SECONDS` before each answer, `silent` (reads, answers nothing), a name of `NONSENSE`
(what it answers), `close` (ends every session), `miss` (every look-up is a miss), `normal`. `revoke` asks every worker
for its one extent, `dump` prints the daemon's state as JSON.
"""

import asyncio
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvoffload.layout.rows import RankPart, plan_row
from kvoffload.protocol.framing import FrameReader, pack_frame
from kvoffload.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    Bind,
    Bound,
    EngineReady,
    Fail,
    Found,
    FromEngine,
    Generation,
    Hello,
    Lookup,
    Mapped,
    Message,
    Reassert,
    Report,
    Reserve,
    Reserved,
    Revoke,
    Revoked,
    Seal,
    Unpin,
    Welcome,
)

PAGE = 4096


def pack(offsets: list[int]) -> bytes:
    return np.array(offsets, dtype="<i8").tobytes()


def unpack(offsets: bytes) -> list[int]:
    return np.frombuffer(offsets, dtype="<i8").tolist()


def _frame(fields: list) -> bytes:
    return pack_frame(msgspec.msgpack.encode(fields))


def _with_offsets(fields: list, change: Callable[[bytes], bytes]) -> bytes:
    """The same answer with other offsets, if it has any: the third field of `Found`, the fourth of `Reserved`."""
    at = {"found": 2, "reserved": 3}.get(fields[0])
    return _frame(fields if at is None else [*fields[:at], change(fields[at]), *fields[at + 1 :]])


def _with_row(fields: list, *row: object) -> bytes:
    """`EngineReady` with another row, any other message as it is."""
    return _frame(["ready", True, *row] if fields[0] == "ready" else fields)


NONSENSE: dict[str, Callable[[list], bytes]] = {
    "unknown-type": lambda _: _frame(["abc", 1, 2]),
    "no-msgpack": lambda _: pack_frame(b"\xc1" * 16),
    "half-frame": lambda fields: _frame(fields)[:-3],
    "huge-length": lambda fields: b"\xff\xff\xff\xff" + _frame(fields)[4:],
    "empty-frame": lambda _: bytes(4),
    "too-many-offsets": lambda fields: _with_offsets(fields, lambda offsets: offsets + pack([0])),
    "no-offsets": lambda fields: _with_offsets(fields, lambda _: b""),
    "offsets-cut-short": lambda fields: _with_offsets(fields, lambda offsets: offsets[:-3]),
    "offsets-outside": lambda fields: _with_offsets(fields, lambda offsets: pack([1 << 62] * (len(offsets) // 8))),
    "slots-of-no-bytes": lambda fields: _with_row(fields, 0, [0, 0], [1, 1], [0, 0]),
    "row-of-no-ranks": lambda fields: _with_row(fields, PAGE, [], [], []),
    "part-before-its-slot": lambda fields: _with_row(fields, 4 * PAGE, [-(1 << 40)] * 2, [1, 1], [0, 0]),
}
"""What is sent instead of a message: by the fault's name, from its fields (the tag first)."""


@dataclass
class Engine:
    hellos: dict[int, Hello] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)
    sessions: dict[int, "Connection"] = field(default_factory=dict)
    namespace: tuple = ()
    key_bytes: int = 0
    generation: int = 0
    is_ready: bool = False


@dataclass
class Slot:
    key: tuple | None = None
    sealed: set[int] = field(default_factory=set)
    is_ready: bool = False
    leases: int = 0


class ScriptedDaemon:
    def __init__(self, region_bytes: int, epoch: int = 1) -> None:
        self.region_bytes = region_bytes
        self.epoch = epoch
        self.region = os.memfd_create("kvoffload-test")
        os.truncate(self.region, region_bytes)
        self.end = 0
        self.free: list[int] = []
        self.slots: dict[int, Slot] = {}
        self.ready: dict[tuple, int] = {}
        self.engines: dict[str, Engine] = {}
        self.connections: set[Connection] = set()
        self.fault = "normal"
        self.delay_seconds = 0.0
        self.counts = {"lookups": 0, "hits": 0, "sealed": 0, "failed": 0, "dropped": 0, "revoked": 0, "reports": []}

    def dump(self) -> dict:
        return {
            **self.counts,
            "ready": len(self.ready),
            "leases": sum(slot.leases for slot in self.slots.values()),
            "writing": sum(not slot.is_ready and slot.key is not None for slot in self.slots.values()),
            "engines": {
                name: {
                    str(rank): [hello.part, hello.part_bytes, hello.reason, hello.identity.hex()]
                    for rank, hello in one.hellos.items()
                }
                for name, one in self.engines.items()
            },
            "offsets": sorted(self.ready.values()),
        }

    def reserve(self, slot_bytes: int) -> int | None:
        if self.free:
            return self.free.pop()
        if self.end + slot_bytes > self.region_bytes:
            return None
        self.end += slot_bytes
        return self.end - slot_bytes


class Connection(asyncio.Protocol):
    def __init__(self, daemon: ScriptedDaemon) -> None:
        self.daemon = daemon
        self.reader = FrameReader()
        self.hello: Hello | None = None
        self.leases: list[int] = []
        self.reserved: set[int] = set()
        self.decoder = msgspec.msgpack.Decoder(FromEngine)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.daemon.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.daemon.connections.discard(self)
        for offset in self.leases:
            self.daemon.slots[offset].leases -= 1
        self.daemon.free += self.reserved

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data)
        while (payload := self.reader.next_frame()) is not None:
            message = self.decoder.decode(payload)
            if self.daemon.delay_seconds:
                asyncio.get_running_loop().call_later(self.daemon.delay_seconds, self.take, message)
            else:
                self.take(message)

    def take(self, message: FromEngine) -> None:
        try:
            self.handle(message)
        except (KeyError, ValueError):  # it speaks of slots that it was never given, or was given by nonsense
            self.transport.abort()

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        if self.daemon.fault == "silent":
            return
        frame = pack_frame(msgspec.msgpack.encode(message))
        if self.daemon.fault in NONSENSE:
            frame = NONSENSE[self.daemon.fault](msgspec.to_builtins(message, builtin_types=(bytes,)))
        if descriptors:
            raw = self.transport.get_extra_info("socket")
            socket.send_fds(socket.socket(fileno=os.dup(raw.fileno())), [frame], list(descriptors))
        else:
            self.transport.write(frame)

    @property
    def engine(self) -> Engine:
        return self.daemon.engines[self.hello.engine_id]

    def handle(self, message: FromEngine) -> None:
        daemon = self.daemon
        match message:
            case Hello():
                self.hello = message
                engine = daemon.engines.setdefault(message.engine_id, Engine())
                engine.sessions[message.rank] = self
                engine.is_ready = False
                if message.role == "worker":
                    engine.hellos[message.rank] = message
                    engine.mapped.discard(message.rank)
                lock = os.memfd_create("lock")
                fcntl.flock(lock, fcntl.LOCK_EX)
                welcome = Welcome(PROTOCOL_VERSION, daemon.epoch, daemon.region_bytes, daemon.region_bytes, "scripted")
                self.send(welcome, (daemon.region, lock) if message.role == "worker" else (lock,))
                os.close(lock)
                self.push_ready()
            case Mapped():
                self.engine.mapped.add(self.hello.rank)
                self.push_ready()
            case Bind():
                self.engine.namespace = (self.hello.identity, message.none_hash, message.private)
                self.engine.key_bytes = message.key_bytes
                self.send(Bound(len(daemon.ready)))
            case Lookup():
                size = self.engine.key_bytes
                keys = [message.keys[i : i + size] for i in range(0, len(message.keys), size)]
                offsets = [daemon.ready.get(self.name(key, message.namespace), -1) for key in keys]
                if daemon.fault == "miss":
                    offsets = [-1] * len(keys)
                for offset in offsets:
                    if offset >= 0:
                        daemon.slots[offset].leases += 1
                        self.leases.append(offset)
                daemon.counts["lookups"] += 1
                daemon.counts["hits"] += sum(offset >= 0 for offset in offsets)
                self.send(Found(message.request, pack(offsets)))
            case Unpin():
                for offset in unpack(message.offsets):
                    daemon.slots[offset].leases -= 1
                    self.leases.remove(offset)
            case Reserve():
                given = [daemon.reserve(self.row.slot_bytes) for _ in range(message.count)]
                offsets = [offset for offset in given if offset is not None]
                for offset in offsets:
                    daemon.slots[offset] = Slot()
                self.reserved.update(offsets)
                self.send(Reserved(message.request, daemon.epoch, pack(offsets), "" if None not in given else "full"))
            case Assign():
                size = self.engine.key_bytes
                for index, offset in enumerate(unpack(message.offsets)):
                    self.reserved.discard(offset)
                    key = message.keys[index * size : (index + 1) * size]
                    daemon.slots[offset].key = self.name(key, message.namespace)
                    self.publish(offset)
            case Seal():
                for offset in unpack(message.offsets):
                    daemon.slots[offset].sealed.add(self.hello.rank)
                    daemon.counts["sealed"] += 1
                    self.publish(offset)
            case Fail():
                for offset in unpack(message.offsets):
                    slot = daemon.slots[offset]
                    if offset in self.reserved:
                        self.reserved.discard(offset)
                        daemon.free.append(offset)
                    daemon.counts["dropped" if message.drop else "failed"] += 1
                    daemon.ready.pop(slot.key, None)
                    slot.key = None
            case Generation():
                self.engine.generation += 1
            case Reassert():
                pass
            case Revoked():
                daemon.counts["revoked"] += 1
            case Report():
                daemon.counts["reports"].append([self.hello.rank, message.stored_bytes, message.loaded_bytes])

    def name(self, key: bytes, namespace: int) -> tuple:
        private = self.hello.engine_id if namespace else ""
        return (self.engine.namespace, self.row.part_offsets, private, self.engine.generation, key)

    @property
    def row(self):
        hellos = self.engine.hellos
        return plan_row([RankPart(hellos[rank].part, hellos[rank].part_bytes) for rank in sorted(hellos)])

    def push_ready(self) -> None:
        engine = self.engine
        world = self.hello.world_size
        if len(engine.mapped) < world or -1 not in engine.sessions:
            return
        row = self.row
        for session in engine.sessions.values():
            session.send(
                EngineReady(row.is_replicated, row.slot_bytes, row.part_offsets, row.sharers, row.sharer_index)
            )

    def publish(self, offset: int) -> None:
        slot = self.daemon.slots[offset]
        if slot.key is not None and len(slot.sealed) == self.hello.world_size and not slot.is_ready:
            slot.is_ready = True
            if slot.key in self.daemon.ready:
                self.daemon.free.append(offset)
            else:
                self.daemon.ready[slot.key] = offset


async def serve(path: str, region_bytes: int) -> None:
    daemon = ScriptedDaemon(region_bytes)
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(lambda: Connection(daemon), path)
    print("ready", flush=True)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode().split():
        match line:
            case ["dump"]:
                print(json.dumps(daemon.dump()), flush=True)
                continue
            case ["delay", seconds]:
                daemon.delay_seconds = float(seconds)
            case ["revoke"]:
                for connection in daemon.connections:
                    if connection.hello.role == "worker":
                        connection.send(Revoke(pack([0])))
            case ["close"]:
                for connection in list(daemon.connections):
                    connection.transport.abort()
            case [fault]:
                daemon.fault, daemon.delay_seconds = fault, 0.0
        print("ok", time.monotonic(), flush=True)


if __name__ == "__main__":
    Path(sys.argv[1]).unlink(missing_ok=True)
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
