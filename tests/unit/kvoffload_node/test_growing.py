"""What is said of slots that are on their way: the region's last extent while it is being allocated."""

import asyncio
import threading
from collections.abc import Set
from pathlib import Path

import pytest

from kvoffload.api.pool import Fallback, NumaPolicy
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.index.tenant import Supply
from kvoffload_node.region.hugetlbfs import Mount, RegionFile
from kvoffload_node.region.region import Region


async def test_the_last_extent_is_growing_until_it_has_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_pages = threading.Event()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def allocate(self: RegionFile, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert has_pages.wait(20)

    async def revoke(*_: object) -> None:
        """Nobody maps anything."""

    monkeypatch.setattr(RegionFile, "allocate", allocate)
    spec = KVOffloadRegionSpec(
        pool_name="pool",
        node_name="node",
        capacity_bytes=64 << 20,
        page_size_bytes=64 << 20,
        fallback=Fallback.SHARED_MEMORY,
        numa_policy=NumaPolicy.INTERLEAVE,
    )
    region = Region(
        spec,
        mount=Mount(tmp_path, 64 << 20, is_hugetlbfs=False),
        state_folder=tmp_path,
        paths=HostPaths.below(Path("/")),
        revoke=revoke,
    )
    assert region.extents.num_extents == 1
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
