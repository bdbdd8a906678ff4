"""Extents that are had ahead of demand, and whose extent is taken where the capacity is used up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvoffload.api.pool import NumaPolicy, Sharing
from kvoffload_node.index.slots import WriteOwner
from kvoffload_node.index.table import Eviction
from kvoffload_node.index.tenant import Supply
from kvoffload_node.region.extents import HEADROOM_EXTENTS, Tenant
from kvoffload_node.region.region import Region
from region_on_disk import give_extents, open_region

EXTENT_BYTES, NUM_EXTENTS = 65536, 8
SLOT_BYTES = 16384
ANY_TIME = 1 << 62


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Region]:
    """Whose pool of extents is running."""
    region = open_region(
        tmp_path,
        extent_bytes=EXTENT_BYTES,
        num_extents=NUM_EXTENTS,
        sharing=Sharing.NAMESPACE,
        numa_policy=NumaPolicy.INTERLEAVE,
    )
    region.reserve_pages()
    running = asyncio.create_task(region.extents.run())
    yield region
    assert not running.done()
    running.cancel()
    region.abandon()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.001)


def fill(region: Region, tenant: Tenant, extents: int = 0) -> list[int]:
    """Its spare extents, or so many more, full of READY slots; returns their offsets in the order of their use."""
    if extents:
        give_extents(tenant, extents, with_pages=True)
    owner = WriteOwner(number=1, storer=1, world_size=1)
    namespace = region.namespace(tenant, tenant.name.encode(), key_bytes=8, saved_per_slot=0)
    offsets, _ = tenant.index.reserve(
        tenant.index.slab(SLOT_BYTES),
        len(tenant.index.spare) * EXTENT_BYTES // SLOT_BYTES,
        owner=owner,
        account=region.account(tenant.name),
        find_extent=lambda _: Supply.NONE,
    )
    keys = [offset.to_bytes(8, "little") for offset in offsets]
    tenant.index.assign(owner, namespace, zip(offsets, keys, strict=True))
    tenant.index.seal(owner, 0, offsets)
    return offsets


def ask(region: Region, tenant: Tenant, before: int = ANY_TIME) -> Supply:
    """As a reservation does that finds no free slot."""
    return region.extents.find_extent(tenant, tenant.index.slab(SLOT_BYTES), region.account(tenant.name), before)


async def test_a_tenant_with_engines_has_extents_ahead_of_demand_and_no_more_than_that(region: Region) -> None:
    idle, busy = region.tenant_for("idle", "uid"), region.tenant_for("busy", "uid")
    busy.num_workers = 1
    region.extents.wake()
    await until(lambda: len(busy.index.spare) == HEADROOM_EXTENTS)
    fill(region, busy)
    region.extents.wake()
    await until(lambda: len(busy.index.spare) == HEADROOM_EXTENTS)
    for _ in range(20):
        region.extents.wake()
        await asyncio.sleep(0.001)
    assert (len(busy.index.spare), len(busy.positions)) == (HEADROOM_EXTENTS, 2 * HEADROOM_EXTENTS)
    assert idle.positions == set()
    assert busy.file.allocated_bytes == len(busy.positions) * EXTENT_BYTES
    assert region._reservation.num_bytes == region.extents.unallocated_bytes == 4 * EXTENT_BYTES, "the rest is kept"


async def test_of_all_other_tenants_the_one_that_used_its_extent_longest_ago_gives_one(region: Region) -> None:
    warm, cold, needy = (region.tenant_for(name, "uid") for name in ("warm", "cold", "needy"))
    fill(region, cold, 4)
    first_of_warm = region.clock.tick
    fill(region, warm, 4)
    assert ask(region, needy) is Supply.NONE
    await until(lambda: needy.index.spare)
    assert (len(cold.positions), len(warm.positions)) == (3, 4)
    assert cold.file.allocated_bytes == 3 * EXTENT_BYTES
    assert set(cold.index.journal.read_extents()) == cold.positions, "as a restarted daemon finds it"
    assert cold.index.evicted_bytes == {Eviction.TENANT_MOVED: EXTENT_BYTES}
    needy.index.spare.clear()
    assert ask(region, needy, before=first_of_warm) is Supply.NONE
    await until(lambda: needy.index.spare)
    assert (len(cold.positions), len(warm.positions)) == (2, 4)


async def test_nothing_is_taken_for_somebody_who_would_evict_what_is_older_of_his_own(region: Region) -> None:
    needy, other = region.tenant_for("needy", "uid"), region.tenant_for("other", "uid")
    oldest = region.clock.tick
    fill(region, other, NUM_EXTENTS)
    assert ask(region, needy, before=oldest) is Supply.NONE
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(other.positions) == NUM_EXTENTS
    assert other.index.evicted_bytes == {}


async def test_an_extent_that_is_spare_elsewhere_is_taken_before_anything_is_evicted(region: Region) -> None:
    full, idle, needy = (region.tenant_for(name, "uid") for name in ("full", "idle", "needy"))
    fill(region, full, NUM_EXTENTS - 1)
    give_extents(idle, 1, with_pages=True)
    ask(region, needy)
    await until(lambda: needy.index.spare)
    assert (len(full.positions), idle.positions) == (NUM_EXTENTS - 1, set())
    assert full.index.evicted_bytes == {}


async def test_a_tenant_that_recovers_from_a_restart_gives_nothing(region: Region) -> None:
    recovering, needy = region.tenant_for("recovering", "uid"), region.tenant_for("needy", "uid")
    fill(region, recovering, NUM_EXTENTS)
    recovering.index.may_evict = False
    ask(region, needy)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(recovering.positions) == NUM_EXTENTS
    recovering.index.end_recovery()
    ask(region, needy)
    await until(lambda: needy.index.spare)


async def test_what_is_above_a_lowered_capacity_goes_the_coldest_first(region: Region) -> None:
    cold, warm = region.tenant_for("cold", "uid"), region.tenant_for("warm", "uid")
    fill(region, cold, 4)
    offsets = fill(region, warm, 4)
    holder: dict[int, int] = {}
    cold.index.lease(holder, [0])
    region.extents.num_extents = 3
    region.extents.wake()
    await until(lambda: region.extents.num_above_capacity == 0)
    assert len(cold.positions) == 1, "of which one slot is leased"
    assert len(warm.positions) == 2
    assert set(warm.index.ready) == set(offsets[-2 * EXTENT_BYTES // SLOT_BYTES :])
    assert cold.index.evicted_bytes == {Eviction.CAPACITY_LOWERED: 3 * EXTENT_BYTES}
    assert region.extents.surplus == 0
    assert region._reservation.num_bytes == 0, "what was given back is the node's again"


async def test_at_the_end_of_a_region_pages_go_when_all_have_let_go_of_them(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, empty = region.tenant_for("used", "uid"), region.tenant_for("empty", "uid")
    fill(region, used, 3)
    let_go, asked = asyncio.Event(), []

    async def revoke(tenant: Tenant, positions: list[int]) -> None:
        asked.append((tenant.name, positions))
        await let_go.wait()

    monkeypatch.setattr(region.extents, "_revoke", revoke)
    giving_back = asyncio.create_task(region.extents.give_back_all())
    await until(lambda: asked)
    await asyncio.sleep(0.01)
    assert used.file.allocated_bytes == 3 * EXTENT_BYTES
    let_go.set()
    await asyncio.wait_for(giving_back, 20)
    assert used.file.allocated_bytes == empty.file.allocated_bytes == 0
    assert asked == [(used.name, [0, 1, 2])], "nobody is asked for nothing"
