"""The region of one pool on this node: its folder, its tenants' files and indexes, and what survives a restart.

Runs in the node daemon, made once by `daemon.py`. Sessions reach tenants, accounts and namespaces through it.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Set
from pathlib import Path

from kvoffload.api.pool import Fallback, Mode, ReplicatedLayout, Sharing
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import PagesUnavailable, RefusalReason, RegionUnusable, SessionRefused
from kvoffload.layout.extents import plan_extent_bytes
from kvoffload_node.failures import Failures
from kvoffload_node.host.numa import NumaNode, plan_node, read_allowed_cpus, read_numa_nodes
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.index.catalog import (
    Catalog,
    NamespaceEntry,
    TenantEntry,
    catalog_path,
    read_catalog,
    write_catalog,
)
from kvoffload_node.index.journal import TenantJournal
from kvoffload_node.index.order import order_path, write_order
from kvoffload_node.index.quotas import UNLIMITED_BYTES, Account
from kvoffload_node.index.slots import Namespace
from kvoffload_node.index.table import Clock
from kvoffload_node.index.tenant import TenantIndex
from kvoffload_node.region.extents import ExtentPool, Tenant
from kvoffload_node.region.figures import Figures, build_figures
from kvoffload_node.region.hugetlbfs import Mount, NoHugetlbfs, RegionFile, Reservation
from kvoffload_node.region.leftovers import JOURNALS, ORDERS, REGION_FILES, region_folder

log = logging.getLogger(__name__)


class Region:
    """Everything the pool holds on this node."""

    def __init__(
        self,
        spec: KVOffloadRegionSpec,
        *,
        mount: Mount,
        state_folder: Path,
        paths: HostPaths,
        revoke: Callable[[Tenant, list[int]], Awaitable[None]],
        uid: str = "",
        failures: Failures | None = None,
    ) -> None:
        """Open the folder and adopt what an earlier daemon of this boot left. Raises RegionUnusable.

        `uid` is the KVOffloadRegion's, empty where there is no API server; what was left for one of another uid is
        removed. No page is reserved yet: `reserve_pages` does that, and may be tried again. `failures` is told of what
        fails later.
        """
        self.failures = failures or Failures()
        self.spec = self._opened_for = spec
        self.mount = mount
        self._paths = paths
        boot_id = (paths.proc / "sys/kernel/random/boot_id").read_text().strip()
        self.folder = region_folder(mount.path, spec.pool_name)
        self.clock = Clock()
        self.accounts: list[Account] = []
        self.pages_reserved = False
        self._evicted_bytes: Counter[str] = Counter()
        """Of tenants that are forgotten: a count that falls would look like many evictions to Prometheus."""
        self.numa_out_of_reach: list[int] = []
        """NUMA nodes that the daemon may run on no CPU of, as of the last extent: none is placed there."""
        self._state = state_folder
        self._catalog_path = catalog_path(state_folder)
        if not mount.is_hugetlbfs and spec.fallback is Fallback.NONE:
            raise NoHugetlbfs(
                f"{mount.path} is shared memory in 4 KiB pages and the pool has fallback None; mount a hugetlbfs "
                "there and delete this daemon's pod, or set fallback: SharedMemory"
            )
        if spec.page_size_bytes != mount.page_bytes and mount.is_hugetlbfs:
            raise RegionUnusable(
                f"{mount.path} has pages of {mount.page_bytes} bytes, the pool asks for {spec.page_size_bytes}; "
                "mount a hugetlbfs of that page size there and delete this daemon's pod"
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        catalog = read_catalog(self._catalog_path)
        epoch = catalog.epoch if catalog else self._lost_epoch()
        if catalog is None or not _fits(catalog, spec, mount, boot_id, uid):
            extent_bytes = plan_extent_bytes(spec.capacity_bytes, mount.page_bytes)
            catalog = Catalog(boot_id=boot_id, extent_bytes=extent_bytes, span_bytes=0)
        self.catalog = catalog
        self.catalog.region_uid = uid
        self.extent_bytes = catalog.extent_bytes
        num_extents = spec.capacity_bytes // self.extent_bytes
        self.capacity_bytes = num_extents * self.extent_bytes
        """What is used of the spec's capacity: whole extents."""
        self.catalog.span_bytes = max(self.catalog.span_bytes, self.capacity_bytes)
        self.span_bytes = self.catalog.span_bytes
        """Length of each tenant's file: it never shrinks while clients may have it mapped."""
        self.catalog.epoch = epoch + 1
        self._reservation = Reservation(self.folder, is_hugetlbfs=mount.is_hugetlbfs)
        self.extents = ExtentPool(
            num_extents=num_extents,
            extent_bytes=self.extent_bytes,
            reservation=self._reservation,
            revoke=revoke,
            plan_node=self._plan_node,
            failures=self.failures,
        )
        for namespace in self.catalog.accounts or ["-"]:
            self._add_account(namespace)
        self.catalog.accounts = [account.namespace for account in self.accounts]
        try:
            self._adopt()
            self._save()
        except BaseException:
            self.abandon()
            raise

    def _lost_epoch(self) -> int:
        """Where files are left and the catalog is not, engines may live that know its epochs: none is used again."""
        if not any(self.folder.glob(REGION_FILES)):
            return 0
        log.error("%s is lost or damaged: what is stored cannot be told any more, and is dropped", self._catalog_path)
        return int(time.time())

    @property
    def epoch(self) -> int:
        """Counts the daemon's starts over this region."""
        return self.catalog.epoch

    @property
    def sharing_allowed(self) -> bool:
        """Whether ranks may share a part."""
        return self.spec.replicated_layout is not ReplicatedLayout.NEVER

    # --- pages ------------------------------------------------------------------------------------------------------

    def reserve_pages(self) -> None:
        """Keep pages for the whole capacity. Raises PagesUnavailable; then nothing is kept but what was adopted."""
        try:
            self._reservation.resize(self.extents.unallocated_bytes)
        except PagesUnavailable:
            self.pages_reserved = False
            raise
        self.pages_reserved = True

    def take_spec(self, spec: KVOffloadRegionSpec) -> None:
        """Mode, quotas, engine limit and layout change at once; another capacity or page size needs a restart."""
        self.spec = spec
        for account in self.accounts:
            self._set_quota(account)

    def is_opened_for(self, spec: KVOffloadRegionSpec) -> bool:
        """Whether this spec's capacity and page size are those that the region was opened with."""
        opened = self._opened_for
        return (spec.capacity_bytes, spec.page_size_bytes) == (opened.capacity_bytes, opened.page_size_bytes)

    def check_serving(self) -> None:
        """Raise SessionRefused unless engines may attach now."""
        if self.spec.mode is Mode.PAUSED:
            raise SessionRefused(RefusalReason.POOL_PAUSED, f"pool {self.spec.pool_name} is paused")
        if self.spec.mode is Mode.OBSERVE:
            raise SessionRefused(RefusalReason.POOL_OBSERVED, f"pool {self.spec.pool_name} only observes")
        if not self.pages_reserved:
            raise SessionRefused(
                RefusalReason.NOT_READY, f"the region's {self.spec.capacity_bytes} bytes of pages are not reserved"
            )

    # --- tenants, accounts, namespaces --------------------------------------------------------------------------------

    def tenant_for(self, namespace: str, pod_uid: str) -> Tenant:
        """The tenant of a pod under the pool's `sharing`."""
        name = {
            Sharing.NAMESPACE: f"namespace/{namespace}",
            Sharing.POOL: "pool",
            Sharing.POD: f"pod/{pod_uid}",
        }[self.spec.sharing]
        tenant = self.extents.tenants.get(name)
        if tenant is None:
            entry = TenantEntry(name, self.next_number(), 0)
            tenant = self._open_tenant(entry)
            entry.inode = tenant.file.inode
            self.catalog.tenants.append(entry)
            self._save()
        return tenant

    def remove_tenant(self, tenant: Tenant) -> None:
        """Forget an abandoned tenant that holds no extent."""
        del self.extents.tenants[tenant.name]
        self._evicted_bytes += tenant.index.evicted_bytes
        # The catalog first: a file that cannot be removed goes with the next start, an entry without its tenant never.
        self.catalog.tenants = [entry for entry in self.catalog.tenants if entry.number != tenant.number]
        self.catalog.namespaces = [entry for entry in self.catalog.namespaces if entry.tenant != tenant.number]
        self._save()
        things = (tenant.file, tenant.index.journal)
        for thing in things:
            thing.close()
        for thing in things:
            thing.unlink()
        order_path(tenant.index.journal.path).unlink(missing_ok=True)

    def account(self, namespace: str) -> Account:
        """The account of a Kubernetes namespace."""
        for account in self.accounts[1:]:
            if account.namespace == namespace:
                return account
        account = self._add_account(namespace)
        self.catalog.accounts.append(namespace)
        self._save()
        return account

    def namespace(self, tenant: Tenant, digest: bytes, *, key_bytes: int, saved_per_slot: int) -> Namespace:
        """The tenant's namespace of keys with this digest, made if it is new."""
        for namespace in tenant.index.namespaces.values():
            if namespace.digest == digest:
                return namespace
        number = self.next_number()
        namespace = tenant.index.namespaces[number] = Namespace(number, digest, key_bytes, saved_per_slot)
        self.catalog.namespaces.append(NamespaceEntry(tenant.number, number, digest, key_bytes, saved_per_slot))
        self._save()
        return namespace

    def forget_namespaces(self, in_use: Set[Namespace]) -> None:
        """Drop namespaces without a READY key that no engine is bound to: private ones would pile up."""
        kept = []
        for entry in self.catalog.namespaces:
            tenant = next(t for t in self.extents.tenants.values() if t.number == entry.tenant)
            namespace = tenant.index.namespaces[entry.number]
            if namespace.ready or namespace in in_use:
                kept.append(entry)
            else:
                del tenant.index.namespaces[entry.number]
        if len(kept) < len(self.catalog.namespaces):
            self.catalog.namespaces = kept
            self._save()

    def next_number(self) -> int:
        """A number never given out before in this catalog: the epoch and a counter, so that no write is needed."""
        number = self.catalog.next_number
        self.catalog.next_number += 1
        return self.epoch << 32 | number

    # --- figures ----------------------------------------------------------------------------------------------------

    def figures(self) -> Figures:
        """Bytes and slots as they are now."""
        allocated = self.extents.num_allocated * self.extent_bytes
        return build_figures(
            self.extents.tenants.values(),
            capacity_bytes=self.capacity_bytes if self.pages_reserved else allocated,
            allocated_bytes=allocated,
            evicted_bytes=self._evicted_bytes,
        )

    # --- ends -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close everything; files stay for a successor, or for `leftovers.remove_region`."""
        for tenant in self.extents.tenants.values():
            try:
                write_order(tenant.index.journal.path, tenant.index.ready, self.clock.tick)
            except OSError as error:
                log.warning("the order of uses of %s is lost: %s", tenant.index.journal.path, error)
        self.abandon()

    def abandon(self) -> None:
        """Close everything as it was found: a region that could not be opened whole."""
        for tenant in self.extents.tenants.values():
            tenant.index.journal.close()
            tenant.file.close()
        self._reservation.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        names = set()
        kept = []
        for entry in self.catalog.tenants:
            path = self._region_path(entry.name)
            if not path.exists() or path.stat().st_ino != entry.inode:
                self._journal_path(entry.name).unlink(missing_ok=True)
                continue
            tenant = self._open_tenant(entry)
            tenant.positions = set(tenant.index.journal.read_extents())
            if tenant.file.allocated_bytes < len(tenant.positions) * self.extent_bytes:
                log.error("%s has lost pages, somebody has cut it: its tenant begins anew", path)
                del self.extents.tenants[entry.name]
                for thing in (tenant.file, tenant.index.journal):
                    thing.close()
                    thing.unlink()
                continue
            for namespace in self.catalog.namespaces:
                if namespace.tenant == entry.number:
                    tenant.index.namespaces[namespace.number] = Namespace(
                        namespace.number, namespace.digest, namespace.key_bytes, namespace.saved_per_slot
                    )
            self._punch_unknown(tenant)
            names.add(path.name)
            kept.append(entry)
        self.catalog.tenants = kept
        numbers = {entry.number for entry in kept}
        self.catalog.namespaces = [n for n in self.catalog.namespaces if n.tenant in numbers]
        for path in self.folder.glob(REGION_FILES):
            if path.name not in names:
                log.info("removing %s: no tenant of this boot owns it", path)
                path.unlink()
        for path in (*self._state.glob(JOURNALS), *self._state.glob(ORDERS)):
            if path.with_suffix(".region").name not in names:
                path.unlink()

    def _punch_unknown(self, tenant: Tenant) -> None:
        """Give back pages that no journaled extent holds: a kill between allocation and journal left them."""
        known = len(tenant.positions) * self.extent_bytes
        if tenant.file.allocated_bytes > known:
            for position in range(self.span_bytes // self.extent_bytes):
                if position not in tenant.positions:
                    tenant.file.punch(position * self.extent_bytes, self.extent_bytes)

    def _open_tenant(self, entry: TenantEntry) -> Tenant:
        journal = TenantJournal(
            self._journal_path(entry.name),
            num_extents=self.span_bytes // self.extent_bytes,
            extent_bytes=self.extent_bytes,
        )
        index = TenantIndex(entry.number, extent_bytes=self.extent_bytes, clock=self.clock, journal=journal)
        try:
            file = RegionFile(self._region_path(entry.name), self.span_bytes)
        except BaseException:
            journal.close()
            raise
        tenant = Tenant(entry.name, entry.number, index, file)
        self.extents.tenants[entry.name] = tenant
        return tenant

    def _plan_node(self, num_extents: Mapping[int, int]) -> NumaNode | None:
        nodes, allowed = read_numa_nodes(self._paths, self.mount.page_bytes), read_allowed_cpus(self._paths)
        out_of_reach = [node.number for node in nodes if allowed is not None and not node.cpus & allowed]
        if out_of_reach != self.numa_out_of_reach:
            self.numa_out_of_reach = out_of_reach
            log.warning("NUMA nodes that the daemon has no CPU of: %s of %d", out_of_reach, len(nodes))
        nodes = [node for node in nodes if node.number not in out_of_reach]
        return plan_node(self.spec.numa_policy, nodes, num_extents, self.extent_bytes // self.mount.page_bytes)

    def _add_account(self, namespace: str) -> Account:
        account = Account(len(self.accounts), namespace)
        self._set_quota(account)
        self.accounts.append(account)
        return account

    def _set_quota(self, account: Account) -> None:
        quota = next((quota for quota in self.spec.quotas if quota.namespace == account.namespace), None)
        account.guaranteed_bytes = quota.guaranteed_bytes if quota else 0
        account.limit_bytes = quota.limit_bytes if quota else UNLIMITED_BYTES

    def _region_path(self, tenant: str) -> Path:
        return self.folder / f"tenant-{_digest(tenant)}.region"

    def _journal_path(self, tenant: str) -> Path:
        return self._state / f"tenant-{_digest(tenant)}.journal"

    def _save(self) -> None:
        write_catalog(self._catalog_path, self.catalog)


def _fits(catalog: Catalog, spec: KVOffloadRegionSpec, mount: Mount, boot_id: str, uid: str) -> bool:
    """Whether the journals of this catalog speak of a region that can be taken over, of whatever capacity."""
    return (
        catalog.boot_id == boot_id
        and (not uid or catalog.region_uid in ("", uid))
        and catalog.extent_bytes % mount.page_bytes == 0
        and spec.capacity_bytes >= catalog.extent_bytes
    )


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
