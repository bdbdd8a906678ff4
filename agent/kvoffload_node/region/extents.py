"""The pool's extents: which tenant's file has how many, allocated ahead of demand, moved when demand moves.

Runs in the node daemon. Decisions are made in the event loop, the kernel's work (clearing pages takes 10 to 20 ms for
64 MiB) in one thread; sessions are served meanwhile from what is ready.

    reservation  ── allocate ──>  spare extent of a tenant  ── cut ──>  slots of a slab
         ^                              │    ^                             │
         └── punch <── acknowledged <── revoke └────── evicted whole <─────┘
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvoffload.errors import PagesUnavailable, RegionUnusable
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import Extent, Slab
from kvoffload_node.index.tenant import Supply, TenantIndex
from kvoffload_node.region.hugetlbfs import RegionFile, Reservation

log = logging.getLogger(__name__)

HEADROOM_EXTENTS = 2
"""Spare extents that a tenant with engines has ahead of demand."""
RETRY_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Tenant:
    """One sharing scope: its file and its index."""

    name: str
    number: int
    index: TenantIndex
    file: RegionFile
    positions: set[int] = field(default_factory=set)
    """Positions that have pages, or are being given back."""
    num_workers: int = 0
    """Worker sessions: with none, nothing is allocated ahead."""
    starving: "tuple[int, Account] | None" = None
    """A reservation found nothing: it would evict what was last used before this tick, for this account."""


class ExtentPool:
    """All extents of a region."""

    def __init__(
        self,
        *,
        num_extents: int,
        extent_bytes: int,
        reservation: Reservation,
        revoke: Callable[[Tenant, list[int]], Awaitable[None]],
    ) -> None:
        """`revoke(tenant, positions)` returns when no client of the tenant can touch these extents."""
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self.tenants: dict[str, Tenant] = {}
        self.problem = ""
        """Why an extent could not be allocated when last tried, empty if it could."""
        self._reservation = reservation
        self._revoke = revoke
        self._wake = asyncio.Event()

    @property
    def num_allocated(self) -> int:
        """Extents that have pages, in all tenants."""
        return sum(len(tenant.positions) for tenant in self.tenants.values())

    def wake(self) -> None:
        """Something changed: look again whether a tenant needs an extent."""
        self._wake.set()

    def find_extent(self, tenant: Tenant, slab: Slab, account: Account, before: int) -> Supply:
        """An extent for a slab that has no free slot, as `TenantIndex.reserve` asks."""
        if self.num_allocated < self.num_extents and not self.problem:
            tenant.starving = (before, account)
            self._wake.set()
            return Supply.GROWING
        extent = tenant.index.cold.coldest(before=before, account=account)
        if extent is not None and extent.slab is not slab:
            tenant.index.evict_extent(extent)
            return Supply.SPARE
        if len(self.tenants) > 1:
            tenant.starving = (before, account)
            self._wake.set()
        return Supply.NONE

    async def run(self) -> None:
        """Allocate ahead of demand and move extents, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), RETRY_SECONDS if self.problem else None)
            self._wake.clear()
            for tenant in list(self.tenants.values()):
                await self._provide(tenant)

    async def _provide(self, tenant: Tenant) -> None:
        while tenant.starving or (tenant.num_workers and len(tenant.index.spare) < HEADROOM_EXTENTS):
            starving = tenant.starving
            if self.num_allocated >= self.num_extents and (
                starving is None or tenant.index.spare or not await self._take_back(tenant, *starving)
            ):
                tenant.starving = None
                return
            tenant.starving = None
            if not await self._allocate(tenant):
                return

    async def _allocate(self, tenant: Tenant) -> bool:
        position = min(set(range(len(tenant.positions) + 1)) - tenant.positions)
        tenant.positions.add(position)
        offset = position * self.extent_bytes
        unallocated = self.num_extents - self.num_allocated
        try:
            self._reservation.resize(unallocated * self.extent_bytes)
            await asyncio.to_thread(tenant.file.allocate, offset, self.extent_bytes)
        except (PagesUnavailable, RegionUnusable) as error:
            tenant.positions.discard(position)
            with contextlib.suppress(PagesUnavailable):
                self._reservation.resize((unallocated + 1) * self.extent_bytes)
            if self.problem != str(error):
                log.warning("an extent could not be allocated: %s", error)
            self.problem = str(error)
            return False
        self.problem = ""
        tenant.index.add_spare(position)
        return True

    async def _take_back(self, needy: Tenant, before: int, account: Account) -> bool:
        """Free one extent of another tenant: a spare one, or the coldest that is colder than `before`."""
        victim = self._plan_victim(needy, before, account)
        if victim is None:
            return False
        tenant, extent = victim
        if extent is not None:
            tenant.index.evict_extent(extent, "TenantMoved")
        await self.give_back(tenant, tenant.index.spare.pop())
        return True

    def _plan_victim(self, needy: Tenant, before: int, account: Account) -> tuple[Tenant, Extent | None] | None:
        others = [tenant for tenant in self.tenants.values() if tenant is not needy and tenant.index.may_evict]
        for tenant in others:
            if tenant.index.spare:
                return tenant, None
        found = [
            (extent.last_used, tenant, extent)
            for tenant in others
            if (extent := tenant.index.cold.coldest(before=before, account=account)) is not None
        ]
        if not found:
            return None
        _, tenant, extent = min(found, key=lambda entry: entry[0])
        return tenant, extent

    async def give_back(self, tenant: Tenant, position: int) -> None:
        """Return an extent that is in no slab and no longer spare: revoke, then punch."""
        await self._revoke(tenant, [position])
        tenant.index.journal.extent(position, 0)
        await asyncio.to_thread(tenant.file.punch, position * self.extent_bytes, self.extent_bytes)
        tenant.positions.discard(position)
        try:
            self._reservation.resize((self.num_extents - self.num_allocated) * self.extent_bytes)
        except PagesUnavailable as error:
            self.problem = str(error)
            log.warning("pages that were given back could not be reserved again: %s", error)
