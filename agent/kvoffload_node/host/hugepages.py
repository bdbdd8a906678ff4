"""Huge pages of the node and the limit of our own cgroup, as numbers for messages and metrics.

Runs in the node daemon. Absence is data: a node without that page size, or without the hugetlb controller, gives None.
"""

from dataclasses import dataclass
from pathlib import Path

from kvoffload.api.conditions import RegionReason
from kvoffload.api.pool import PageSize
from kvoffload.api.reservation import reserve_remedy
from kvoffload.units import format_bytes
from kvoffload_node.host.paths import HostPaths

UNLIMITED = 1 << 60
"""A limit at least so large is no limit."""


@dataclass(frozen=True, slots=True)
class HugepageCounts:
    """Pages of one size on the whole node."""

    total: int
    free: int
    reserved: int
    surplus: int

    @property
    def available(self) -> int:
        """Free and promised to nobody."""
        return max(0, self.free - self.reserved)


@dataclass(frozen=True, slots=True)
class HugepageLimit:
    """The tightest limit on huge pages over our cgroup and those above, as far as they are visible."""

    limit_bytes: int
    used_bytes: int


def read_hugepages(paths: HostPaths, page_bytes: int) -> HugepageCounts | None:
    """Counts of the node, None where it has no pages of this size."""
    folder = paths.sys / f"kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB"
    try:
        return HugepageCounts(
            total=_read_number(folder / "nr_hugepages"),
            free=_read_number(folder / "free_hugepages"),
            reserved=_read_number(folder / "resv_hugepages"),
            surplus=_read_number(folder / "surplus_hugepages"),
        )
    except FileNotFoundError:
        return None


def read_hugepage_limit(paths: HostPaths, page_bytes: int) -> HugepageLimit | None:
    """The tightest limit of our cgroup (v2 or v1), None without the hugetlb controller or without a limit."""
    size = _cgroup_page_size(page_bytes)
    found: list[HugepageLimit] = []
    for folder, limit_name, usage_name in _cgroup_folders(paths, size):
        try:
            text = (folder / limit_name).read_text().strip()
            used = _read_number(folder / usage_name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if text != "max" and int(text) < UNLIMITED:
            found.append(HugepageLimit(int(text), used))
    return min(found, key=lambda limit: limit.limit_bytes, default=None)


def _cgroup_folders(paths: HostPaths, size: str) -> list[tuple[Path, str, str]]:
    """Folders to look at, with the names of the limit and the usage there."""
    found: list[tuple[Path, str, str]] = []
    try:
        lines = (paths.proc / "self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            names = (f"hugetlb.{size}.max", f"hugetlb.{size}.current")
            roots = [paths.cgroup, paths.cgroup / "unified"]
        elif controllers == "hugetlb":
            names = (f"hugetlb.{size}.limit_in_bytes", f"hugetlb.{size}.usage_in_bytes")
            roots = [paths.cgroup / "hugetlb"]
        else:
            continue
        for root in roots:
            # Inside a container the path may be that of the host while the mount shows our own cgroup as its root.
            folders = [root, root / relative, *(root / relative).parents]
            found += [(folder, *names) for folder in folders if folder.is_relative_to(root)]
    return found


def explain_shortage(paths: HostPaths, *, wanted_bytes: int, page_bytes: int) -> tuple[RegionReason, str]:
    """Why `wanted_bytes` cannot be had: the reason, and a message with what was asked, limit and free."""
    counts = read_hugepages(paths, page_bytes)
    limit = read_hugepage_limit(paths, page_bytes)
    free_bytes = counts.available * page_bytes if counts else 0
    limit_text = "no cgroup limit" if limit is None else f"a cgroup limit of {format_bytes(limit.limit_bytes)}"
    if limit is not None:
        limit_text += f" of which {format_bytes(limit.used_bytes)} are used"
    numbers = (
        f"asked for {format_bytes(wanted_bytes)} in pages of {format_bytes(page_bytes)}, found "
        f"{format_bytes(free_bytes)} free on the node and {limit_text}"
    )
    if free_bytes >= wanted_bytes and limit is not None and limit.limit_bytes - limit.used_bytes < wanted_bytes:
        return (
            RegionReason.CGROUP_LIMIT,
            f"{numbers}; raise the daemon's hugepages limit, which the operator sets to the capacity",
        )
    missing_pages = -(-(wanted_bytes - free_bytes) // page_bytes)
    size = next((one for one in PageSize if one.num_bytes == page_bytes), None)
    wanted_pages = max(1, missing_pages) + (counts.total if counts else 0)
    return (
        RegionReason.PAGES_UNAVAILABLE,
        f"{numbers}; lower the pool's capacity, stop who holds the pages, or reserve {max(1, missing_pages)} more pages"
        + (f": {reserve_remedy(size, wanted_pages)}" if size else ""),
    )


def _cgroup_page_size(page_bytes: int) -> str:
    return f"{page_bytes >> 30}GB" if page_bytes >= 1 << 30 else f"{page_bytes >> 20}MB"


def _read_number(path: Path) -> int:
    return int(path.read_text().strip())
