"""A state folder that is not the daemon's alone, or takes no more: said with path, cause, remedy, and tried again."""

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.errors import RegionUnusable
from kvoffload_node import daemon as daemon_module
from kvoffload_node import spec_source
from kvoffload_node.daemon import Daemon
from kvoffload_node.failures import Failures
from kvoffload_node.state_folder import StateFolder


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "somebody's").write_text("")


def put_file(path: Path) -> None:
    path.write_text("somebody's")


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("catalog", put_folder),
        ("catalog.new", put_folder),
        ("attachments", put_file),
        ("tenant-{digest}.journal", put_folder),
        ("tenant-{digest}.order", put_folder),
    ],
)
def test_what_is_in_the_way_is_named_and_once_it_is_gone_the_region_opens(
    daemon: Daemon, tmp_path: Path, name: str, put: Callable[[Path], None]
) -> None:
    before = daemon._open()
    before.region.tenant_for("team", "uid")
    (journal,) = tmp_path.glob("tenant-*.journal")
    before.registry.close()
    before.region.close()
    obstacle = tmp_path / name.format(digest=journal.stem.removeprefix("tenant-"))
    if obstacle.is_dir():
        shutil.rmtree(obstacle)
    obstacle.unlink(missing_ok=True)
    put(obstacle)
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(RegionUnusable, match="remove it on the node") as raised:
            daemon._open()
        assert str(raised.value).startswith(f"{obstacle}: ")
        raised.value.__traceback__ = None
    assert len(list(Path("/proc/self/fd").iterdir())) == num_descriptors
    if obstacle.is_dir():
        shutil.rmtree(obstacle)
    obstacle.unlink(missing_ok=True)
    running = daemon._open()
    running.registry.close()
    running.region.close()


@pytest.mark.parametrize("name", ["region.json", "region.json.new"])
async def test_a_spec_that_cannot_be_kept_is_taken_said_and_kept_later(
    daemon: Daemon, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spec_source, "RETRY_SECONDS", 0.01)
    spec, daemon.source.spec = daemon.source.spec, None
    assert spec is not None
    obstacle = tmp_path / name
    put_folder(obstacle)
    assert daemon._state.read_last() is None
    daemon.source.take_spec(spec)
    assert daemon.source.changed.is_set(), "the region is opened all the same"
    assert f"the last spec cannot be written: {obstacle}" in caplog.text
    degraded = daemon.findings()[-1]
    assert (degraded.holds, degraded.reason) == (True, "RegionUnusable")
    assert str(obstacle) in degraded.message
    shutil.rmtree(obstacle)
    async with asyncio.timeout(10):
        while not (tmp_path / "region.json").exists():  # noqa: ASYNC110 - a file sets no event
            await asyncio.sleep(0.01)
    assert not daemon.findings()[-1].holds
    assert caplog.text.count("cannot be written") == 1


class FullDisk:
    """A registry whose sweeps find the disk full three times."""

    num_sweeps = 0

    def __init__(self) -> None:
        self.is_done = asyncio.Event()

    def sweep(self) -> None:
        self.num_sweeps += 1
        if self.num_sweeps <= 3:
            raise OSError(errno.ENOSPC, "full")
        if self.num_sweeps > 4:
            self.is_done.set()


async def test_a_sweep_that_the_disk_refuses_is_said_once_and_comes_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_module, "SWEEP_SECONDS", 0.001)
    registry = FullDisk()
    sweeping = asyncio.create_task(daemon._sweep(registry))  # type: ignore[arg-type]
    await asyncio.wait_for(registry.is_done.wait(), 10)
    sweeping.cancel()
    assert caplog.text.count("make room on that disk") == 1
    assert not daemon.findings()[-1].holds


def put_file_instead(folder: Path) -> None:
    folder.rmdir()
    put_file(folder)


@pytest.mark.parametrize(("name", "put"), [("daemon.lock", put_folder), ("", put_file_instead)])
async def test_a_state_folder_that_cannot_be_locked_is_one_message(
    daemon: Daemon, tmp_path: Path, name: str, put: Callable[[Path], None]
) -> None:
    put(tmp_path / name)
    with pytest.raises(RegionUnusable, match="remove it on the node") as raised:
        await daemon.run()
    assert str(raised.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room on that disk"),
        (errno.EROFS, "let the daemon write there"),
        (errno.EIO, "see the node's disk and its kernel log"),
    ],
)
def test_every_cause_has_its_remedy(number: int, remedy: str, tmp_path: Path) -> None:
    explained = StateFolder(tmp_path, Failures()).explain(OSError(number, "x"))
    assert explained == f"{tmp_path}: {os.strerror(number)}; {remedy}"
