"""What a daemon finds damaged when it starts: it serves what it can believe, says what it cannot, and goes on."""

import os
from pathlib import Path

from byte_engine import key_of
from daemon_process import DaemonProcess, wait_until
from kvoffload.protocol.messages import Drain
from small_pool import attach, fill, hits, start

NUM_KEYS = 8


def damage_attachments(daemon: DaemonProcess) -> None:
    """As a power failure leaves files that were just written: empty."""
    for path in (daemon.state / "attachments").glob("*.json"):
        path.write_bytes(b"")


def test_attachments_that_cannot_be_read_of_engines_that_are_gone_are_forgotten(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "engine")
        keys = fill(engine, NUM_KEYS, salt=1)
        daemon.kill()
        engine.close()
        damage_attachments(daemon)
        (daemon.state / "attachments" / "a.note.json").write_text("somebody's")
        daemon.start()
        assert "is damaged and nobody holds it" in daemon.log
        other = attach(path, "other")
        assert hits(other, keys) == NUM_KEYS
        other.close()


def test_attachments_that_cannot_be_read_of_engines_that_live_are_waited_for(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = attach(daemon.attach("pod"), "engine")
        keys = fill(engine, NUM_KEYS, salt=1)
        daemon.kill()
        daemon.pods_are_gone()
        damage_attachments(daemon)
        daemon.start()
        wait_until(lambda: "its process lives" in daemon.log)
        engine.close()
        other = attach(daemon.attach("other"), "other")
        assert hits(other, keys) == NUM_KEYS
        other.close()


def test_a_spec_that_cannot_be_read_for_a_while_is_said_and_ends_no_daemon(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = attach(daemon.attach("pod"), "engine")
        loop = folder / "loop"
        loop.symlink_to(folder / "region.json")
        loop.rename(folder / "region.json")  # at once: a file that is away is a region that was deleted
        wait_until(lambda: daemon.metrics()['kvoffload_daemon_failures_total{part="RegionObject"}'] >= 1)
        assert "region.json cannot be read: Too many levels of symbolic links" in daemon.log
        daemon.write_spec(mode="Paused")
        assert engine.scheduler is not None
        engine.scheduler.wait_for(Drain, 60)
        engine.close()


def test_a_region_file_that_was_cut_is_not_believed(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "engine")
        keys = fill(engine, NUM_KEYS, salt=1)
        daemon.kill()
        for file in (daemon.mount / f"kvoffload-{daemon.pool}").glob("*.region"):
            os.truncate(file, 0)
        daemon.start()
        other = attach(path, "other")
        assert hits(other, keys) == 0
        assert "has lost pages" in daemon.log
        other.wait_for_room(1)
        assert other.store([key_of(1, salt=2)])
        for one in (engine, other):
            one.close()


def test_a_catalog_that_is_no_text_where_it_should_be_is_lost_and_not_the_daemons_end(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "engine")
        fill(engine, NUM_KEYS, salt=1)
        engine.close()
        daemon.kill()
        catalog = daemon.state / "catalog"
        catalog.write_bytes(catalog.read_bytes().replace(b"pool", b"\xff" * 4))
        daemon.start()
        assert "is lost or damaged" in daemon.log
        (other := attach(path, "other")).close()
        assert other.epoch > engine.epoch


def test_without_its_catalog_no_epoch_is_used_again(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "engine")
        fill(engine, NUM_KEYS, salt=1)
        daemon.kill()
        daemon.start()
        (before := attach(path, "before")).close()
        daemon.kill()
        (daemon.state / "catalog").unlink()
        daemon.start()
        other = attach(path, "other")
        assert other.epoch > before.epoch > engine.epoch
        for one in (engine, other):
            one.close()
