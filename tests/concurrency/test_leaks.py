"""What fails half way, or ends while nobody looks, leaves nothing behind: no engine, pod, tenant or descriptor."""

import resource
import shutil
import socket
from pathlib import Path

import pytest

from byte_engine import key_of
from daemon_process import DaemonProcess, TestEngine, connect, wait_until
from kvoffload.errors import KVOffloadError, SessionRefused
from kvoffload.protocol.messages import AttachPod
from kvoffload_node.attach.handoff import Handoff
from small_pool import attach, fill, hello, start

ENGINES = 'kvoffload_engines{layout="per-rank"}'
WRITING = 'kvoffload_slots{state="writing"}'


def region_files(daemon: DaemonProcess) -> list[Path]:
    return list((daemon.mount / f"kvoffload-{daemon.pool}").glob("tenant-*"))


def wait_for_sweep(daemon: DaemonProcess, path: Path) -> None:
    """A dead engine's slots are given back by the sweep."""
    engine = attach(path, "sweep", ranks=1, part_bytes=4096)
    wait_until(lambda: bool(engine.reserve(1)))
    assert daemon.metrics()[WRITING] > 0
    engine.close()
    wait_until(lambda: daemon.metrics()[WRITING] == 0)


def test_an_engine_whose_first_attachment_could_not_be_written_is_known_when_it_comes_again(folder: Path) -> None:
    """Known to the sweep, the metrics, and to whoever takes extents back."""
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        attach(path, "first").close()  # the region is open
        attachments = daemon.state / "attachments"
        attachments.rename(daemon.state / "away")
        identity = (7).to_bytes(32, "little")
        with pytest.raises(KVOffloadError):
            connect(path, hello(engine_id="late", world_size=2, identity=identity))
        (daemon.state / "away").rename(attachments)
        wait_for_sweep(daemon, path)
        late = attach(path, "late", identity=7)
        assert daemon.metrics()[ENGINES] == 1
        fill(late, 8, salt=1)
        late.close()
        wait_until(lambda: daemon.metrics()[ENGINES] == 0)


def test_an_attachment_that_cannot_be_removed_holds_up_nobody_elses_end(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        stuck = attach(path, "stuck")
        entries = list((daemon.state / "attachments").glob("*.json"))
        for entry in entries:
            entry.unlink()
            (entry / "somebody's").mkdir(parents=True)
        stuck.close()
        wait_until(lambda: "what ended engines leave cannot be cleared away" in daemon.log)
        assert "remove it on the node" in daemon.log
        wait_for_sweep(daemon, path)
        for entry in entries:
            shutil.rmtree(entry)
        wait_until(lambda: "Sweep: it works again" in daemon.log)
        assert list((daemon.state / "attachments").iterdir()) == []


def test_a_pod_that_went_while_no_daemon_ran_goes_with_its_last_engine(folder: Path) -> None:
    with start(folder, None, sharing="Pod") as daemon:
        engine = attach(daemon.attach("pod"), "engine")
        wait_until(lambda: bool(engine.store([key_of(1)])))
        daemon.kill()
        daemon.pods_are_gone()
        daemon.start()
        other = daemon.attach("other")
        assert len(region_files(daemon)) == 2
        engine.close()
        wait_until(lambda: len(region_files(daemon)) == 1)
        TestEngine(other).close()


def test_a_pod_that_could_not_be_attached_is_forgotten(folder: Path) -> None:
    with start(folder, None, sharing="Pod") as daemon:
        daemon.attach("other")
        attacher = Handoff(daemon.handoff / "attach.sock")
        attacher.ensure_connected()
        with socket.socket(socket.AF_UNIX) as nowhere, pytest.raises(SessionRefused):
            attacher.attach(AttachPod("pod", "default", "pod", "auto"), nowhere)
        wait_until(lambda: len(region_files(daemon)) == 1)
        attacher.close()


def test_a_daemon_without_descriptors_hears_the_attacher_when_it_has_some(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        TestEngine(path).close()
        process = daemon.process
        assert process is not None
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        late = Handoff(daemon.handoff / "attach.sock")
        late.ensure_connected()
        wait_until(lambda: "the attacher cannot be heard" in daemon.log or process.poll() is not None)
        assert process.poll() is None
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: daemon.metrics()["kvoffload_attachers"] == 2)
        assert daemon.metrics()['kvoffload_daemon_failures_total{part="HandOff"}'] >= 1
        late.close()
