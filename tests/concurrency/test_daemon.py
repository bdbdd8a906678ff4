"""What engines ask of a daemon beside storing: generations, pauses, observing; and what it tells by its metrics."""

import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from byte_engine import key_of, pack
from daemon_process import DaemonProcess, TestEngine, wait_until
from hack.docs.metrics_page import write_host
from kvoffload.errors import RefusalReason, SessionRefused
from kvoffload.protocol.client import Session
from kvoffload.protocol.messages import (
    OFFSET_BYTES,
    Assign,
    Bind,
    Bound,
    Drain,
    EngineLost,
    EngineReady,
    Found,
    Generation,
    Lookup,
    Mapped,
    Refused,
    Seal,
    build_reassertion,
)
from kvoffload_node.index.table import Eviction
from kvoffload_node.session.engines import EndReason
from small_pool import attach, fill, hello, hits, start


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


def test_a_look_up_after_a_bind_that_was_refused_is_a_miss(folder: Path) -> None:
    """A scheduler sends both at once, and its ranks may be lost meanwhile."""
    with start(folder, None) as daemon:
        scheduler = Session.connect(str(daemon.attach("pod")), hello())
        scheduler.send(Bind(b"none", 32), Lookup(1, bytes(64)))
        assert scheduler.wait_for(Found, 10) == Found(1, pack([-1, -1]))
        scheduler.close()


def test_slots_whose_keys_come_after_the_row_was_replaced_are_free_when_the_ranks_have_ended(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path, process=b"p" * 16)
        offsets = engine.reserve(2)
        daemon.write_spec(replicatedLayout="Never")
        wait_until(lambda: _row_after_a_rank_came_again(path, engine).slot_bytes == 2 * 65536)
        engine.scheduler.send(Assign(engine.epoch, offsets, bytes(64)))
        for worker in engine.workers:
            wait_until(lambda: _writing(daemon) == 2)
            worker.send(Seal(engine.epoch, offsets))
        _wait_given_up(daemon, engine)
        engine.close()


def test_a_bind_that_was_refused_leaves_no_namespace_for_keys_of_its_length(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path, process=b"p" * 16)
        offsets = engine.reserve(1)
        _come_again(path, engine)
        engine.scheduler.wait_for(EngineLost, 10)
        engine.scheduler.send(Bind(b"none", 16))
        assert engine.scheduler.wait_for(Refused, 10).reason == RefusalReason.NOT_READY
        engine.workers[0].send(Mapped())
        engine.workers[0].wait_for(EngineReady, 10)
        engine.scheduler.send(Assign(engine.epoch, offsets, bytes(16)))
        for worker in engine.workers:
            worker.send(Seal(engine.epoch, offsets))
        _wait_given_up(daemon, engine)
        engine.close()


def test_slots_whose_assign_was_lost_with_the_connection_are_free_when_the_ranks_have_ended(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path, process=b"p" * 16)
        told = engine.reserve(3)[: 2 * OFFSET_BYTES]
        engine.workers[0].send(Seal(engine.epoch, told))
        again = Session.connect(str(path), hello(engine_id="engine", world_size=2, process=b"p" * 15 + b"\0"))
        again.send(*build_reassertion(engine.epoch, b"", told))
        wait_until(lambda: _writing(daemon) == 2)
        engine.workers[1].send(Seal(engine.epoch, told))
        wait_until(lambda: _writing(daemon) == 0)
        again.close()
        engine.close()


def test_an_attempt_to_attach_that_was_given_up_leaves_the_engine_whole(folder: Path) -> None:
    """A process waits five seconds for its Welcome and tries again; a daemon that was slow meets both attempts."""
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        said = hello(engine_id="engine", world_size=2, process=b"s" * 16)
        ranks = [
            msgspec.structs.replace(
                said, role="worker", rank=rank, part="all", part_bytes=65536, process=bytes([rank] * 16)
            )
            for rank in range(2)
        ]
        sessions = [Session.connect(str(path), ranks[0])]
        sessions[0].send(Mapped())
        for given_up in (said, ranks[1]):
            attempts = [Session.connect(str(path), given_up) for _ in range(2)]  # the second meets the first
            for attempt in attempts:
                for descriptor in attempt.take_descriptors():
                    os.close(descriptor)
                attempt.close()
            wait_until(lambda: daemon.metrics()['kvoffload_sessions{state="connected"}'] == 1)
        sessions += [Session.connect(str(path), again) for again in (ranks[1], said)]
        sessions[1].send(Mapped())
        assert sessions[2].wait_for(EngineReady, 10).replicated
        for session in sessions:
            session.close()


