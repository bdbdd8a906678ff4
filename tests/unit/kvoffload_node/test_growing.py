"""What is said of slots that are on their way: the region's last extent while it is being allocated."""

import asyncio
import threading
from collections.abc import Set
from pathlib import Path

import pytest

from kvoffload.api.pool import NumaPolicy
from kvoffload_node.index.tenant import Supply
from kvoffload_node.region.hugetlbfs import RegionFile
from region_on_disk import open_region


async def test_the_last_extent_is_growing_until_it_has_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_pages = threading.Event()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def allocate(self: RegionFile, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert has_pages.wait(20)

    monkeypatch.setattr(RegionFile, "allocate", allocate)
    region = open_region(tmp_path, extent_bytes=64 << 20, num_extents=1, numa_policy=NumaPolicy.INTERLEAVE)
    tenant = region.tenant_for("default", "uid")
    account = region.account("default")

    def supply() -> Supply:
        return region.extents.find_extent(tenant, tenant.index.slab(65536), account, before=1 << 62)

    running = asyncio.create_task(region.extents.run())
    try:
        async with asyncio.timeout(20):
            assert supply() is Supply.GROWING
            await begun.wait()
            assert region.extents.num_allocated == 1
            assert supply() is Supply.GROWING
            has_pages.set()
            while not tenant.index.spare:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0)
            assert supply() is Supply.NONE
    finally:
        has_pages.set()
        running.cancel()
        region.close()


async def test_who_ends_the_pool_waits_for_the_thread_that_still_uses_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, has_ended = threading.Event(), threading.Event()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def allocate(self: RegionFile, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(20)
        has_ended.set()

    monkeypatch.setattr(RegionFile, "allocate", allocate)
    region = open_region(tmp_path, extent_bytes=64 << 20, num_extents=1, numa_policy=NumaPolicy.INTERLEAVE)
    region.tenant_for("default", "uid").num_workers = 1
    running = asyncio.create_task(region.extents.run())
    region.extents.wake()
    async with asyncio.timeout(20):
        await begun.wait()
        running.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        may_end.set()
        await asyncio.wait([running])
    assert running.cancelled()
    assert has_ended.is_set()
    region.close()
