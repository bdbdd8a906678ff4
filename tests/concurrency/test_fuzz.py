"""Whatever a pod sends ends at worst its own session: frames with one field changed, and bytes without sense.

Half of the inputs are valid frames in which one field was changed; the daemon is a real one, and an engine that behaves
works beside it the whole time.
"""

import fcntl
import os
import random
import shutil
import socket
import struct
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon_process import DaemonProcess, TestEngine, wait_until
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    Bind,
    Fail,
    Found,
    Generation,
    Hello,
    Lookup,
    Mapped,
    Pin,
    Reassert,
    Report,
    Reserve,
    Revoked,
    Seal,
    Unpin,
)

KEYS = bytes(range(32)) * 4
NEVER_STORED = b"\xff" * 32
OFFSETS = struct.pack("<4q", 0, 65536, 131072, 1 << 40)
HELLO = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, "fuzz", "worker", 0, 2, b"i" * 32, "all", 65536)
VALID = [
    HELLO,
    Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, "fuzz", "scheduler", -1, 2, b"i" * 32),
    Mapped(),
    Bind(b"none", 32),
    Lookup(1, KEYS),
    Pin(OFFSETS),
    Unpin(OFFSETS),
    Reserve(1, 4),
    Assign(1, OFFSETS, KEYS),
    Seal(1, OFFSETS),
    Fail(1, OFFSETS),
    Fail(1, OFFSETS, True),
    Generation(),
    Reassert(1, OFFSETS, OFFSETS),
    Revoked(OFFSETS),
    Report(stored_bytes=1, loaded_bytes=2),
]
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, "", "x" * 300, "x" * 70000, b"",
    b"\0" * 7, b"\xff" * 8, b"\xff" * 65536, struct.pack("<q", -(2**63)), [], [[]] * 3, {}, {"a": 1}, "hello",
    "\u0000", "../../etc",
]  # fmt: skip


class Fuzzer:
    """Sends inputs over connections that it opens as the daemon closes them."""

    def __init__(self, path: Path, *, seed: int, other: TestEngine) -> None:
        self.random = random.Random(seed)
        self.path = str(path)
        self.other = other
        self.sock: socket.socket | None = None

    def input(self) -> bytes:
        kind = self.random.random()
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(self.random.choice(VALID)))
        if kind < 0.5:
            place = self.random.randrange(len(fields))
            fields[place] = self.random.choice(ODD)
            return pack_frame(msgspec.msgpack.encode(fields))
        if kind < 0.7:
            return pack_frame(msgspec.msgpack.encode(fields))
        frame = bytearray(pack_frame(msgspec.msgpack.encode(fields)))
        if kind < 0.85:
            for _ in range(self.random.randint(1, 4)):
                frame[self.random.randrange(len(frame))] = self.random.randrange(256)
            return bytes(frame)
        if kind < 0.95:
            return os.urandom(self.random.randint(1, 200))
        return bytes(frame[: self.random.randrange(1, len(frame) + 1)])

    def send(self, count: int) -> None:
        for _ in range(count):
            if self.sock is None or self.random.random() < 0.05:
                self.reopen()
            assert self.sock is not None
            try:
                self.sock.sendall(self.input())
                self.wait_until_handled()
                while self.sock.recv(1 << 16):
                    pass
                self.close()
            except BlockingIOError:
                continue
            except OSError:
                self.close()

    def wait_until_handled(self) -> None:
        """Until the daemon has taken every byte, and then answered another: what goes into a connection that it is
        about to end, it never sees."""
        sock = self.sock
        assert sock is not None
        wait_until(lambda: not any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))), pause_seconds=0)
        self.other.scheduler.send(Lookup(3, NEVER_STORED))
        self.other.scheduler.wait_for(Found, 10)

    def reopen(self) -> None:
        wait_until(self._is_open)

    def _is_open(self) -> bool:
        """False where the daemon refuses another connection of this pod until it has seen the end of earlier ones."""
        self.close()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)
        self.sock.setblocking(False)
        if self.random.random() < 0.8:
            try:
                self.sock.sendall(pack_frame(msgspec.msgpack.encode(HELLO)))
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvo-fuzz-"))
    with DaemonProcess(folder, capacity_bytes=32 << 20, maxEngines=1024) as daemon:
        yield daemon
    shutil.rmtree(folder)


def resident_bytes(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]) * 4096


def num_descriptors(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def store_and_hit(engine: TestEngine, first: int) -> None:
    keys = b"".join((first + number).to_bytes(32, "little") for number in range(4))
    offsets = engine.reserve(4)
    engine.scheduler.send(Assign(engine.epoch, offsets, keys))
    for worker in engine.workers:
        worker.send(Seal(engine.epoch, offsets))

    def is_hit() -> bool:
        engine.scheduler.send(Lookup(2, keys))
        found = engine.scheduler.wait_for(Found, 10)
        hits = [found.offsets[i : i + 8] for i in range(0, 32, 8) if found.offsets[i : i + 8] != b"\xff" * 8]
        engine.scheduler.send(Unpin(b"".join(hits)))
        return len(hits) == 4

    wait_until(is_hit)


def fuzz(daemon: DaemonProcess, num_inputs: int) -> None:
    engine = TestEngine(daemon.attach("good"))
    fuzzer = Fuzzer(daemon.attach("bad", namespace="other"), seed=7, other=engine)
    before = resident_bytes(daemon)
    for number in range(10):
        fuzzer.send(num_inputs // 10)
        store_and_hit(engine, number * 100)
    fuzzer.close()
    assert daemon.process is not None
    assert daemon.process.poll() is None
    bugs = daemon.log.find("a bug of this daemon")
    assert bugs < 0, daemon.log[bugs : bugs + 3000]
    assert daemon.metrics()['kvoffload_sessions_closed_total{reason="Malformed"}'] > num_inputs // 2, (
        "most inputs end their session"
    )
    wait_until(lambda: num_descriptors(daemon) < 40)
    assert resident_bytes(daemon) < before + (64 << 20)
    engine.close()


def test_no_input_harms_the_daemon_or_another_pod(daemon: DaemonProcess) -> None:
    fuzz(daemon, 3_000)


@pytest.mark.long
def test_a_hundred_thousand_inputs(daemon: DaemonProcess) -> None:
    fuzz(daemon, 100_000)
