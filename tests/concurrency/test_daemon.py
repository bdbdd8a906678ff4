"""The daemon as a whole: memory that follows demand, quotas, modes, ends, slow clients, metrics."""

import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_engine import ByteEngine, key_of, unpack
from daemon_process import DaemonProcess, TestEngine, connect, hugetlb_mount, wait_until
from kvoffload.errors import KVOffloadError, SessionRefused
from kvoffload.protocol.client import Session
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import (
    Bind,
    Drain,
    Found,
    Generation,
    Hello,
    Lookup,
    Mapped,
    Refused,
    Reserve,
    Reserved,
    Unpin,
)

CAPACITY_BYTES = 16 << 20
NUM_SLOTS = CAPACITY_BYTES // 65536


@pytest.fixture(scope="module")
def mount() -> Iterator[Path]:
    with hugetlb_mount(CAPACITY_BYTES, limit=True) as path:
        yield path


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvo-dmn-"))
    yield path
    shutil.rmtree(path)


def start(folder: Path, mount: Path | None, environment: dict[str, str] | None = None, **spec: object) -> DaemonProcess:
    return DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, mount=mount, environment=environment, **spec)


def attach(path: Path, engine_id: str, **kwargs: int) -> ByteEngine:
    engine = ByteEngine(path, engine_id, **kwargs)
    engine.connect()
    return engine


def fill(engine: ByteEngine, count: int, salt: int, others: tuple[ByteEngine, ...] = ()) -> list[bytes]:
    """Store `count` keys, however long that takes; other engines answer what is asked of them meanwhile."""
    keys = [key_of(number, salt=salt) for number in range(count)]
    left = list(keys)
    deadline = time.monotonic() + 30
    while left:
        stored = engine.store(left[:16])
        del left[: len(stored)]
        for other in (engine, *others):
            other.acknowledge_revocations()
        if not stored:
            assert time.monotonic() < deadline, f"{len(left)} keys could not be stored: {engine.reason}"
            time.sleep(0.01)
    wait_until(lambda: hits(engine, keys[-4:]) == 4)
    return keys


def hits(engine: ByteEngine, keys: list[bytes]) -> int:
    count = 0
    for begin in range(0, len(keys), 64):
        found = [offset for offset in engine.lookup(keys[begin : begin + 64]) if offset >= 0]
        engine.unpin(found)
        count += len(found)
    return count


def not_ready(port: str) -> str:
    """Why /readyz refuses."""
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(f"http://localhost:{port}/readyz")
    with answer.value as refusal:
        return refusal.read().decode()


def scrape(daemon: DaemonProcess) -> str:
    port = daemon.log.rsplit("endpoints on port ", 1)[1].split()[0]
    with urllib.request.urlopen(f"http://localhost:{port}/metrics") as answer:
        return str(answer.read().decode())


def value(daemon: DaemonProcess, sample: str) -> float:
    return next(
        (float(line.rsplit(" ", 1)[1]) for line in scrape(daemon).splitlines() if line.startswith(sample + " ")), 0.0
    )


# --- memory follows demand --------------------------------------------------------------------------------------------


@pytest.mark.hugepages
def test_a_pool_filled_by_one_model_is_given_to_another_of_the_same_tenant(mount: Path, folder: Path) -> None:
    with start(folder, mount) as daemon:
        path = daemon.attach("pod")
        first, second = attach(path, "a"), attach(path, "b", part_bytes=49152, identity=2)
        fill(first, NUM_SLOTS, salt=1)
        keys = fill(second, 120, salt=2)
        assert hits(second, keys) == 120
        assert value(daemon, 'kvoffload_evicted_bytes_total{reason="ExtentMoved"}') > 0
        first.close()
        second.close()


@pytest.mark.hugepages
def test_a_pool_filled_by_one_tenant_is_given_to_another_after_it_let_go(mount: Path, folder: Path) -> None:
    with start(folder, mount, sharing="Namespace") as daemon:
        first = attach(daemon.attach("a", namespace="one"), "a")
        keys = fill(first, NUM_SLOTS, salt=1)
        held = [offset for offset in first.lookup(keys[-4:]) if offset >= 0]
        second = attach(daemon.attach("b", namespace="two"), "b")
        others = [key_of(number, salt=2) for number in range(100)]
        deadline = time.monotonic() + 30
        while hits(second, others) < 100:
            assert time.monotonic() < deadline, "the first tenant's extents did not come over"
            missing = [key for key in others if hits(second, [key]) == 0]
            if missing:
                second.store(missing[:16])
            first.acknowledge_revocations()
        first.check_held()
        first.unpin(held)
        assert second.lookup(keys[-4:]) == [-1] * 4
        first.close()
        second.close()


