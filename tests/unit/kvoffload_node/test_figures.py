"""A region's figures: every byte of the capacity is counted once, every slot in one state."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.api.pool import Sharing
from kvoffload_node.index.slots import WriteOwner
from kvoffload_node.index.table import Eviction
from kvoffload_node.index.tenant import Supply
from kvoffload_node.region.extents import Tenant
from kvoffload_node.region.figures import Figures, build_figures
from kvoffload_node.region.region import Region
from region_on_disk import give_extents, open_region

EXTENT_BYTES, NUM_EXTENTS = 65536, 8
SLOT_BYTES = 12288
"""Five to an extent, of which 4096 bytes are left."""


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    region = open_region(tmp_path, extent_bytes=EXTENT_BYTES, num_extents=NUM_EXTENTS, sharing=Sharing.NAMESPACE)
    yield region
    region.abandon()


def store(region: Region, tenant: Tenant, *, ready: int, writing: int = 0) -> list[int]:
    """So many READY slots, and some that were only given out."""
    owner = WriteOwner(number=1, storer=1, world_size=1)
    namespace = region.namespace(tenant, b"d" * 32, key_bytes=8, saved_per_slot=1000)
    offsets, _ = tenant.index.reserve(
        tenant.index.slab(SLOT_BYTES),
        ready + writing,
        owner=owner,
        account=region.account("team"),
        find_extent=lambda _: Supply.NONE,
    )
    assert len(offsets) == ready + writing
    keys = [offset.to_bytes(8, "little") for offset in offsets[:ready]]
    tenant.index.assign(owner, namespace, zip(offsets[:ready], keys, strict=True))
    tenant.index.seal(owner, 0, offsets[:ready])
    return offsets


def figures(region: Region, evicted: Counter[str] | None = None) -> Figures:
    tenants = region.extents.tenants.values()
    capacity_bytes = NUM_EXTENTS * EXTENT_BYTES
    return build_figures(tenants, capacity_bytes=capacity_bytes, allocated_bytes=0, evicted_bytes=evicted or Counter())


def test_what_is_used_written_wasted_and_free_is_the_capacity(region: Region) -> None:
    first, second = region.tenant_for("a", "uid"), region.tenant_for("b", "uid")
    give_extents(first, 3)
    give_extents(second, 1)
    offsets = store(region, first, ready=7, writing=2)
    store(region, second, ready=1)
    found = figures(region)
    assert found.used_by_tenant == {first.name: 7 * SLOT_BYTES, second.name: SLOT_BYTES}
    assert found.used_bytes == 8 * SLOT_BYTES
    assert found.waste_bytes == 3 * 4096, "at the ends of three extents that are cut"
    assert found.saved_bytes == 8 * 1000
    assert found.free_bytes == NUM_EXTENTS * EXTENT_BYTES - 10 * SLOT_BYTES - 3 * 4096
    assert found.slots == {"free": 5, "writing": 2, "ready": 8, "leased": 0, "orphaned": 0}
    holder: dict[int, int] = {}
    first.index.lease(holder, offsets[:3])
    first.index.drop(holder, offsets[:1])
    found = figures(region)
    assert found.slots == {"free": 5, "writing": 2, "ready": 7, "leased": 3, "orphaned": 1}
    assert found.used_bytes == 8 * SLOT_BYTES, "a reader still has it"
    assert found.saved_bytes == 7 * 1000


def test_after_the_capacity_was_lowered_nothing_is_free_until_there_is_room(region: Region) -> None:
    tenant = region.tenant_for("a", "uid")
    give_extents(tenant, NUM_EXTENTS)
    store(region, tenant, ready=5 * NUM_EXTENTS)
    found = build_figures([tenant], capacity_bytes=EXTENT_BYTES, allocated_bytes=0, evicted_bytes=Counter())
    assert found.free_bytes == 0


def test_evictions_of_tenants_that_are_gone_are_counted_on(region: Region) -> None:
    tenant = region.tenant_for("a", "uid")
    give_extents(tenant, 1)
    store(region, tenant, ready=5)
    (extent,) = tenant.index.extents.values()
    tenant.index.evict_extent(extent, Eviction.TENANT_MOVED)
    found = figures(region, Counter({Eviction.TENANT_MOVED: 7, Eviction.TENANT_GONE: 3}))
    expected = dict.fromkeys(map(str, Eviction), 0)
    assert found.evicted_bytes == expected | {"TenantMoved": 7 + 5 * SLOT_BYTES, "TenantGone": 3}
