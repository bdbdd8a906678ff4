"""Region files and reservations on a real hugetlbfs: pages are had whole or not at all (cases 21 and 22)."""

import asyncio
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_engine import ByteEngine, key_of
from daemon_process import PAGE_BYTES, DaemonProcess, hugetlb_mount, wait_until
from kvoffload.api.conditions import RegionCondition, RegionReason
from kvoffload.errors import PagesUnavailable
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.region import extents
from kvoffload_node.region.extents import HEADROOM_EXTENTS
from kvoffload_node.region.hugetlbfs import Mount, NoHugetlbfs, RegionFile, Reservation, read_mount
from region_on_disk import findings_of, open_region

NUM_PAGES = 8
pytestmark = pytest.mark.hugepages


@pytest.fixture
def mount() -> Iterator[Path]:
    """A mount that gives at most `NUM_PAGES`, whatever other tests take from the node meanwhile."""
    with hugetlb_mount(NUM_PAGES * PAGE_BYTES, limit=True) as path:
        yield path


def pages(mount: Path) -> int:
    return os.statvfs(mount).f_bfree


def test_an_extent_has_its_pages_before_anybody_touches_it(mount: Path) -> None:
    file = RegionFile(mount / "file", NUM_PAGES * PAGE_BYTES)
    file.allocate(2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert file.allocated_bytes == 2 * PAGE_BYTES
    assert pages(mount) == NUM_PAGES - 2
    file.close()


def test_too_many_pages_are_refused_and_what_was_got_is_given_back(mount: Path) -> None:
    file = RegionFile(mount / "file", 2 * NUM_PAGES * PAGE_BYTES)
    with pytest.raises(PagesUnavailable):
        file.allocate(0, (NUM_PAGES + 1) * PAGE_BYTES)
    assert file.allocated_bytes == 0
    assert pages(mount) == NUM_PAGES
    file.close()


def test_punched_pages_come_back_as_zeros(mount: Path) -> None:
    file = RegionFile(mount / "file", PAGE_BYTES)
    file.allocate(0, PAGE_BYTES)
    with mmap.mmap(file.descriptor, PAGE_BYTES) as mapping:
        mapping[:6] = b"secret"
    file.punch(0, PAGE_BYTES)
    assert pages(mount) == NUM_PAGES
    file.allocate(0, PAGE_BYTES)
    with mmap.mmap(file.descriptor, PAGE_BYTES) as mapping:
        assert mapping[:6] == bytes(6)
    file.close()


def test_a_file_that_a_client_cut_is_made_whole_by_the_next_extent(mount: Path) -> None:
    file = RegionFile(mount / "file", 4 * PAGE_BYTES)
    os.ftruncate(file.descriptor, 0)
    file.allocate(2 * PAGE_BYTES, PAGE_BYTES)
    assert file.allocated_bytes == PAGE_BYTES
    file.close()


def test_what_is_reserved_is_kept_from_others_until_it_is_cut(mount: Path) -> None:
    reservation = Reservation(mount, is_hugetlbfs=True)
    reservation.resize(6 * PAGE_BYTES)
    other = RegionFile(mount / "other", NUM_PAGES * PAGE_BYTES)
    with pytest.raises(PagesUnavailable):
        other.allocate(0, 3 * PAGE_BYTES)
    reservation.resize(4 * PAGE_BYTES)
    other.allocate(0, 3 * PAGE_BYTES)
    with pytest.raises(PagesUnavailable):
        reservation.resize(6 * PAGE_BYTES)
    assert reservation.num_bytes == 4 * PAGE_BYTES
    reservation.close()
    other.close()


def test_a_folder_that_is_no_mount_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(NoHugetlbfs, match=r"delete this daemon's pod.*hugetlbfsMount"):
        read_mount(tmp_path)


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        RegionFile(tmp_path / "file", PAGE_BYTES)
    assert not (tmp_path / "victim").exists()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvo-pages-"))
    yield path
    shutil.rmtree(path)


def test_case_21_too_few_pages_are_a_condition_with_numbers_and_end_when_there_are_enough(
    mount: Path, folder: Path
) -> None:
    taken = RegionFile(mount / "somebody-else", NUM_PAGES * PAGE_BYTES)
    taken.allocate(0, 4 * PAGE_BYTES)
    with DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount) as daemon:
        wait_until(lambda: daemon.readyz()[0] == 503 and "asked for 16Mi" in daemon.readyz()[1])
        assert "reserve" in daemon.readyz()[1]
        assert pages(mount) == NUM_PAGES - 4, "the daemon holds a half-made region"
        taken.punch(0, 4 * PAGE_BYTES)
        wait_until(lambda: daemon.readyz()[0] == 200)
    taken.close()