def _wait_given_up(daemon: DaemonProcess, engine: TestEngine) -> None:
    """Wait until no slot is written any more; none of them has a key."""
    wait_until(lambda: _writing(daemon) == 0)
    engine.scheduler.send(Bind(b"none", 32))
    assert engine.scheduler.wait_for(Bound, 10) == Bound(0)


def _writing(daemon: DaemonProcess) -> float:
    return daemon.metrics()['kvoffload_slots{state="writing"}']


def _come_again(path: Path, engine: TestEngine) -> None:
    """The first rank connects again, and has not mapped the region yet."""
    said = hello(engine_id="engine", role="worker", rank=0, world_size=2, part="all", part_bytes=65536)
    before = engine.workers[0]
    engine.workers[0] = Session.connect(str(path), msgspec.structs.replace(said, process=b"p" * 15 + b"\1"))
    before.close()


def _row_after_a_rank_came_again(path: Path, engine: TestEngine) -> EngineReady:
    _come_again(path, engine)
    engine.workers[0].send(Mapped())
    return engine.workers[0].wait_for(EngineReady, 10)


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
        wait_until(lambda: daemon.readyz()[0] == 503 and "observes" in daemon.readyz()[1])
        assert os.statvfs(mount).f_bfree == before
        assert not (daemon.handoff / "attach.sock").exists()


def test_metrics_are_those_of_the_golden_file_and_promtool_finds_no_fault(folder: Path) -> None:
    """The region is on /dev/shm, and the host has huge pages of that size, as far as the daemon can see."""
    golden = Path(__file__).parents[1] / "golden/node-metrics.txt"
    host = write_host(folder / "host", os.statvfs("/dev/shm").f_bsize)
    with start(folder, None, {"KVOFFLOAD_HOST_ROOT": str(host)}) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path)
        engine.scheduler.send(Lookup(1, bytes(32)))
        text = daemon.scrape()
        counted = dict(re.findall(r'^kvoffload_hugepages{state="(\w+)"} ([\d.]+)$', text, flags=re.MULTILINE))
        assert counted == {"total": "40.0", "free": "20.0", "reserved": "10.0"}
        described = [line for line in text.splitlines() if line.startswith(("# HELP", "# TYPE"))]
        samples = (line for line in text.splitlines() if not line.startswith("#"))
        names = sorted({re.sub(r'="[^"]*"', "", line.rpartition(" ")[0]) for line in samples})
        found = "\n".join([*described, *names]) + "\n"
        if os.environ.get("KVOFFLOAD_UPDATE_GOLDEN"):
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(found)
        assert found == golden.read_text(), "metrics changed: KVOFFLOAD_UPDATE_GOLDEN=1 writes the golden file anew"
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        engine.close()


def test_what_alerts_count_begins_at_0(folder: Path) -> None:
    """A series that begins with the first event shows no increase."""
    with start(folder, None) as daemon:
        daemon.attach("pod")
        text = daemon.scrape()
        refused = [f'kvoffload_refusals_total{{reason="{reason.value}"}} 0.0' for reason in RefusalReason]
        evicted = [f'kvoffload_evicted_bytes_total{{reason="{reason}"}} 0.0' for reason in Eviction]
        ended = [
            f'kvoffload_sessions_closed_total{{reason="{reason.value}"}} 0.0' for reason in (*RefusalReason, *EndReason)
        ]
        assert {*refused, *evicted, *ended} <= set(text.splitlines())


def test_engines_that_are_not_as_predicted_are_counted(folder: Path) -> None:
    with start(folder, None) as daemon:
        promised, other = daemon.attach("a", predicted="replicated"), daemon.attach("b", predicted="auto")
        as_promised = TestEngine(promised, engine_id="one", ranks=2)
        assert daemon.metrics()["kvoffload_engines_mispredicted"] == 0
        engines = [TestEngine(path, engine_id="two", ranks=2, replicated=False) for path in (promised, other)]
        assert daemon.metrics()['kvoffload_engines{layout="per-rank"}'] == 2
        assert daemon.metrics()["kvoffload_engines_mispredicted"] == 1
        for engine in (as_promised, *engines):
            engine.close()
        wait_until(lambda: daemon.metrics()["kvoffload_engines_mispredicted"] == 0)


def test_deduplicated_bytes_are_the_copies_that_a_plain_layout_would_have_kept(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("pod"), ranks=4, part_bytes=65536)
        offsets = engine.reserve(2)
        engine.scheduler.send(Assign(engine.epoch, offsets, bytes(range(64))))
        for worker in engine.workers:
            worker.send(Seal(engine.epoch, offsets))
        wait_until(lambda: daemon.metrics()["kvoffload_stored_bytes_total"] == 2 * 65536)
        assert daemon.metrics()["kvoffload_deduplicated_bytes_total"] == 3 * 2 * 65536
        engine.close()
