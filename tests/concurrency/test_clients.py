"""Clients that misbehave: they read nothing, say nothing, connect or send without end, and harm nobody else."""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_process import TestEngine, wait_until
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import Found, Generation, Lookup, Reserve, Reserved
from small_pool import start, value


@pytest.mark.alone
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
            begun = time.monotonic()
            good.scheduler.send(Reserve(1, 1))
            good.scheduler.wait_for(Reserved, 5)
            assert time.monotonic() - begun < 1
        assert _resident_bytes(daemon.process.pid) < 200 << 20
        good.close()
        bad.close()


def _lookup_frame() -> bytes:
    import msgspec

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


def test_a_pod_that_opens_connections_without_end_leaves_another_pod_served(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("bad")
        opened = []
        for _ in range(1200):
            opened.append(socket.socket(socket.AF_UNIX))
            opened[-1].connect(str(path))
        wait_until(lambda: value(daemon, 'kvoffload_sessions_closed_total{reason="TooManyConnections"}') > 0)
        TestEngine(daemon.attach("good")).close()
        for sock in opened:
            sock.close()


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


def answer_seconds(engine: TestEngine, count: int) -> list[float]:
    """Times of look-ups one after another, each answered with as many offsets as keys."""
    times = []
    for number in range(count):
        begun = time.perf_counter()
        engine.scheduler.send(Lookup(number, bytes(32 * 64)))
        found = engine.scheduler.wait_for(Found, 30)
        times.append(time.perf_counter() - begun)
        assert (found.request, len(found.offsets)) == (number, 8 * 64)
    return times


@pytest.mark.alone
def test_a_pod_that_floods_the_daemon_is_slow_and_another_pod_is_not(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("good"), part_bytes=4096)
        alone = answer_seconds(engine, 300)
        with flood(daemon.attach("bad")):
            beside = answer_seconds(engine, 300)
        for name, times in (("alone", alone), ("beside a flood", beside)):
            ordered = [1e6 * seconds for seconds in sorted(times)]
            print(f"{name}: median {ordered[150]:.0f} us, p99 {ordered[297]:.0f} us")
        assert statistics.median(beside) < 30 * statistics.median(alone)
        engine.close()
