"""A pool of 1Gi pages on the real daemon: an extent is one page."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_engine import ByteEngine, key_of
from daemon_process import GIGANTIC_PAGE_BYTES, DaemonProcess, hugetlb_mount, wait_until


@pytest.fixture
def mount() -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(hugetlb_mount(GIGANTIC_PAGE_BYTES, page_bytes=GIGANTIC_PAGE_BYTES))
        except RuntimeError as error:
            pytest.skip(f"needs 1 GiB of memory in one piece: {error}")
        yield path


@pytest.mark.hugepages
def test_another_engine_loads_what_one_stored_in_a_page_of_one_gibibyte(mount: Path, tmp_path: Path) -> None:
    with DaemonProcess(
        tmp_path, capacity_bytes=GIGANTIC_PAGE_BYTES, mount=mount, pageSizeBytes=GIGANTIC_PAGE_BYTES
    ) as daemon:
        path = daemon.attach("pod")
        first, second = ByteEngine(path, "first"), ByteEngine(path, "second")
        for engine in (first, second):
            engine.connect()
        first.wait_for_room(8)
        keys = [key_of(number) for number in range(8)]
        first.store(keys)
        wait_until(lambda: -1 not in second.lookup(keys))  # which checks every byte
        assert second.workers[0].welcome.extent_bytes == GIGANTIC_PAGE_BYTES
        daemon.kill()
        daemon.start()
        for engine in (first, second):
            engine.connect()
        assert -1 not in second.lookup(keys), "the page was adopted with what it holds"
        for engine in (first, second):
            engine.close()
