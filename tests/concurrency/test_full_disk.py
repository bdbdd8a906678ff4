"""The disk of the state folder is full: the daemon says so, serves what it has, and goes on when there is room."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_engine import key_of
from daemon_process import PAGE_BYTES, DaemonProcess, connect, wait_until
from kvoffload.errors import KVOffloadError
from kvoffload_node.region.extents import HEADROOM_EXTENTS
from small_pool import CAPACITY_BYTES, attach, fill, hello, hits, start

pytestmark = pytest.mark.hugepages
"""Mounting needs root, as huge pages do."""
DISK_BYTES = 1 << 20
NUM_EXTENTS = CAPACITY_BYTES // PAGE_BYTES


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A state folder of 1 MiB."""
    state = folder / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(state)], check=True)
    yield state
    subprocess.run(["umount", "-l", str(state)], check=True)


def use_up(disk: Path) -> Path:
    junk = disk / "junk"
    status = os.statvfs(disk)
    junk.write_bytes(bytes(status.f_bavail * status.f_bsize))
    return junk


def test_a_full_disk_ends_no_daemon(folder: Path, small_disk: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine, other = attach(path, "engine"), attach(path, "other", ranks=1, part_bytes=4096)
        keys = fill(engine, 8, salt=1)
        # the extent in use and those ahead of demand: each takes room on that disk
        wait_until(lambda: daemon.metrics()["kvoffload_prefault_ratio"] == (1 + HEADROOM_EXTENTS) / NUM_EXTENTS)
        junk = use_up(small_disk)

        def is_refused() -> bool:
            return not other.store([key_of(0, salt=2)]) and other.reason == "StateFull"

        wait_until(is_refused)
        assert daemon.process is not None
        assert daemon.process.poll() is None
        assert hits(engine, keys) == 8
        assert engine.store([key_of(8, salt=1)]), "its extent has slots whose records have their place"
        assert is_refused()
        said = daemon.log.count("records of more slots cannot be written")
        assert said == 1, "however the engines take turns"
        assert daemon.metrics()['kvoffload_daemon_failures_total{part="Records"}'] >= 2
        assert daemon.metrics()['kvoffload_short_reservations_total{reason="StateFull"}'] >= 2
        for _ in range(3):
            with pytest.raises(KVOffloadError):
                connect(path, hello(engine_id="late"))
        assert "engines cannot attach, what they hold cannot be kept" in daemon.log
        assert daemon.metrics()['kvoffload_daemon_failures_total{part="Attachment"}'] == 3
        left = {file.suffix for file in (small_disk / "attachments").iterdir()}
        assert left == {".lock", ".json"}
        assert "a bug of this daemon" not in daemon.log
        junk.unlink()
        fill(other, 8, salt=3)
        for one in (engine, other):
            one.close()


def test_a_disk_that_is_full_before_the_first_start_is_said_and_waited_for(folder: Path, small_disk: Path) -> None:
    daemon = DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, from_api=True)
    assert daemon.api is not None
    daemon.api.make_region("first")
    daemon.api.start()
    junk = use_up(small_disk)
    with daemon:

        def is_reported() -> bool:
            return any("make room on that disk" in str(status) for status in daemon.api.statuses)

        wait_until(is_reported, 60)
        assert "Traceback" not in daemon.log
        junk.unlink()
        engine = attach(daemon.attach("pod"), "engine")
        fill(engine, 8, salt=1)
        engine.close()
        wait_until((small_disk / "region.json").exists)
        daemon.kill()
    daemon.api.stop()
