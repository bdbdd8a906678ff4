"""A region in a folder of any file system, for tests that call its parts: nobody maps anything in it."""

from pathlib import Path
from typing import Any

from kvoffload.api.pool import Fallback
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload_node.failures import Failures
from kvoffload_node.findings import Finding, Situation, build_findings
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.index.journal import UNCUT
from kvoffload_node.region.extents import Tenant
from kvoffload_node.region.hugetlbfs import Mount
from kvoffload_node.region.region import Region


def open_region(
    folder: Path,
    *,
    extent_bytes: int,
    num_extents: int = 8,
    mount: Mount | None = None,
    failures: Failures | None = None,
    **spec: Any,
) -> Region:
    """With extents of one page each, and its files in `folder` where no mount is given. `spec`: more fields of it."""

    async def revoke(*_: object) -> None:
        """Nobody maps anything."""

    region = Region(
        spec_of(extent_bytes=extent_bytes, num_extents=num_extents, **spec),
        mount=mount or Mount(folder, extent_bytes, is_hugetlbfs=False),
        state_folder=folder,
        paths=HostPaths.below(Path("/")),
        revoke=revoke,
        failures=failures,
    )
    assert (region.extent_bytes, region.extents.num_extents) == (extent_bytes, num_extents)
    return region


def findings_of(region: Region, paths: HostPaths) -> dict[str, Finding]:
    """What the daemon that serves this region says, by condition."""
    situation = Situation(
        spec=region.spec, region=region, region_problem=None, pages_problem=None, holders="", is_stopping=False,
        has_attacher=True, needs_attacher=True,
    )  # fmt: skip
    return {finding.type: finding for finding in build_findings(situation, paths)}


def spec_of(*, extent_bytes: int, num_extents: int, **spec: Any) -> KVOffloadRegionSpec:
    """What such a region is asked to be."""
    return KVOffloadRegionSpec(
        pool_name="pool",
        node_name="node",
        capacity_bytes=num_extents * extent_bytes,
        page_size_bytes=extent_bytes,
        fallback=Fallback.SHARED_MEMORY,
        **spec,
    )


def give_extents(tenant: Tenant, count: int, *, with_pages: bool = False) -> None:
    """So many spare extents for a tenant that has none; where the test does not need them, without their pages."""
    for position in range(count):
        tenant.positions.add(position)
        assert tenant.index.journal.make_room(position, UNCUT)
        if with_pages:
            tenant.file.allocate(position * tenant.index.extent_bytes, tenant.index.extent_bytes)
        tenant.index.add_spare(position)
