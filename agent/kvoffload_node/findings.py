"""The daemon's own conditions, built from its situation: Ready, PagesReady, Degraded.

Runs in the node daemon; `daemon.py` describes the situation, `status.py` gives the findings their history.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.api.conditions import RegionCondition, RegionReason
from kvoffload.api.pool import Mode, NumaPolicy
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import RegionUnusable
from kvoffload.units import format_bytes
from kvoffload_node.failures import OF_THE_DAEMON, Part
from kvoffload_node.host.hugepages import explain_shortage
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.region.extents import RETRY_SECONDS
from kvoffload_node.region.region import Region


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something is not as it must be."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition without its history."""

    type: str
    holds: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the daemon is in its life."""

    spec: KVOffloadRegionSpec | None
    region: Region | None
    """None until it could be opened."""
    region_problem: Problem | None
    pages_problem: Problem | None
    holders: str
    """Who holds extents, where there are more than the capacity allows."""
    is_stopping: bool
    has_attacher: bool
    needs_attacher: bool
    """False where pods are handed over by a test."""
    failures: Mapping[Part, str] = field(default_factory=dict)
    """What fails while the daemon serves."""


def build_findings(situation: Situation, paths: HostPaths) -> list[Finding]:
    """All three, always in the same order."""
    pages = _build_pages(situation, paths)
    return [_build_ready(situation, pages), pages, _build_degraded(situation)]


def _build_ready(situation: Situation, pages: Finding) -> Finding:
    kind, spec, region = RegionCondition.READY, situation.spec, situation.region
    if situation.is_stopping:
        message = "the daemon was told to stop; engines serve without offload until its successor is up"
        return Finding(kind, False, RegionReason.DRAINING, message)
    if spec is None:
        return Finding(kind, False, RegionReason.STARTING, "no KVOffloadRegion for this node yet")
    if spec.mode is Mode.OBSERVE:
        return Finding(kind, False, RegionReason.OBSERVING, "the pool only observes")
    if spec.mode is Mode.PAUSED:
        return Finding(kind, False, RegionReason.PAUSED, "the pool is paused; its pages are kept")
    if region is None or not region.pages_reserved:
        return Finding(kind, False, pages.reason, pages.message)
    capacity, extent = format_bytes(region.capacity_bytes), format_bytes(region.extent_bytes)
    return Finding(kind, True, RegionReason.SERVING, f"engines can attach; {capacity} in extents of {extent}")


def _build_pages(situation: Situation, paths: HostPaths) -> Finding:
    kind, spec, region = RegionCondition.PAGES_READY, situation.spec, situation.region
    if spec is not None and spec.mode is Mode.OBSERVE:
        _, message = explain_shortage(paths, wanted_bytes=spec.capacity_bytes, page_bytes=spec.page_size_bytes)
        message = f"nothing is reserved while the pool observes; {message}"
        return Finding(kind, False, RegionReason.OBSERVING, message)
    problem = situation.region_problem or situation.pages_problem
    if problem is not None:
        return Finding(kind, False, problem.reason, problem.message)
    if region is None or not region.pages_reserved:
        return Finding(kind, False, RegionReason.STARTING, "the pages are not reserved yet")
    if isinstance(region.extents.problem, RegionUnusable):
        message = f"no more pages are allocated, tried again every {RETRY_SECONDS:g} s: {region.extents.problem}"
        return Finding(kind, False, RegionReason.REGION_UNUSABLE, message)
    if region.extents.problem:
        # Where nothing is missing, pages that are kept cannot be had: a cgroup's limit, or a full tmpfs.
        wanted_bytes = region.extents.missing_bytes or region.extents.unallocated_bytes
        reason, message = explain_shortage(paths, wanted_bytes=wanted_bytes, page_bytes=region.mount.page_bytes)
        return Finding(kind, False, reason, f"{region.extents.problem}: {message}")
    capacity, page = format_bytes(region.capacity_bytes), format_bytes(region.mount.page_bytes)
    if not region.mount.is_hugetlbfs:
        message = f"{capacity} of shared memory in pages of {page}, as fallback says"
        return Finding(kind, True, RegionReason.SHARED_MEMORY_FALLBACK, message)
    return Finding(kind, True, RegionReason.PAGES_RESERVED, f"{capacity} reserved in pages of {page}")


def _build_degraded(situation: Situation) -> Finding:
    kind, region = RegionCondition.DEGRADED, situation.region
    if situation.failures:
        is_of_the_daemon = situation.failures.keys() <= OF_THE_DAEMON
        reason = RegionReason.DAEMON_IMPAIRED if is_of_the_daemon else RegionReason.REGION_UNUSABLE
        return Finding(kind, True, reason, "; ".join(situation.failures.values()))
    if region is not None and not region.mount.is_hugetlbfs:
        message = "fallback is SharedMemory: pages of 4 KiB are slower to copy and to register than huge ones"
        return Finding(kind, True, RegionReason.SHARED_MEMORY_FALLBACK, message)
    if region is not None and region.extents.num_above_capacity:
        message = (
            f"{region.extents.num_above_capacity} extents above the lowered capacity wait for "
            f"{situation.holders or 'nobody any more and are on their way'}; extents go as engines let go of their "
            "blocks, restart those pods if they do not"
        )
        return Finding(kind, True, RegionReason.SHRINK_WAITS, message)
    if region is not None and situation.needs_attacher and not situation.has_attacher:
        message = "the attacher is not connected: no new pod attaches"
        return Finding(kind, True, RegionReason.ATTACHER_MISSING, message)
    if region is not None and region.spec.numa_policy is NumaPolicy.INTERLEAVE and region.numa_out_of_reach:
        nodes = ", ".join(map(str, region.numa_out_of_reach))
        message = (
            f"the daemon has no CPU of NUMA node {nodes}, so that extents are placed on the others first; give its "
            "container CPUs of every node (the kubelet's static CPU manager takes them away)"
        )
        return Finding(kind, True, RegionReason.NUMA_NODE_OUT_OF_REACH, message)
    return Finding(kind, False, RegionReason.AS_ASKED, "everything is as the pool asks")