@pytest.fixture
def hugetlb_controller() -> Iterator[Path]:
    """The hugetlb controller of cgroup v1, mounted here for as long as the test needs it where nobody has."""
    path = Path("/sys/fs/cgroup/hugetlb")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists() or "hugetlb" not in Path("/proc/cgroups").read_text():
        pytest.skip("needs cgroup v1 with the hugetlb controller")
    if path.is_mount():
        yield path
        return
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "cgroup", "-o", "hugetlb", "hugetlb", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)  # a daemon of another test may just read its limits there
    path.rmdir()


def test_case_21_a_cgroup_limit_below_the_capacity_is_named_with_both_numbers(
    mount: Path, folder: Path, hugetlb_controller: Path
) -> None:
    cgroup = hugetlb_controller / folder.name
    cgroup.mkdir()
    try:
        (cgroup / "hugetlb.2MB.limit_in_bytes").write_text(str(4 * PAGE_BYTES))
        enter = f"echo $$ > {cgroup}/cgroup.procs && exec {sys.executable} -m kvoffload_node daemon"
        program = ["sh", "-c", enter]
        with DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount, program=program) as daemon:
            wait_until(lambda: "cgroup limit of 8Mi" in daemon.readyz()[1])
            assert "asked for 16Mi" in daemon.readyz()[1]
            assert "free on the node" in daemon.readyz()[1]
            assert pages(mount) == NUM_PAGES
    finally:
        cgroup.rmdir()


