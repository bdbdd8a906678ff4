"""The pool's extents: which tenant's file has how many, allocated ahead of demand, moved when demand moves.

Runs in the node daemon. Decisions are made in the event loop, the kernel's work (clearing pages takes 10 to 20 ms for
64 MiB) in threads; sessions are served meanwhile from what is ready.

    reservation  ── allocate ──>  spare extent of a tenant  ── cut ──>  slots of a slab
         ^                              │    ^                             │
         └── punch <── acknowledged <── revoke └────── evicted whole <─────┘
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.errors import KVOffloadError, PagesUnavailable, RegionUnusable
from kvoffload_node.failures import Failures, Part, explain
from kvoffload_node.host.numa import NumaNode
from kvoffload_node.index.journal import UNCUT
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.slots import Slab
from kvoffload_node.index.table import Eviction
from kvoffload_node.index.tenant import Supply, TenantIndex
from kvoffload_node.region.hugetlbfs import RegionFile, Reservation

log = logging.getLogger(__name__)

HEADROOM_EXTENTS = 2
"""Spare extents that a tenant with engines has ahead of demand."""
MAX_MOVING = 4
"""Extents that may be on their way out of one tenant: it must not be emptied for what is needed in a moment."""
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
    moving: set[int] = field(default_factory=set)
    """Of those, the ones that are being given back."""
    num_workers: int = 0
    """Worker sessions: with none, nothing is allocated ahead."""
    is_abandoned: bool = False
    """Its pod is gone and nobody else shares it: its extents are given back, then it is removed."""
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
        plan_node: Callable[[Mapping[int, int]], NumaNode | None],
        failures: Failures,
    ) -> None:
        """`revoke(tenant, positions)` returns when no client of the tenant can touch these extents.

        `plan_node(extents of each NUMA node)` says on which node the next one belongs, None for anywhere.
        """
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self.tenants: dict[str, Tenant] = {}
        self.problem: KVOffloadError | None = None
        """Why the capacity is not all allocated or kept for us (PagesUnavailable, RegionUnusable); None if it is."""
        self.missing_bytes = 0
        """Bytes of pages that the capacity lacked when last looked: in no extent, and not kept for one."""
        self._failures = failures
        self._plan_node = plan_node
        self._reservation = reservation
        self._revoke = revoke
        self._wake = asyncio.Event()
        self._growing: Tenant | None = None
        """For whom an extent is being allocated: it counts as allocated from the beginning, but has no slots yet."""
        self.num_by_node: Counter[int] = Counter()
        """Extents that were given to each NUMA node since the daemon's start."""
        self._moves: set[asyncio.Task[None]] = set()
        self._allocate_again_at = 0.0
        """An extent that could not be allocated is tried again then, by the loop's clock, however many ask."""
        self._move_again_at = 0.0
        """Pages that could not be given back are tried again then."""

    @property
    def num_allocated(self) -> int:
        """Extents that have pages, in all tenants."""
        return sum(len(tenant.positions) for tenant in self.tenants.values())

    @property
    def unallocated_bytes(self) -> int:
        """Bytes of the capacity that no extent holds."""
        return max(0, self.num_extents - self.num_allocated) * self.extent_bytes

    @property
    def num_above_capacity(self) -> int:
        """Extents that have pages above the capacity, after it was lowered."""
        return max(0, self.num_allocated - self.num_extents)

    @property
    def surplus(self) -> int:
        """Those of them that are not on their way out."""
        moving = sum(len(tenant.moving) for tenant in self.tenants.values())
        return max(0, self.num_above_capacity - moving)

    def wake(self) -> None:
        """Something changed: look again whether a tenant needs an extent."""
        self._wake.set()

    def find_extent(self, tenant: Tenant, slab: Slab, account: Account, before: int) -> Supply:
        """An extent for a slab that has no free slot, as `TenantIndex.reserve` asks."""
        if self.num_allocated < self.num_extents and self._may_allocate:
            self._starve(tenant, before, account)
            return Supply.GROWING
        if self._growing is tenant:
            return Supply.GROWING
        if tenant.index.may_evict:
            extent = tenant.index.cold.coldest(before=before, account=account)
            if extent is not None and extent.slab is not slab:
                tenant.index.evict_extent(extent)
                return Supply.SPARE
        if len(self.tenants) > 1:
            self._starve(tenant, before, account)
        return Supply.NONE

    def _starve(self, tenant: Tenant, before: int, account: Account) -> None:
        tenant.starving = (before, account)
        self._wake.set()

    async def run(self) -> None:
        """Allocate ahead of demand and move extents, until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), RETRY_SECONDS if self.problem else None)
                self._wake.clear()
                if self.missing_bytes and self._may_allocate:
                    self._keep_rest()
                while self.surplus and self._begin_move(None, before=1 << 62, account=None):
                    pass  # until each extent that can go is on its way
                # Whoever starves comes first: an extent that was taken back for it must not become another's headroom.
                for tenant in sorted(self.tenants.values(), key=lambda tenant: tenant.starving is None):
                    while tenant.is_abandoned and tenant.index.spare and self._may_move:
                        self._move(tenant, tenant.index.spare.pop())
                    await self._provide(tenant)
        finally:
            for move in self._moves:
                move.cancel()
            await asyncio.gather(*self._moves, return_exceptions=True)

    async def _provide(self, tenant: Tenant) -> None:
        """Allocate what the tenant needs; where the capacity is used up, begin to take an extent from another."""
        while tenant.starving or (tenant.num_workers and len(tenant.index.spare) < HEADROOM_EXTENTS):
            starving, tenant.starving = tenant.starving, None
            if self.num_allocated >= self.num_extents:
                if starving is not None and not tenant.index.spare:
                    before, account = starving
                    self._begin_move(tenant, before=before, account=account)
                return
            if not self._may_allocate or not await self._allocate(tenant):
                return

    async def _allocate(self, tenant: Tenant) -> bool:
        position = min(set(range(len(tenant.positions) + 1)) - tenant.positions)
        tenant.positions.add(position)
        self._growing = tenant
        try:
            if not tenant.index.journal.make_room(position, UNCUT):
                raise RegionUnusable(tenant.index.journal.refusal)
            node = self._plan_node(self.num_by_node)
            cpus = node.cpus if node else frozenset()
            await _in_thread(
                self._reservation.hand_over, tenant.file, position * self.extent_bytes, self.extent_bytes, cpus
            )
        except (PagesUnavailable, RegionUnusable, OSError) as error:
            tenant.positions.discard(position)
            self._reserve_rest()  # it may lack the same pages: that is said already
            told = RegionUnusable(explain(error, tenant.file.path)) if isinstance(error, OSError) else error
            self._note_problem(told)
            self._allocate_again_at = asyncio.get_running_loop().time() + RETRY_SECONDS
            return False
        finally:
            self._growing = None
        self._note_problem(self._reserve_rest())
        if node is not None:
            self.num_by_node[node.number] += 1
        tenant.index.add_spare(position)
        return True

    def _note_problem(self, error: KVOffloadError | None) -> None:
        known = self.problem
        lacks_pages_still = isinstance(error, PagesUnavailable) and isinstance(known, PagesUnavailable)
        if error is not None and str(error) != str(known) and not lacks_pages_still:
            log.warning("the capacity is not all there, what is serves on: %s", error)
        self.problem = error
        self.missing_bytes = max(0, self.unallocated_bytes - self._reservation.num_bytes)

    @property
    def _may_allocate(self) -> bool:
        return asyncio.get_running_loop().time() >= self._allocate_again_at

    @property
    def _may_move(self) -> bool:
        return asyncio.get_running_loop().time() >= self._move_again_at

    def _begin_move(self, needy: Tenant | None, *, before: int, account: Account | None) -> bool:
        """Begin to take an extent from a tenant other than `needy`: a spare one, or the coldest older than `before`."""
        if not self._may_move:
            return False
        others = [
            tenant
            for tenant in self.tenants.values()
            if tenant is not needy and tenant.index.may_evict and len(tenant.moving) < MAX_MOVING
        ]
        victim = next((tenant for tenant in others if tenant.index.spare), None)
        if victim is None:
            found = [
                (extent.last_used, tenant, extent)
                for tenant in others
                if (extent := tenant.index.cold.coldest(before=before, account=account)) is not None
            ]
            if not found:
                return False
            _, victim, extent = min(found, key=lambda entry: entry[0])
            victim.index.evict_extent(extent, Eviction.TENANT_MOVED if needy else Eviction.CAPACITY_LOWERED)
        needs = None if needy is None or account is None else (needy, before, account)
        self._move(victim, victim.index.spare.pop(), needs)
        return True

    def _move(self, tenant: Tenant, position: int, needs: "tuple[Tenant, int, Account] | None" = None) -> None:
        """Take an extent from a tenant, for the one that `needs` it (with what it asked for), or for nobody."""
        tenant.moving.add(position)
        move = asyncio.get_running_loop().create_task(self._give_back(tenant, position, needs))
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)

    async def _give_back(self, tenant: Tenant, position: int, needs: "tuple[Tenant, int, Account] | None") -> None:
        """Return an extent that belongs to no slab and is no longer spare: revoke, then punch. One that cannot be
        punched has its pages still, and is spare again."""
        await self._revoke(tenant, [position])
        tenant.index.journal.extent(position, 0)
        try:
            await _in_thread(tenant.file.punch, position * self.extent_bytes, self.extent_bytes)
        except (RegionUnusable, OSError) as error:
            tenant.moving.discard(position)
            tenant.index.add_spare(position)
            self._move_again_at = asyncio.get_running_loop().time() + RETRY_SECONDS
            self._failures.note(
                Part.EXTENT,
                f"{self.extent_bytes} bytes of pages could not be given back and are tried again every "
                f"{RETRY_SECONDS:g} s: {error}; see the node's kernel log",
            )
            return
        self._failures.clear(Part.EXTENT)
        tenant.moving.discard(position)
        tenant.positions.discard(position)
        self._keep_rest()
        if needs is not None:
            needy, before, account = needs
            self._starve(needy, before, account)
        self.wake()

    def _keep_rest(self) -> None:
        """Keep pages for all that is not allocated, and say whether they could be had. Why nothing can be allocated for
        another reason stays said. An allocation under way changes the reservation itself, and ends with the same."""
        if self._growing is None:
            error = self._reserve_rest()
            self._note_problem(self.problem if error is None and isinstance(self.problem, RegionUnusable) else error)

    def _reserve_rest(self) -> KVOffloadError | None:
        try:
            self._reservation.resize(self.unallocated_bytes)
        except OSError as error:
            return RegionUnusable(f"reserving pages: {error}")
        except (PagesUnavailable, RegionUnusable) as error:
            return error
        return None

    async def give_back_all(self) -> None:
        """Return every extent of every tenant, as far as clients let go of them; for a region that is deleted."""

        async def give_back(tenant: Tenant) -> None:
            positions = sorted(tenant.positions)
            if positions:
                await self._revoke(tenant, positions)
            for position in positions:
                try:
                    await asyncio.to_thread(tenant.file.punch, position * self.extent_bytes, self.extent_bytes)
                except (RegionUnusable, OSError) as error:
                    log.error("pages are free only when the engines that map them end: %s", error)

        await asyncio.gather(*(give_back(tenant) for tenant in self.tenants.values()))

    def abandon(self, tenant: Tenant) -> None:
        """The tenant will not come back. Call it when no process of it lives, until it holds nothing any more."""
        tenant.is_abandoned = True
        for extent in list(tenant.index.extents.values()):
            if not tenant.index.is_busy(extent):
                tenant.index.evict_extent(extent, Eviction.TENANT_GONE)
        self.wake()


async def _in_thread(work: Callable[..., None], *arguments: Any) -> None:
    """The kernel's work. Who cancels this waits for its end too: the descriptors that it uses are closed next."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.gather(thread, return_exceptions=True)
        raise
