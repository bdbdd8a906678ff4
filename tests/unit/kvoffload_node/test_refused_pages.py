"""A kernel or a disk that refuses what the pool of extents asks: said, tried again, and nobody's end.

A descriptor that was opened for reading only is refused like a file system that was mounted read-only meanwhile.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

from kvoffload.api.conditions import RegionCondition
from kvoffload.api.pool import NumaPolicy, Sharing
from kvoffload.errors import PagesUnavailable, RegionUnusable, Shortage
from kvoffload_node.failures import Failures, Part
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.index.catalog import read_catalog
from kvoffload_node.region import extents
from kvoffload_node.region.extents import Tenant
from kvoffload_node.region.hugetlbfs import RegionFile, Reservation
from kvoffload_node.region.region import Region
from kvoffload_node.session.engines import Engine, Pod
from kvoffload_node.session.traffic import Traffic
from kvoffload_node.session.turns import Floor, Turns
from region_on_disk import findings_of, give_extents, open_region

EXTENT_BYTES = 64 << 20


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    monkeypatch.setattr(extents, "RETRY_SECONDS", 0.01)
    region = open_region(
        tmp_path,
        extent_bytes=EXTENT_BYTES,
        failures=Failures(),
        sharing=Sharing.POD,
        numa_policy=NumaPolicy.INTERLEAVE,
    )
    yield region
    region.close()


class ReadOnly:
    """While it is entered, this descriptor of a file takes no write."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    def __enter__(self) -> None:
        self._kept = os.dup(self._descriptor)
        self._replace(os.open(self._path, os.O_RDONLY))

    def __exit__(self, *_: object) -> None:
        self._replace(self._kept)

    def _replace(self, by: int) -> None:
        os.dup2(by, self._descriptor, inheritable=False)
        os.close(by)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.001)


def spare_extents(region: Region, count: int) -> Tenant:
    """A tenant that has so many of the pool's extents, without the work of clearing their pages."""
    tenant = region.tenant_for("default", "uid")
    give_extents(tenant, count)
    return tenant


async def test_pages_that_cannot_be_given_back_are_said_and_go_when_they_can(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "RETRY_SECONDS", 600.0)
    tenant = spare_extents(region, 8)
    region.extents.num_extents = 2  # the capacity was lowered
    running = asyncio.create_task(region.extents.run())
    with ReadOnly(tenant.file.descriptor, tenant.file.path):
        region.extents.wake()
        await until(lambda: region.failures.counts[Part.EXTENT] == extents.MAX_MOVING)
        assert "could not be given back" in region.failures.lasting()[Part.EXTENT]
        assert region.extents.num_above_capacity == 6, "what has its pages counts"
        for _ in range(50):
            region.extents.wake()  # as the sweep does
            await asyncio.sleep(0.001)
        assert region.failures.counts[Part.EXTENT] == extents.MAX_MOVING, "tried again later"
    assert not running.done()
    region.extents._move_again_at = 0.0
    region.extents.wake()
    await until(lambda: region.extents.num_above_capacity == 0)
    assert len(tenant.moving) == 0
    assert Part.EXTENT not in region.failures.lasting()
    running.cancel()