def test_an_extent_comes_from_what_is_kept_and_the_rest_stays_kept(mount: Path) -> None:
    reservation = Reservation(mount, is_hugetlbfs=True)
    reservation.resize(NUM_PAGES * PAGE_BYTES)
    file, thief = (RegionFile(mount / name, NUM_PAGES * PAGE_BYTES) for name in ("file", "thief"))
    reservation.hand_over(file, 2 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert (file.allocated_bytes, reservation.num_bytes) == (3 * PAGE_BYTES, (NUM_PAGES - 3) * PAGE_BYTES)
    with pytest.raises(PagesUnavailable):
        thief.allocate(0, PAGE_BYTES)
    for one in (reservation, file, thief):
        one.close()


@pytest.fixture
def robbed(mount: Path, monkeypatch: pytest.MonkeyPatch) -> RegionFile:
    """A thief's file: it takes one page between the first two system calls in which a page belongs to nobody."""
    thief = RegionFile(mount / "thief", PAGE_BYTES)
    resize = Reservation.resize

    def resize_and_be_robbed(self: Reservation, num_bytes: int) -> None:
        shrinks = num_bytes < self.num_bytes
        resize(self, num_bytes)
        if shrinks and not thief.allocated_bytes:
            monkeypatch.setattr(Reservation, "resize", resize)
            thief.allocate(0, PAGE_BYTES)

    monkeypatch.setattr(Reservation, "resize", resize_and_be_robbed)
    return thief


def test_an_extent_that_was_robbed_is_given_back_whole(mount: Path, robbed: RegionFile) -> None:
    reservation = Reservation(mount, is_hugetlbfs=True)
    reservation.resize(4 * PAGE_BYTES)
    elsewhere = RegionFile(mount / "somebody-else", NUM_PAGES * PAGE_BYTES)
    elsewhere.allocate(0, 4 * PAGE_BYTES)
    file = RegionFile(mount / "file", NUM_PAGES * PAGE_BYTES)
    with pytest.raises(PagesUnavailable):
        reservation.hand_over(file, 0, 2 * PAGE_BYTES)
    assert (file.allocated_bytes, reservation.num_bytes) == (0, 3 * PAGE_BYTES)
    reservation.hand_over(file, 0, 3 * PAGE_BYTES)
    assert (file.allocated_bytes, reservation.num_bytes) == (3 * PAGE_BYTES, 0)
    for one in (reservation, elsewhere, file, robbed):
        one.close()


async def test_a_page_that_was_robbed_is_missed_alone_and_comes_back(
    mount: Path, folder: Path, robbed: RegionFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extents, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(extents, "HEADROOM_EXTENTS", NUM_PAGES)
    region = open_region(
        folder, extent_bytes=PAGE_BYTES, num_extents=NUM_PAGES, mount=Mount(mount, PAGE_BYTES, is_hugetlbfs=True)
    )
    region.reserve_pages()
    tenant, pool = region.tenant_for("default", "uid"), region.extents
    tenant.num_workers = 1
    running = asyncio.create_task(pool.run())

    async def until_spare(count: int) -> None:
        async with asyncio.timeout(20):
            while len(tenant.index.spare) != count:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.001)

    try:
        pool.wake()
        await until_spare(NUM_PAGES - 1)
        assert isinstance(pool.problem, PagesUnavailable)
        assert pool.missing_bytes == PAGE_BYTES
        told = findings_of(region, HostPaths.below(Path("/")))[RegionCondition.PAGES_READY]
        assert (told.holds, told.reason) == (False, RegionReason.PAGES_UNAVAILABLE)
        assert "asked for 2Mi in pages of 2Mi" in told.message
        assert caplog.text.count("the capacity is not all there") == 1
        robbed.punch(0, PAGE_BYTES)
        await until_spare(NUM_PAGES)
        assert (pool.problem, pool.missing_bytes) == (None, 0)
        assert findings_of(region, HostPaths.below(Path("/")))[RegionCondition.PAGES_READY].holds
    finally:
        running.cancel()
        region.close()
        robbed.close()


def allocated_bytes(daemon: DaemonProcess) -> int:
    """Bytes of pages that the tenants' files hold, as the kernel counts them."""
    files = daemon.mount.glob(f"kvoffload-{daemon.pool}/*.region")
    return sum(file.stat().st_blocks * 512 for file in files)


def test_case_22_pages_once_reserved_cannot_be_taken_by_another_program(mount: Path, folder: Path) -> None:
    thief = RegionFile(mount / "thief", NUM_PAGES * PAGE_BYTES)
    with DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount) as daemon:
        wait_until(lambda: daemon.readyz()[0] == 200)
        engine = ByteEngine(daemon.attach("pod"), "engine")
        engine.connect()
        keys: list[bytes] = []
        for extent in range(NUM_PAGES):
            ahead = min(NUM_PAGES, extent + HEADROOM_EXTENTS) * PAGE_BYTES
            wait_until(lambda: allocated_bytes(daemon) == ahead)  # noqa: B023 - called at once
            with pytest.raises(PagesUnavailable):
                thief.allocate(0, PAGE_BYTES)
            new = [key_of(len(keys) + number) for number in range(PAGE_BYTES // engine.slot_bytes)]
            engine.store(new)
            wait_until(lambda: -1 not in engine.lookup(new))  # noqa: B023 - called at once
            keys += new
        assert -1 not in engine.lookup(keys), "something was evicted"
        engine.close()
    thief.close()


def test_two_pools_on_one_mount_share_nothing(mount: Path, folder: Path) -> None:
    half = NUM_PAGES // 2 * PAGE_BYTES
    with (
        DaemonProcess(folder / "a", capacity_bytes=half, mount=mount) as first,
        DaemonProcess(folder / "b", capacity_bytes=half, mount=mount) as second,
    ):
        engines = [ByteEngine(daemon.attach("pod"), "engine") for daemon in (first, second)]
        for engine in engines:
            engine.connect()
            engine.wait_for_room(4)
        keys = [key_of(number) for number in range(4)]
        engines[0].store(keys)
        wait_until(lambda: -1 not in engines[0].lookup(keys))
        assert engines[1].lookup(keys) == [-1] * 4
        first.kill()
        engines[1].store(keys)
        wait_until(lambda: -1 not in engines[1].lookup(keys))
        for engine in engines:
            engine.close()


def test_a_second_daemon_on_the_same_state_folder_refuses_to_start(mount: Path, folder: Path) -> None:
    with DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount) as daemon:
        wait_until(lambda: "are reserved" in daemon.log)
        second = DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount)
        second.pool = daemon.pool
        second.start()
        assert second.process is not None
        assert second.process.wait(20) == 1
        assert "another daemon runs on" in daemon.log


def test_files_without_an_owner_go_and_what_is_not_ours_stays(mount: Path, folder: Path) -> None:
    daemon = DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount)
    ours = mount / f"kvoffload-{daemon.pool}"
    ours.mkdir()
    orphan = RegionFile(ours / "tenant-0123.region", NUM_PAGES * PAGE_BYTES)
    orphan.allocate(0, 2 * PAGE_BYTES)
    orphan.close()
    (ours / "notes.txt").touch()
    (mount / "foreign").touch()
    with daemon:
        wait_until(lambda: daemon.readyz()[0] == 200)
        assert not (ours / "tenant-0123.region").exists()
        assert (ours / "notes.txt").exists()
        assert (mount / "foreign").exists()


def test_without_huge_pages_a_pool_without_fallback_says_why(folder: Path) -> None:
    with DaemonProcess(folder, capacity_bytes=16 << 20, fallback="None") as daemon:
        wait_until(lambda: daemon.readyz()[0] == 503 and "fallback" in daemon.readyz()[1])
