"""What stays and what goes when a daemon stops, is updated, or loses its region."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from byte_engine import key_of
from daemon_process import wait_until
from kvoffload.errors import DaemonUnavailable
from kvoffload.protocol.messages import Drain
from small_pool import NUM_SLOTS, attach, fill, hits, start


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


def test_a_stopping_daemon_waits_for_stores_under_way(folder: Path) -> None:
    with start(folder, None, {"KVOFFLOAD_DRAIN_SECONDS": "60"}) as daemon:
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
        taken = daemon.state / "region.json"
        for mode in ("Paused", "Active"):
            daemon.write_spec(mode=mode)
            wait_until(lambda: json.loads(taken.read_text())["spec"]["mode"] == mode)  # noqa: B023
        assert engine.reserve(4) == [], "a pool that is made active again does not end the drain"
        for rank in range(2):
            engine.write(rank, offsets)
            engine.end_write(rank, offsets)
        daemon.process.wait(20)
        daemon.process = None
        daemon.start()
        engine.connect()
        assert hits(engine, keys) == 4
        engine.close()


@pytest.mark.hugepages
def test_a_deleted_region_gives_its_pages_back_while_engines_still_run(mount: Path, folder: Path) -> None:
    before = os.statvfs(mount).f_bfree
    with start(folder, mount) as daemon:
        engine = attach(daemon.attach("pod"), "a")
        fill(engine, NUM_SLOTS // 2, salt=1)
        daemon.delete_spec()
        assert engine.scheduler is not None
        engine.scheduler.wait_for(Drain, 10)
        process = daemon.process
        assert process is not None

        def has_ended() -> bool:
            with contextlib.suppress(DaemonUnavailable):
                engine.acknowledge_revocations()
            return process.poll() is not None

        wait_until(has_ended)
        assert process.returncode == 0
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