@pytest.mark.hugepages
def test_a_pod_that_shares_with_nobody_leaves_nothing_behind(mount: Path, folder: Path) -> None:
    with start(folder, mount, sharing="Pod") as daemon:
        first, second = attach(daemon.attach("a"), "x"), attach(daemon.attach("b"), "x")
        keys = fill(first, 32, salt=1)
        assert second.lookup(keys[:4]) == [-1] * 4
        files = set((mount / f"kvoffload-{daemon.pool}").iterdir())
        first.close()
        first.regions.clear()
        second.close()
        second.regions.clear()
        daemon.detach("a")
        daemon.detach("b")
        wait_until(lambda: not list((mount / f"kvoffload-{daemon.pool}").iterdir()))
        assert len(files) == 2
        assert value(daemon, "kvoffload_prefault_ratio") == 0


@pytest.mark.hugepages
def test_a_tenant_that_does_not_let_go_loses_nothing_and_holds_nobody_else_up(mount: Path, folder: Path) -> None:
    with start(folder, mount, sharing="Namespace") as daemon:
        stuck = attach(daemon.attach("a", namespace="one"), "a")
        fill(stuck, NUM_SLOTS, salt=1)
        needy = attach(daemon.attach("b", namespace="two"), "b")
        for _ in range(30):
            assert needy.reserve_and_return(4) == []
        begun = time.monotonic()
        assert hits(needy, [key_of(1)]) == 0
        assert time.monotonic() - begun < 1
        stuck.close()
        wait_until(lambda: len(needy.reserve_and_return(4)) == 4)
        needy.close()


@pytest.mark.hugepages
def test_a_namespace_at_its_limit_replaces_its_own_and_a_guarantee_is_never_taken(mount: Path, folder: Path) -> None:
    quotas = [
        {"namespace": "small", "guaranteedBytes": 0, "limitBytes": 32 * 65536},
        {"namespace": "safe", "guaranteedBytes": 64 * 65536, "limitBytes": CAPACITY_BYTES},
    ]
    with start(folder, mount, quotas=quotas) as daemon:
        safe = attach(daemon.attach("s", namespace="safe"), "s")
        kept = fill(safe, 64, salt=1)
        small = attach(daemon.attach("t", namespace="small"), "t")
        keys = fill(small, 80, salt=2)
        assert hits(small, keys) == 32
        greedy = attach(daemon.attach("g", namespace="greedy"), "g")
        fill(greedy, 2 * NUM_SLOTS, salt=3)
        assert hits(safe, kept) == 64
        for engine in (safe, small, greedy):
            engine.close()


