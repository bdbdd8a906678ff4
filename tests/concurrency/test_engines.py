"""Engines that are killed, stopped, restarted and replaced, on a real daemon with real pages (cases 4, 6 to 13)."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_engine import ByteEngine, key_of, pack
from daemon_process import DaemonProcess, hugetlb_mount, wait_until
from kvoffload.protocol.messages import Fail

CAPACITY_BYTES = 16 << 20
SLOT_BYTES = 65536
NUM_SLOTS = CAPACITY_BYTES // SLOT_BYTES
STEPS = ("reserve", "assigned", "written-0", "sealed-0", "written-1", "sealed-1")

pytestmark = pytest.mark.hugepages


@pytest.fixture(scope="module")
def mount() -> Iterator[Path]:
    with hugetlb_mount(CAPACITY_BYTES, limit=True) as path:
        yield path


@pytest.fixture
def daemon(mount: Path) -> Iterator[DaemonProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvo-eng-"))
    with DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, mount=mount, sharing="Namespace") as daemon:
        yield daemon
    shutil.rmtree(folder)


class EngineProcess:
    """`engine_process.py`, spoken to by lines."""

    def __init__(self, path: Path, engine_id: str, what: str, number: int = 0) -> None:
        script = Path(__file__).with_name("engine_process.py")
        self.process = subprocess.Popen(
            # one that is stopped would outlive a failed test, and keep the node's pages
            ["setpriv", "--pdeathsig", "KILL", sys.executable, str(script), str(path), engine_id, what, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])},
        )

    def wait_for(self, wanted: str) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().decode().strip():
            if line.startswith(wanted):
                return line
        raise AssertionError(f"the engine ended before it said {wanted!r}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def attached(path: Path, engine_id: str, **kwargs: Any) -> Iterator[ByteEngine]:
    engine = ByteEngine(path, engine_id, **kwargs)
    engine.connect()
    engine.wait_for_room(1)
    try:
        yield engine
    finally:
        engine.close()


def lookup_until_hit(engine: ByteEngine, keys: list[bytes]) -> list[int]:
    deadline = time.monotonic() + 10
    while -1 in (found := engine.lookup(keys)):
        assert time.monotonic() < deadline, "sealed keys are not hit"
    return found


def num_handled(daemon: DaemonProcess, operation: str) -> float:
    """Messages of a kind that the daemon has handled since its start."""
    return daemon.metrics()[f'kvoffload_request_duration_seconds_count{{operation="{operation}"}}']


def free_pages(mount: Path) -> int:
    status = os.statvfs(mount)
    return status.f_bfree


def test_one_engine_hits_what_another_of_its_tenant_stored(daemon: DaemonProcess) -> None:
    keys = [key_of(number) for number in range(8)]
    with attached(daemon.attach("a"), "x") as first, attached(daemon.attach("b"), "y") as second:
        first.store(keys)
        lookup_until_hit(second, keys)
        assert daemon.metrics()["kvoffload_cross_engine_hits_total"] == 8


@pytest.mark.parametrize(
    ("namespace", "kwargs"),
    [
        ("default", {"identity": 2}),
        ("default", {"part_bytes": 16384}),
        ("default", {"ranks": 4, "part_bytes": 16384}),
        ("default", {"none_hash": b"other"}),
        ("default", {"key_bytes": 64}),
        ("other", {}),
    ],
    ids=["identity", "row", "row of as many bytes", "hash seed", "key bytes", "tenant"],
)
def test_case_4_what_means_something_else_is_never_hit(
    daemon: DaemonProcess, namespace: str, kwargs: dict[str, Any]
) -> None:
    keys = [key_of(number) for number in range(4)]
    with attached(daemon.attach("a"), "x") as first:
        first.store(keys)
        lookup_until_hit(first, keys)
        with attached(daemon.attach("b", namespace=namespace), "x", **kwargs) as second:
            assert second.bound.num_ready == 0
            assert second.lookup([key.ljust(second.key_bytes) for key in keys]) == [-1] * 4


def test_case_4_pod_and_engine_names_are_no_part_of_the_namespace(daemon: DaemonProcess) -> None:
    keys = [key_of(number) for number in range(4)]
    with (
        attached(daemon.attach("a", name="one"), "x") as first,
        attached(daemon.attach("b", name="two"), "z") as second,
    ):
        first.store(keys)
        lookup_until_hit(second, keys)


def test_case_6_an_engine_killed_five_times_starts_five_times_and_leaves_nothing(
    daemon: DaemonProcess, mount: Path
) -> None:
    path = daemon.attach("pod")
    after: list[int] = []
    for _ in range(5):
        engine = EngineProcess(path, "engine", "pin-all")
        engine.wait_for("pinned")
        engine.kill()
        wait_until(lambda: not list((daemon.state / "attachments").iterdir()))
        wait_until(lambda: daemon.metrics()['kvoffload_slots{state="leased"}'] == 0)
        after.append(free_pages(mount))
    assert len(set(after)) == 1


def test_case_7_an_old_engines_end_takes_nothing_from_its_successor(daemon: DaemonProcess) -> None:
    path = daemon.attach("pod")
    old = ByteEngine(path, "engine")
    old.connect()
    old.wait_for_room(4)
    unfinished = old.begin_store([key_of(number, salt=1) for number in range(4)])
    with attached(path, "engine") as successor:
        keys = [key_of(number) for number in range(8)]
        successor.store(keys)
        held = lookup_until_hit(successor, keys)
        writing = successor.begin_store([key_of(100)])
        old.close()
        wait_until(lambda: len(list((daemon.state / "attachments").glob("*.json"))) == 3)
        successor.check_held()
        for rank in range(2):
            successor.write(rank, writing)
            successor.end_write(rank, writing)
        lookup_until_hit(successor, [key_of(100)])
        assert not set(unfinished) & {*held, *writing}


def run_case_8(daemon: DaemonProcess, rounds: int) -> None:
    path = daemon.attach("pod")
    pair = [key_of(1, salt=8), key_of(2, salt=8)]
    with attached(path, "reader") as reader, attached(path, "writer") as writer:
        for number in range(rounds):
            found = reader.lookup(pair)
            if -1 in found:
                reader.unpin([offset for offset in found if offset >= 0])
                reader.store(pair)
                continue
            taken = writer.store([key_of(number * 1000 + i, salt=80) for i in range(64)])
            assert not set(taken) & set(found)
            reader.check_held()
            reader.unpin(found)


def test_case_8_what_a_lookup_found_keeps_its_bytes_until_it_is_loaded(daemon: DaemonProcess) -> None:
    run_case_8(daemon, 150)


@pytest.mark.long
def test_case_8_ten_thousand_rounds(daemon: DaemonProcess) -> None:
    run_case_8(daemon, 10_000)


def test_case_9_aborted_requests_leave_neither_leases_nor_slots(daemon: DaemonProcess) -> None:
    with attached(daemon.attach("pod"), "engine") as engine:
        keys = [key_of(number) for number in range(8)]
        engine.store(keys)
        found = lookup_until_hit(engine, keys)
        engine.unpin(found)  # aborted before it was scheduled
        offsets = engine.begin_store([key_of(100 + number) for number in range(4)])
        for rank in range(2):  # aborted between prepare and complete: the ranks report a failed copy
            engine.end_write(rank, offsets, failed=True)
        engine.lookup([key_of(100)])
        figures = daemon.metrics()
        assert figures['kvoffload_slots{state="leased"}'] == 0
        assert figures['kvoffload_slots{state="writing"}'] == 0
        assert engine.lookup([key_of(100 + number) for number in range(4)]) == [-1] * 4


def test_case_10_a_key_stored_by_many_at_once_is_one_value_whole_or_a_miss(daemon: DaemonProcess) -> None:
    path = daemon.attach("pod")
    engines = [EngineProcess(path, f"e{number}", "store-one-key", number + 1) for number in range(8)]
    try:
        for engine in engines:
            engine.wait_for("storing")
        reader = ByteEngine(path, "reader")
        reader.check = lambda key, offset: None  # type: ignore[method-assign]
        reader.connect()
        seen: set[int] = set()
        for number in range(200):
            if number == 50:
                engines[0].send(signal.SIGSTOP)
                engines[1].kill()
            if number == 100:
                engines[2].kill()
                engines[3].send(signal.SIGSTOP)
            (offset,) = reader.lookup([key_of(0, salt=10)])
            if offset < 0:
                continue
            values = np.unique(reader.regions[0][offset : offset + SLOT_BYTES])
            assert len(values) == 1, f"{len(values)} values in one slot"
            seen.add(int(values[0]))
            reader.scheduler.send(_drop(reader, offset))
            reader.unpin([offset])
        assert seen
        reader.close()
    finally:
        for engine in engines:
            if engine.process.poll() is None:
                engine.kill()


def _drop(engine: ByteEngine, offset: int):
    """The value was read: let another one come."""
    return Fail(engine.epoch, pack([offset]), drop=True)


@pytest.mark.parametrize("step", STEPS)
def test_case_11_a_writer_killed_at_a_step_leaves_right_bytes_or_usable_slots(daemon: DaemonProcess, step: str) -> None:
    path = daemon.attach("pod")
    engine = EngineProcess(path, "writer", "store-in-steps", 0)
    for name in STEPS:
        engine.wait_for(name)
        if name == step:
            break
        engine.go_on()
    # What it sent is read before both are killed: a step is one that the daemon knows of.
    reached = STEPS.index(step)
    num_assigns, num_seals = int(reached >= 1), int(reached >= 3) + int(reached >= 5)
    wait_until(lambda: num_handled(daemon, "assign") == num_assigns and num_handled(daemon, "seal") == num_seals)
    engine.kill()
    daemon.kill()
    daemon.start()
    keys = [key_of(number, salt=11) for number in range(4)]
    with attached(path, "reader") as reader:
        found = reader.lookup(keys)
        assert (-1 in found) == (step != "sealed-1")
        wait_until(lambda: daemon.metrics()['kvoffload_slots{state="writing"}'] == 0)
        reader.unpin([offset for offset in found if offset >= 0])
        stored = reader.store([key_of(1000 + number) for number in range(16)])
        assert len(stored) == 16


def test_case_12_an_engine_goes_on_after_the_daemons_death_without_a_restart(daemon: DaemonProcess) -> None:
    with attached(daemon.attach("pod"), "engine") as engine:
        before = [key_of(number) for number in range(8)]
        engine.store(before)
        lookup_until_hit(engine, before)
        daemon.kill()
        engine.check_held()
        daemon.start()
        engine.connect()
        lookup_until_hit(engine, before)
        after = [key_of(100 + number) for number in range(8)]
        engine.wait_for_room(8)
        engine.store(after)
        lookup_until_hit(engine, after)


def test_a_slot_dropped_after_a_restart_is_free_only_when_its_reader_of_before_has_spoken(
    daemon: DaemonProcess,
) -> None:
    path = daemon.attach("pod")
    with attached(path, "slow") as slow, attached(path, "quick") as quick:
        keys = [key_of(number) for number in range(8)]
        slow.store(keys)
        lookup_until_hit(slow, keys)
        daemon.kill()
        daemon.start()
        quick.connect()
        found = lookup_until_hit(quick, keys)
        quick.scheduler.send(Fail(quick.epoch, pack(found), drop=True))
        quick.unpin(found)
        others = [key_of(number, salt=1) for number in range(NUM_SLOTS)]
        given = {offset for at in range(0, NUM_SLOTS, 16) for offset in quick.store(others[at : at + 16])}
        assert not given & set(found)
        slow.check_held()
        slow.connect()
        assert slow.lookup(keys) == [-1] * 8
        slow.unpin(found)
        wait_until(lambda: daemon.metrics()['kvoffload_slots{state="orphaned"}'] == 0)
        assert daemon.metrics()['kvoffload_sessions_closed_total{reason="Malformed"}'] == 0


def test_case_13_a_stopped_owner_keeps_what_it_pins_and_a_dead_one_gives_it_back(daemon: DaemonProcess) -> None:
    path = daemon.attach("pod")
    owner = EngineProcess(path, "owner", "pin-all")
    try:
        assert owner.wait_for("pinned") == f"pinned {NUM_SLOTS}"
        owner.send(signal.SIGSTOP)
        with attached_without_room(path, "other") as other:
            for _ in range(20):
                assert other.reserve(4) == []
                assert other.reason == "AllLeased"
            owner.kill()
            wait_until(lambda: len(other.reserve_and_return(4)) == 4)
    finally:
        if owner.process.poll() is None:
            owner.kill()


@contextmanager
def attached_without_room(path: Path, engine_id: str) -> Iterator[ByteEngine]:
    engine = ByteEngine(path, engine_id)
    engine.connect()
    try:
        yield engine
    finally:  # a mapping that stays keeps the pages from every test after this one
        engine.close()


def test_an_engine_whose_connections_break_takes_over_what_it_held(daemon: DaemonProcess) -> None:
    with attached(daemon.attach("pod"), "engine") as engine:
        keys = [key_of(number) for number in range(8)]
        engine.store(keys)
        lookup_until_hit(engine, keys)
        unfinished = engine.begin_store([key_of(100 + number) for number in range(4)])
        credits = engine.reserve(4)
        engine.connect()
        figures = daemon.metrics()
        assert figures['kvoffload_slots{state="leased"}'] == 8
        assert figures['kvoffload_slots{state="writing"}'] == len(unfinished), f"{len(credits)} credits are still kept"
        for rank in range(2):
            engine.write(rank, unfinished)
            engine.end_write(rank, unfinished)
        lookup_until_hit(engine, [key_of(100 + number) for number in range(len(unfinished))])
        engine.check_held()
        wait_until(lambda: len(list((daemon.state / "attachments").glob("*.json"))) == 3)
