"""Region files and reservations on a real hugetlbfs: pages are had whole or not at all (cases 21 and 22)."""

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
from kvoffload.errors import PagesUnavailable
from kvoffload_node.region.hugetlbfs import NoHugetlbfs, RegionFile, Reservation, read_mount

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


@pytest.mark.alone  # another test that adds pages to the node gives the thief what the mount's limit would not
def test_case_22_pages_once_reserved_cannot_be_taken_by_another_program(mount: Path, folder: Path) -> None:
    thief = RegionFile(mount / "thief", NUM_PAGES * PAGE_BYTES)
    with DaemonProcess(folder, capacity_bytes=NUM_PAGES * PAGE_BYTES, mount=mount) as daemon:
        wait_until(lambda: daemon.readyz()[0] == 200)
        engine = ByteEngine(daemon.attach("pod"), "engine")
        engine.connect()
        for number in range(NUM_PAGES * PAGE_BYTES // engine.slot_bytes // 16):
            with pytest.raises(PagesUnavailable):
                thief.allocate(0, PAGE_BYTES)
            engine.wait_for_room(16)
            keys = [key_of(number * 16 + i) for i in range(16)]
            engine.store(keys)
            wait_until(lambda: -1 not in engine.lookup(keys))  # noqa: B023 - called at once
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