@pytest.mark.hugepages
def test_a_daemon_that_is_only_updated_keeps_files_and_cache(mount: Path, folder: Path) -> None:
    before = os.statvfs(mount).f_bfree
    with start(folder, mount) as daemon:
        engine = attach(daemon.attach("pod"), "a")
        fill(engine, NUM_SLOTS // 2, salt=1)
        assert os.statvfs(mount).f_bfree < before
        daemon.stop()
        engine.close()
        assert os.statvfs(mount).f_bfree < before, "a daemon that is only updated keeps its files"
        daemon.start()
        again = attach(daemon.folder / "pods/pod.sock", "a")
        assert hits(again, [key_of(number, salt=1) for number in range(NUM_SLOTS // 2)]) == NUM_SLOTS // 2
        again.close()


def test_what_was_used_last_before_an_update_is_not_evicted_first_after_it(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "a")
        keys = fill(engine, NUM_SLOTS, salt=1)
        assert hits(engine, keys[:32]) == 32
        daemon.stop()
        engine.close()
        daemon.start()
        again = attach(path, "b")
        fill(again, 64, salt=2)
        assert hits(again, keys[:32]) == 32
        assert hits(again, keys) == NUM_SLOTS - 64
        again.close()


@pytest.mark.hugepages
def test_a_deleted_region_gives_its_pages_back_while_engines_still_run(mount: Path, folder: Path) -> None:
    before = os.statvfs(mount).f_bfree
    with start(folder, mount) as daemon:
        engine = attach(daemon.attach("pod"), "a")
        fill(engine, NUM_SLOTS // 2, salt=1)
        daemon.delete_spec()
        assert engine.scheduler is not None
        engine.scheduler.wait_for(Drain, 10)
        wait_until(lambda: bool(engine.acknowledge_revocations()))
        assert daemon.process is not None
        assert daemon.process.wait(20) == 0
        assert os.statvfs(mount).f_bfree == before
        assert not list(mount.iterdir())
        engine.close()


@pytest.mark.hugepages
def test_an_engine_that_does_not_answer_keeps_its_pages_until_it_ends(mount: Path, folder: Path) -> None:
    before = os.statvfs(mount).f_bfree
    environment = {"KVOFFLOAD_DRAIN_SECONDS": "0.3"}
    with start(folder, mount, environment=environment) as daemon:
        engine = attach(daemon.attach("pod"), "a")
        keys = fill(engine, 8, salt=1)
        engine.lookup(keys)
        daemon.delete_spec()
        assert daemon.process is not None
        assert daemon.process.wait(20) == 0
        engine.check_held()
        assert not list(mount.iterdir())
        assert os.statvfs(mount).f_bfree < before
        engine.close()
        engine.regions.clear()
        wait_until(lambda: os.statvfs(mount).f_bfree == before)


@pytest.mark.hugepages
def test_a_region_with_reclaim_policy_retain_keeps_its_pages_when_it_is_deleted(mount: Path, folder: Path) -> None:
    with start(folder, mount, reclaimPolicy="Retain") as daemon:
        engine = attach(daemon.attach("pod"), "a")
        keys = fill(engine, 8, salt=1)
        daemon.delete_spec()
        assert daemon.process is not None
        assert daemon.process.wait(20) == 0
        engine.close()
        daemon.start()
        again = attach(daemon.folder / "pods/pod.sock", "a")
        assert hits(again, keys) == 8
        again.close()


@pytest.mark.hugepages
def test_a_capacity_that_changed_keeps_the_cache_and_gives_back_what_is_above_it(mount: Path, folder: Path) -> None:
    with start(folder, mount) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "a")
        keys = fill(engine, NUM_SLOTS, salt=1)
        daemon.stop()
        daemon.spec["capacityBytes"] = CAPACITY_BYTES // 2
        daemon.start()
        engine.connect()

        def shrunk() -> bool:
            engine.acknowledge_revocations()
            return value(daemon, "kvoffload_prefault_ratio") <= 1

        wait_until(shrunk)
        kept = hits(engine, keys)
        assert 0 < kept <= NUM_SLOTS // 2
        daemon.stop()
        daemon.spec["capacityBytes"] = CAPACITY_BYTES
        daemon.start()
        engine.connect()
        assert hits(engine, keys) == kept
        fill(engine, NUM_SLOTS - kept, salt=2)
        assert value(daemon, "kvoffload_prefault_ratio") == 1
        engine.close()


# --- generations ------------------------------------------------------------------------------------------------------


def test_after_a_reset_an_engine_misses_its_own_and_hits_the_keys_of_others(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        first, second = attach(path, "a"), attach(path, "b")
        own, others = fill(first, 8, salt=1), fill(second, 8, salt=2)
        assert first.scheduler is not None
        first.scheduler.send(Generation())
        assert hits(first, own) == 0
        assert hits(first, others) == 8
        assert hits(second, own) == 8
        first.store(own)
        wait_until(lambda: hits(first, own) == 8)
        first.close()
        second.close()


def test_after_a_weight_update_an_engine_shares_with_nobody(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        first, second = attach(path, "a"), attach(path, "b")
        keys = fill(first, 8, salt=1)
        assert first.scheduler is not None
        first.scheduler.send(Generation(private=True))
        assert hits(first, keys) == 0
        fill(second, 8, salt=2)
        assert hits(first, [key_of(number, salt=2) for number in range(8)]) == 0
        mine = fill(first, 8, salt=3)
        assert hits(first, mine) == 8
        assert hits(second, mine) == 0
        first.close()
        second.close()


# --- refusals and modes -----------------------------------------------------------------------------------------------


def hello(**changes: object) -> Hello:
    fields = {
        "protocol_min": 1, "protocol_max": 1, "engine_id": "e", "role": "scheduler", "rank": -1, "world_size": 1,
        "identity": b"i" * 32,
    }  # fmt: skip
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_refused_hello_says_why(folder: Path) -> None:
    with start(folder, None, maxEngines=1) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path)
        cases = [
            (hello(protocol_min=7, protocol_max=9), "ProtocolVersion", "7 to 9"),
            (hello(), "TooManyEngines", "maxEnginesPerNode is 1"),
            (hello(engine_id="engine", world_size=3), "RankConflict", "3 ranks"),
        ]
        for message, reason, words in cases:
            with pytest.raises(SessionRefused, match=words) as refused:
                Session.connect(str(path), message)
            assert refused.value.reason.value == reason
            assert value(daemon, f'kvoffload_refusals_total{{reason="{reason}"}}') == 1
        engine.close()


def left_alone(number: int) -> Hello:
    """As the engine agent says it."""
    return hello(
        engine_id=f"without-{number}", reason="MultiNode", message="2 nodes", model="m", process=bytes([number] * 16)
    )


def test_engines_that_are_left_alone_take_no_place_and_are_told_apart(folder: Path) -> None:
    with start(folder, None, maxEngines=2) as daemon:
        path = daemon.attach("pod")
        alone = Session.connect(str(path), left_alone(1))
        other = daemon.attach("other")
        engines = [TestEngine(path), TestEngine(other)]
        assert value(daemon, 'kvoffload_engines{layout="left-alone"}') == 1
        assert value(daemon, 'kvoffload_engines{layout="pending"}') == 0
        assert value(daemon, 'kvoffload_engines{layout="replicated"}') == 2
        with pytest.raises(SessionRefused, match="of this pod are attached"):
            Session.connect(str(path), left_alone(2))
        for engine in (*engines, alone):
            engine.close()


def test_an_id_that_is_left_alone_gets_no_rank(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        with pytest.raises(KVOffloadError):
            connect(path, hello(engine_id="without-1", role="worker", rank=0, part="all", part_bytes=4096))
        assert value(daemon, 'kvoffload_sessions_closed_total{reason="Malformed"}') == 1


def test_an_engine_that_is_left_alone_does_not_hold_up_eviction_after_a_restart(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        alone = Session.connect(str(path), left_alone(1))
        engine = attach(path, "a")
        fill(engine, NUM_SLOTS, salt=1)
        engine.close()
        daemon.kill()
        daemon.start()
        again = attach(path, "b")
        fill(again, NUM_SLOTS, salt=2)
        again.close()
        alone.close()


def test_one_pod_has_half_of_the_engines_that_a_node_may_have(folder: Path) -> None:
    with start(folder, None, maxEngines=4) as daemon:
        greedy, modest = daemon.attach("greedy"), daemon.attach("modest")
        engines = [TestEngine(greedy, engine_id=f"e{number}", ranks=1) for number in range(2)]
        with pytest.raises(SessionRefused, match="one pod may have 2 of the 4 ") as refused:
            Session.connect(str(greedy), hello(engine_id="third"))
        assert refused.value.reason.value == "TooManyEnginesInPod"
        assert value(daemon, 'kvoffload_refusals_total{reason="TooManyEnginesInPod"}') == 1
        engines += [TestEngine(modest, engine_id=f"e{number}", ranks=1) for number in range(2)]
        for engine in engines:
            engine.close()


def test_a_row_larger_than_an_extent_is_refused_with_both_numbers(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        large = hello(role="worker", rank=0, part="all", part_bytes=CAPACITY_BYTES)
        worker = connect(path, large)
        worker.send(Mapped())
        refused = worker.wait_for(Refused, 30)
        assert refused.reason == "SlotTooLarge"
        assert str(CAPACITY_BYTES) in refused.message
        assert str(worker.welcome.extent_bytes) in refused.message
        worker.close()


def test_a_paused_pool_sends_engines_away_and_keeps_their_cache(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "a")
        keys = fill(engine, 8, salt=1)
        daemon.write_spec(mode="Paused")
        assert engine.scheduler is not None
        assert "Paused" in engine.scheduler.wait_for(Drain, 10).message
        assert hits(engine, keys) == 0
        with pytest.raises(SessionRefused, match="paused"):
            Session.connect(str(path), hello())
        daemon.write_spec(mode="Active")
        wait_until(lambda: hits(engine, keys) == 8)
        engine.close()


@pytest.mark.hugepages
def test_a_pool_that_observes_touches_nothing(mount: Path, folder: Path) -> None:
    before = os.statvfs(mount).f_bfree
    with start(folder, mount, mode="Observe") as daemon:
        wait_until(lambda: "endpoints on port" in daemon.log)
        port = daemon.log.rsplit("endpoints on port ", 1)[1].split()[0]
        wait_until(lambda: "observes" in not_ready(port))
        assert os.statvfs(mount).f_bfree == before
        assert not (daemon.handoff / "attach.sock").exists()


# --- clients that misbehave -------------------------------------------------------------------------------------------


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


def test_one_engine_cannot_reserve_the_whole_pool(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("pod"), part_bytes=4096, ranks=1)
        total = 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            engine.scheduler.send(Reserve(1, 512))
            reserved = engine.scheduler.wait_for(Reserved, 5)
            total += len(unpack(reserved.offsets))
            if reserved.reason == "Rate":
                break
        assert total == CAPACITY_BYTES // 4096 // 4
        engine.close()


def attach_many(daemon: DaemonProcess, num_engines: int, ranks: int) -> None:
    paths = [daemon.attach(f"pod-{number}") for number in range(4)]
    engines = [
        TestEngine(paths[number % 4], engine_id=f"e{number}", ranks=ranks, part_bytes=8192)
        for number in range(num_engines)
    ]
    assert value(daemon, 'kvoffload_engines{layout="replicated"}') == num_engines
    for engine in engines:
        engine.scheduler.send(Bind(b"none", 32), Lookup(1, bytes(32)), Unpin(b""))
    with pytest.raises(SessionRefused, match="maxEnginesPerNode"):
        Session.connect(str(paths[0]), hello(engine_id="one too many"))
    for engine in engines:
        engine.close()
    wait_until(lambda: value(daemon, 'kvoffload_engines{layout="replicated"}') == 0)
    wait_until(lambda: not list((daemon.state / "attachments").iterdir()))


def test_many_engines_attach_at_once_up_to_the_limit(folder: Path) -> None:
    with start(folder, None, maxEngines=8) as daemon:
        attach_many(daemon, 8, ranks=8)


@pytest.mark.long
def test_64_engines_of_eight_ranks(folder: Path) -> None:
    with start(folder, None, maxEngines=64) as daemon:
        attach_many(daemon, 64, ranks=8)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_golden_file_and_promtool_finds_no_fault(folder: Path) -> None:
    golden = Path(__file__).parents[1] / "golden/node-metrics.txt"
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path)
        engine.scheduler.send(Lookup(1, bytes(32)))
        text = scrape(daemon)
        described = [line for line in text.splitlines() if line.startswith(("# HELP", "# TYPE"))]
        names = sorted({line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")})
        found = "\n".join([*described, *names]) + "\n"
        if os.environ.get("KVOFFLOAD_UPDATE_GOLDEN"):
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(found)
        assert found == golden.read_text(), "metrics changed: KVOFFLOAD_UPDATE_GOLDEN=1 writes the golden file anew"
        if shutil.which("promtool"):
            checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
            assert checked.returncode == 0, checked.stdout + checked.stderr
        engine.close()


def test_deduplicated_bytes_are_the_copies_that_a_plain_layout_would_have_kept(folder: Path) -> None:
    from kvoffload.protocol.messages import Assign, Seal

    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("pod"), ranks=4, part_bytes=65536)
        offsets = b""
        while not offsets:
            engine.scheduler.send(Reserve(1, 2))
            reserved = engine.scheduler.wait_for(Reserved, 5)
            offsets = reserved.offsets
        count = len(offsets) // 8
        engine.scheduler.send(Assign(reserved.epoch, offsets, bytes(range(32)) + bytes(32 * (count - 1))))
        for worker in engine.workers:
            worker.send(Seal(reserved.epoch, offsets))
        wait_until(lambda: value(daemon, "kvoffload_stored_bytes_total") == count * 65536)
        assert value(daemon, "kvoffload_deduplicated_bytes_total") == 3 * count * 65536
        engine.close()


def test_a_stopping_daemon_waits_for_stores_under_way(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "a")
        engine.wait_for_room(4)
        keys = [key_of(number) for number in range(4)]
        offsets = engine.begin_store(keys)
        engine.lookup(keys)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        assert engine.scheduler is not None
        engine.scheduler.wait_for(Drain, 10)
        assert engine.reserve(4) == []
        for rank in range(2):
            engine.write(rank, offsets)
            engine.end_write(rank, offsets)
        daemon.process.wait(20)
        daemon.process = None
        daemon.start()
        engine.connect()
        assert hits(engine, keys) == 4
        engine.close()
