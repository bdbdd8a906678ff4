"""Figures of a region at one moment, for its status and its metrics.

Runs in the node daemon; made by `region.py`, read by `status.py` and `metrics.py`.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvoffload_node.index.table import Eviction
from kvoffload_node.region.extents import Tenant


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes and slots of a region at one moment."""

    capacity_bytes: int
    allocated_bytes: int
    used_by_tenant: dict[str, int]
    free_bytes: int
    saved_bytes: int
    waste_bytes: int
    slots: dict[str, int]
    """By state: free, writing, ready, leased (of those ready and orphaned), orphaned."""
    evicted_bytes: dict[str, int]
    """By reason, every one of `Eviction`."""

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold blocks, of all tenants."""
        return sum(self.used_by_tenant.values())


def build_figures(
    tenants: Collection[Tenant], *, capacity_bytes: int, allocated_bytes: int, evicted_bytes: Counter[str]
) -> Figures:
    """Of a region with these tenants; `evicted_bytes` are those of tenants that are gone."""
    used = {tenant.name: tenant.index.used_bytes - tenant.index.writing_bytes for tenant in tenants}
    writing = sum(tenant.index.writing_bytes for tenant in tenants)
    slots = dict.fromkeys(("free", "writing", "ready", "leased", "orphaned"), 0)
    evicted = dict.fromkeys(map(str, Eviction), 0) | evicted_bytes
    for index in (tenant.index for tenant in tenants):
        slots["free"] += sum(len(extent.free) for extent in index.extents.values())
        slots["writing"] += len(index.writes)
        slots["ready"] += len(index.ready) - len(index.orphans)
        slots["leased"] += index.num_leased
        slots["orphaned"] += len(index.orphans)
        for reason, num_bytes in index.evicted_bytes.items():
            evicted[reason] += num_bytes
    waste = sum(tenant.index.waste_bytes for tenant in tenants)
    return Figures(
        capacity_bytes=capacity_bytes,
        allocated_bytes=allocated_bytes,
        used_by_tenant=used,
        free_bytes=max(0, capacity_bytes - sum(used.values()) - writing - waste),
        saved_bytes=sum(tenant.index.saved_bytes for tenant in tenants),
        waste_bytes=waste,
        slots=slots,
        evicted_bytes=evicted,
    )
