"""Clients that misbehave: they read nothing, say nothing, connect or send without end, and harm nobody else."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from daemon_process import TestEngine, wait_until
from kvoffload.errors import SessionRefused
from kvoffload.protocol.client import Session
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_KEYS,
    Found,
    Generation,
    Lookup,
    Reserve,
    Reserved,
)
from small_pool import hello, start


def test_a_client_that_never_reads_is_held_back_and_harms_nobody(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        good, bad = TestEngine(path), TestEngine(path, engine_id="bad")
        assert daemon.process is not None
        sock = bad.scheduler._sock
        sock.setblocking(False)
        frame = _lookup_frame()
        sent = 0
        deadline = time.monotonic() + 10
        try:
            while time.monotonic() < deadline:
                sent += sock.send(frame * 16)
        except BlockingIOError:
            pass
        assert sent < 64 << 20, "the daemon takes whatever a client sends that reads nothing"
        for _ in range(50):
            good.scheduler.send(Reserve(1, 1))
            good.scheduler.wait_for(Reserved, 30)
        assert _resident_bytes(daemon.process.pid) < 200 << 20
        good.close()
        bad.close()


def _lookup_frame() -> bytes:
    return pack_frame(msgspec.msgpack.encode(Lookup(1, bytes(32 * 256))))


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_connection_that_says_nothing_does_not_count_as_an_engine(folder: Path) -> None:
    with start(folder, None, maxEngines=1) as daemon:
        path = daemon.attach("pod")
        silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for sock in silent:
            sock.connect(str(path))
        TestEngine(path).close()
        for sock in silent:
            sock.close()


def test_before_a_hello_no_frame_longer_than_a_hello_is_taken(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        longest = hello(**dict.fromkeys(("reason", "model", "engine_version", "agent_version"), "😀" * 256))
        longest = msgspec.structs.replace(longest, engine_id="😀" * 128, message="😀" * 8192)
        Session.connect(str(path), longest).close()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall((MAX_HELLO_BYTES + 1).to_bytes(4, "little"))
            sock.settimeout(5)
            assert sock.recv(1) == b""
        assert daemon.metrics()['kvoffload_sessions_closed_total{reason="Malformed"}'] == 1
        assert daemon.metrics()['kvoffload_refusals_total{reason="Malformed"}'] == 1


def test_a_pod_that_opens_connections_without_end_leaves_another_pod_served(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("bad")
        opened = []
        for _ in range(1200):
            opened.append(socket.socket(socket.AF_UNIX))
            opened[-1].connect(str(path))
        with pytest.raises(SessionRefused, match="allowed are 1024"):
            Session.connect(str(path), hello())
        wait_until(lambda: daemon.metrics()['kvoffload_sessions_closed_total{reason="TooManyConnections"}'] > 0)
        TestEngine(daemon.attach("good")).close()
        for sock in opened:
            sock.close()


def test_what_a_pod_can_make_the_daemon_hold_is_bounded_and_another_pod_is_served(folder: Path) -> None:
    """1,000 connections of 1 MiB each that is never a whole message; then answers that nobody reads."""
    allowed = 64 << 20  # 32 MiB of the pod's bytes, and 1,000 sessions
    with start(folder, None, maxEngines=64) as daemon:
        assert daemon.process is not None
        good, bad = TestEngine(daemon.attach("good")), daemon.attach("bad")
        before = _peak_bytes(daemon.process.pid)
        engines = [TestEngine(bad, engine_id=f"e{number}", ranks=32, part_bytes=4096) for number in range(30)]
        sessions = [session for engine in engines for session in (*engine.workers, engine.scheduler)]
        for session in sessions:
            hold_unfinished_frame(session._sock)
        good.scheduler.send(Reserve(1, 1))
        good.scheduler.wait_for(Reserved, 30)
        assert 0 < daemon.metrics()["kvoffload_session_held_bytes"] <= 32 << 20
        ended = daemon.metrics()['kvoffload_sessions_closed_total{reason="TooManyBytes"}']
        assert ended > len(sessions) // 2
        assert daemon.metrics()['kvoffload_refusals_total{reason="TooManyBytes"}'] == ended
        assert daemon.log.count("allowed are 33554432") == 1, "said once"
        for engine in engines:
            engine.close()
        wait_until(lambda: daemon.metrics()["kvoffload_session_held_bytes"] == 0)
        engines = [TestEngine(bad, engine_id=f"f{number}", ranks=32, part_bytes=4096) for number in range(30)]
        for engine in engines:
            for session in (*engine.workers, engine.scheduler):
                ask_without_reading(session._sock)
        good.scheduler.send(Reserve(1, 1))
        good.scheduler.wait_for(Reserved, 30)
        assert daemon.metrics()["kvoffload_session_held_bytes"] > 0
        assert _peak_bytes(daemon.process.pid) < before + allowed
        for engine in (good, *engines):
            engine.close()


def hold_unfinished_frame(sock: socket.socket) -> None:
    """Send all but the last byte of the longest frame, or as much of it as the daemon takes."""
    sock.settimeout(10)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(MAX_FRAME_BYTES.to_bytes(4, "little") + bytes(MAX_FRAME_BYTES - 1))


def ask_without_reading(sock: socket.socket) -> None:
    """Send the longest look-ups, whose answers are 64 KiB each, until the daemon takes no more."""
    sock.setblocking(False)
    frame = pack_frame(msgspec.msgpack.encode(Lookup(1, bytes(32 * MAX_KEYS))))
    with contextlib.suppress(OSError):
        for _ in range(16):
            sock.send(frame)


def _peak_bytes(pid: int) -> int:
    """The most that has been resident, as the kernel has seen it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_generations_without_end_leave_nothing_behind(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("pod"), part_bytes=4096)
        catalog = daemon.state / "catalog"
        before = catalog.stat().st_size
        engine.scheduler.send(*[Generation(private=True)] * 2000, Lookup(1, bytes(32)))
        engine.scheduler.wait_for(Found, 60)
        assert catalog.stat().st_size < before + 1024
        engine.close()


@contextlib.contextmanager
def flood(path: Path, num_ranks: int = 16) -> Iterator[None]:
    """A pod that sends look-ups without end over 17 connections."""
    command = [sys.executable, str(Path(__file__).with_name("flood.py")), str(path), str(num_ranks)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "flooding\n"
            yield
            assert process.poll() is None, "the flood is to be slowed down, not ended"
        finally:
            process.kill()


@pytest.mark.alone  # another program on its core takes the time that pods are seen to be at work in
def test_a_pod_that_floods_the_daemon_has_a_quarter_of_its_time_while_another_pod_is_at_work(folder: Path) -> None:
    """Asserted with twice that, since a pod at work is one that spoke within the last 0.1 s; without turns it has all
    but what the other takes."""
    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("good"), part_bytes=4096)

        def flood_seconds() -> float:
            """Of the daemon's time, for messages that only the flood sends."""
            metrics = daemon.metrics()
            name = "kvoffload_request_duration_seconds_sum"
            return sum(metrics[f'{name}{{operation="{one}"}}'] for one in ("lookup", "unpin"))

        with flood(daemon.attach("bad")):
            before, begun = flood_seconds(), time.monotonic()
            while time.monotonic() < begun + 1.5:
                engine.scheduler.send(Reserve(1, 1))
                engine.scheduler.wait_for(Reserved, 30)
            share = (flood_seconds() - before) / (time.monotonic() - begun)
        assert 0.05 < share < 0.5
        engine.close()
