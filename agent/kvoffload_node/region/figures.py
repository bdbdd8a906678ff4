"""Figures of a region at one moment, for its status and its metrics.

Runs in the node daemon; made by `region.py`, read by `status.py` and `metrics.py`.
"""

from dataclasses import dataclass


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