async def test_the_end_of_a_region_goes_on_over_pages_that_cannot_be_given_back(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    tenant = spare_extents(region, 2)
    with ReadOnly(tenant.file.descriptor, tenant.file.path):
        await region.extents.give_back_all()
    assert caplog.text.count("pages are free only when the engines that map them end") == 2


@pytest.mark.parametrize("what", ["journal", "file"])
async def test_what_cannot_be_allocated_is_a_problem_until_it_can(
    region: Region, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    tenant = region.tenant_for("default", "uid")
    tenant.num_workers = 1
    journal = tenant.index.journal
    descriptor, path = {
        "journal": (journal._descriptor, journal.path),
        "file": (tenant.file.descriptor, tenant.file.path),
    }[what]
    region.reserve_pages()
    with ReadOnly(descriptor, path):
        running = asyncio.create_task(region.extents.run())
        region.extents.wake()
        await until(lambda: region.extents.problem is not None or running.done())
        assert not running.done()
        assert isinstance(region.extents.problem, RegionUnusable)
        assert tenant.positions == set()
        for _ in range(2):
            told = region.extents.problem
            await until(lambda: region.extents.problem is not told)  # noqa: B023 - called at once
        assert caplog.text.count("the capacity is not all there") == 1, "said once, however often it is tried"
        await until(lambda: region._reservation.num_bytes == 8 * EXTENT_BYTES)  # kept from others again
    await until(lambda: region.extents.problem is None and tenant.index.spare)
    running.cancel()


async def test_a_disk_that_refuses_stays_said_when_pages_come_back(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "RETRY_SECONDS", 600.0)
    gone = spare_extents(region, 1)
    gone.is_abandoned = True
    needy = region.tenant_for("default", "another")
    needy.num_workers = 1
    region.reserve_pages()
    with ReadOnly(needy.index.journal._descriptor, needy.index.journal.path):
        running = asyncio.create_task(region.extents.run())
        region.extents.wake()
        await until(lambda: gone.positions == set() and region.extents.problem is not None)
        await until(lambda: not region.extents._moves)
        assert isinstance(region.extents.problem, RegionUnusable)
        assert region._reservation.num_bytes == 8 * EXTENT_BYTES
    running.cancel()


async def test_pages_that_are_kept_and_refused_are_asked_for_in_the_condition(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a cgroup's limit, which counts pages when they are allocated and not when they are reserved."""

    def allocate(self: RegionFile, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        raise PagesUnavailable("refused")

    monkeypatch.setattr(RegionFile, "allocate", allocate)
    region.tenant_for("default", "uid").num_workers = 1
    region.reserve_pages()
    running = asyncio.create_task(region.extents.run())
    region.extents.wake()
    await until(lambda: region.extents.problem is not None)
    assert region.extents.missing_bytes == 0
    assert (
        "refused: asked for 512Mi"
        in findings_of(region, HostPaths.below(Path("/")))[RegionCondition.PAGES_READY].message
    )
    running.cancel()


def test_records_that_the_disk_does_not_take_are_a_shortage_and_said(region: Region) -> None:
    tenant = spare_extents(region, 2)
    index, account = tenant.index, region.account("default")
    slab = index.slab(65536)
    pod = Pod("uid", "default", "pod", "auto", tenant, account, Turns(Floor()))
    engine = Engine(number=1, storer=1, world_size=1, pod=pod, engine_id="e", identity=b"", slab=slab, ready=True)
    region.extents.num_extents = 2
    traffic = Traffic(region)
    with ReadOnly(index.journal._descriptor, index.journal.path):
        assert traffic.reserve(engine, 1) == ([], Shortage.STATE_FULL)
    assert "see the node's disk" in region.failures.lasting()[Part.RECORDS]
    noted = region.failures.counts[Part.RECORDS]
    offsets, reason = traffic.reserve(engine, 1)
    assert (len(offsets), reason) == (1, "")
    assert region.failures.counts[Part.RECORDS] == noted, "the disk took these"
    assert account.used_bytes == slab.slot_bytes


async def test_a_tenant_whose_file_cannot_be_removed_is_forgotten_all_the_same(region: Region) -> None:
    tenant = region.tenant_for("default", "uid")
    region.namespace(tenant, b"d" * 32, key_bytes=32, saved_per_slot=0)
    tenant.file.path.unlink()
    (tenant.file.path / "somebody's").mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        region.remove_tenant(tenant)
    region.forget_namespaces(set())
    assert region.catalog.namespaces == []
    assert region.catalog.tenants == []
    written = read_catalog(region._catalog_path)
    assert written is not None
    assert (written.tenants, written.namespaces) == ([], [])


@pytest.mark.parametrize("name", ["reservation", "reservation-PID", "reservation-1"])
def test_what_a_daemon_left_that_was_killed_while_it_reserved_is_in_nobodys_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name.replace("PID", str(os.getpid()))).touch()
    Reservation(tmp_path, is_hugetlbfs=False).close()
    assert list(tmp_path.iterdir()) == []
