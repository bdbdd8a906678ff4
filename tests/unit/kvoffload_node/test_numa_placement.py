"""Where a region's extents are put on hosts of several NUMA nodes, by the code that the daemon runs."""

import asyncio
import logging
import os
import shutil
from collections.abc import Set
from pathlib import Path

import pytest

from kvoffload.api.conditions import RegionCondition
from kvoffload.api.pool import Fallback, NumaPolicy
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload_node.host.numa import parse_cpu_list, running_on
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.region import hugetlbfs
from kvoffload_node.region.hugetlbfs import Mount, RegionFile
from kvoffload_node.region.region import Region
from region_on_disk import findings_of

HOSTS = Path(__file__).parents[2] / "fixtures/sysfs"
TWO, EIGHT = "two-nodes-v2", "eight-nodes-v1"
CPUS = {
    TWO: [parse_cpu_list("0-3,8-11"), parse_cpu_list("4-7,12-15")],
    EIGHT: [frozenset(range(16 * node, 16 * node + 16)) for node in range(8)],
}
NUM_EXTENTS = 16


async def fill(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    policy: NumaPolicy,
    allowed_cpus: str = "",
    free_pages_of_first: int | None = None,
) -> tuple[Region, list[Set[int]]]:
    """A region with all its extents allocated, and the CPUs on which each was."""
    shutil.copytree(HOSTS / host, tmp_path / "host")
    paths = HostPaths.below(tmp_path / "host")
    (paths.proc / "sys/kernel/random").mkdir(parents=True)
    (paths.proc / "sys/kernel/random/boot_id").write_text("boot\n")
    if allowed_cpus:
        (paths.proc / "self/status").write_text(f"Cpus_allowed_list:\t{allowed_cpus}\n")
    page_bytes = {TWO: 2 << 20, EIGHT: 1 << 30}[host]
    if free_pages_of_first is not None:
        (free,) = (paths.sys / "devices/system/node/node0").rglob(f"hugepages-{page_bytes >> 10}kB/free_hugepages")
        free.write_text(f"{free_pages_of_first}\n")
    placed: list[Set[int]] = []

    def allocate(self: RegionFile, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        placed.append(cpus)

    async def revoke(*_: object) -> None:
        """Nobody maps anything."""

    monkeypatch.setattr(RegionFile, "allocate", allocate)
    spec = KVOffloadRegionSpec(
        pool_name="pool",
        node_name="node",
        capacity_bytes=NUM_EXTENTS * max(page_bytes, 64 << 20),
        page_size_bytes=page_bytes,
        fallback=Fallback.SHARED_MEMORY,
        numa_policy=policy,
    )
    (tmp_path / "state").mkdir()
    mount = Mount(tmp_path, page_bytes, is_hugetlbfs=False)
    region = Region(spec, mount=mount, state_folder=tmp_path / "state", paths=paths, revoke=revoke)
    assert region.extents.num_extents == NUM_EXTENTS
    tenant = region.tenant_for("default", "uid")
    running = asyncio.create_task(region.extents.run())
    async with asyncio.timeout(20):
        while region.extents.num_by_node.total() < NUM_EXTENTS:
            tenant.starving = (1 << 62, region.account("default"))
            region.extents.wake()
            await asyncio.sleep(0)
    running.cancel()
    region.close()
    return region, placed


@pytest.mark.parametrize("host", [TWO, EIGHT])
async def test_interleave_puts_one_extent_after_another_on_every_node(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, placed = await fill(tmp_path, monkeypatch, host, NumaPolicy.INTERLEAVE)
    assert placed == CPUS[host] * (NUM_EXTENTS // len(CPUS[host]))
    assert set(region.extents.num_by_node.values()) == {NUM_EXTENTS // len(CPUS[host])}
    assert region.numa_out_of_reach == []


@pytest.mark.parametrize("host", [TWO, EIGHT])
async def test_local_puts_all_extents_on_one_node_that_has_room(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, placed = await fill(tmp_path, monkeypatch, host, NumaPolicy.LOCAL)
    assert placed == [CPUS[host][0]] * NUM_EXTENTS


@pytest.mark.parametrize(("num_pages", "placed_there"), [(31, 0), (32, NUM_EXTENTS // 2)])
async def test_an_extent_is_put_where_there_are_pages_for_all_of_it(
    num_pages: int, placed_there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, placed = await fill(tmp_path, monkeypatch, TWO, NumaPolicy.INTERLEAVE, free_pages_of_first=num_pages)
    assert placed.count(CPUS[TWO][0]) == placed_there, "of 64 MiB in pages of 2 MiB"


@pytest.mark.parametrize(("policy", "is_degraded"), [(NumaPolicy.INTERLEAVE, True), (NumaPolicy.LOCAL, False)])
async def test_nodes_whose_cpus_the_container_has_not_are_left_out_and_named(
    policy: NumaPolicy,
    is_degraded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    region, placed = await fill(tmp_path, monkeypatch, EIGHT, policy, allowed_cpus="0-31,40,64-127")
    assert set(placed) <= {cpus for number, cpus in enumerate(CPUS[EIGHT]) if number != 3}
    assert region.numa_out_of_reach == [3]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "NUMA nodes that the daemon has no CPU of: [3] of 8"
    ]
    monkeypatch.setattr(region, "mount", Mount(tmp_path, 1 << 30, is_hugetlbfs=True))
    degraded = findings_of(region, HostPaths.below(tmp_path / "host"))[RegionCondition.DEGRADED]
    assert degraded.holds == is_degraded
    assert ("NUMA node 3" in degraded.message) == is_degraded


def test_a_thread_runs_on_the_cpus_it_is_told_and_then_where_it_did_before() -> None:
    before = os.sched_getaffinity(0)
    one = {max(before)}
    with running_on(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_may_not_run_there_stays_where_it_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with running_on({1023}):
        assert os.sched_getaffinity(0) == before
    assert "CPU 1023" in caplog.text


def test_pages_are_allocated_by_a_thread_on_the_nodes_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Kernel:
        def fallocate(self, *_: int) -> int:
            seen.append(os.sched_getaffinity(0))
            return 0

    monkeypatch.setattr(hugetlbfs, "_libc", Kernel())
    file = RegionFile(tmp_path / "file", 4096)
    one = {max(os.sched_getaffinity(0))}
    file.allocate(0, 4096, one)
    file.close()
    assert seen == [one]
