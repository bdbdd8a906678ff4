"""The node daemon: puts the parts together, runs them, says what is the matter with them, stops them.

Runs as `python -m kvoffload_node daemon`, one for each pool and node.

    spec ──> region opened ──> engines recovered ──> pages reserved ──> serving ──> draining ──> files kept or unlinked
     │        │ no: condition, again                  │ no: condition, again         ^
     └─ from KVOffloadRegion, or a file                                              └── SIGTERM, region deleted
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvoffload.api.conditions import RegionCondition, RegionReason
from kvoffload.api.pool import Mode, ReclaimPolicy
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import PagesUnavailable, RegionUnusable
from kvoffload.units import format_bytes
from kvoffload_node.failures import Failures, Part
from kvoffload_node.findings import Finding, Problem, Situation, build_findings
from kvoffload_node.health import TEXT, Answer, Endpoints, InLoop
from kvoffload_node.host.hugepages import explain_shortage, read_hugepage_limit
from kvoffload_node.host.paths import HostPaths
from kvoffload_node.metrics import NodeCollector
from kvoffload_node.region.hugetlbfs import NoHugetlbfs, read_mount
from kvoffload_node.region.leftovers import region_folder, release_region, remove_region
from kvoffload_node.region.region import Region
from kvoffload_node.session.holders import describe_holders
from kvoffload_node.session.locks import Attachments
from kvoffload_node.session.registry import SWEEP_SECONDS, Registry
from kvoffload_node.session.server import Server
from kvoffload_node.settings import NodeSettings
from kvoffload_node.spec_source import SpecSource
from kvoffload_node.state_folder import StateFolder
from kvoffload_node.status_writer import StatusWriter

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
DRAIN_LOOK_SECONDS = 0.02
_NOT_CLEARED = "what ended engines leave cannot be cleared away"


@dataclass(frozen=True, slots=True)
class Running:
    """The parts that exist once the region is open."""

    region: Region
    registry: Registry
    server: Server


class Daemon:
    """One pool's daemon on this node."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.paths = HostPaths.below(settings.host_root)
        self.running: Running | None = None
        self.endpoints: Endpoints | None = None
        self.failures = Failures()
        self.stopping = asyncio.Event()
        self._region_problem: Problem | None = None
        self._pages_problem: Problem | None = None
        self._state = StateFolder(settings.state, self.failures)
        self.source = SpecSource(
            settings,
            state=self._state,
            failures=self.failures,
            on_spec=self._on_spec,
            on_first_word=self._check_opened,
            on_end=self.stopping.set,
        )

    async def run(self) -> None:
        """Serve until told to stop or the region is deleted. Raises RegionUnusable if another daemon runs here,
        or the state folder cannot be locked."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        self._state.lock()
        endpoints = self.endpoints = self._start_endpoints()
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks.append(loop.create_task(self.source.follow()))
            tasks.append(report := loop.create_task(StatusWriter(self).run()))
            tasks.append(loop.create_task(self._serve()))
            stopped = loop.create_task(self.stopping.wait())
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in done:
                task.result()
            await self._drain()
            await asyncio.wait([report], timeout=self.settings.drain_seconds)
        finally:
            await self._end(tasks)
            endpoints.stop()
            self._state.unlock()

    def _start_endpoints(self) -> Endpoints:
        registry = CollectorRegistry()
        registry.register(NodeCollector(self))
        ProcessCollector(registry=registry)  # the start time counts restarts, the rest is the daemon's own use

        def readyz() -> Answer:
            why = self.problem()
            return 503 if why else 200, TEXT, f"{why or 'ok'}\n".encode()

        def healthz() -> Answer:
            if self.source.client and not self.source.client.watching.is_alive and not self.stopping.is_set():
                return 503, TEXT, b"the daemon hears of its region no more\n"
            return 200, TEXT, b"ok\n"

        answers: dict[str, Callable[[], Answer]] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry)),
            "/healthz": healthz,
            "/readyz": readyz,
        }
        loop = asyncio.get_running_loop()
        server = Endpoints(self.settings.metrics_port, {path: InLoop(loop, make) for path, make in answers.items()})
        log.info("endpoints on port %d", server.server_address[1])
        return server

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _on_spec(self, spec: KVOffloadRegionSpec) -> None:
        if self.running is not None:
            self.running.registry.take_spec(spec)

    def _check_opened(self, spec: KVOffloadRegionSpec) -> None:
        """The API server's first word since the start: what was opened before it may be of a spec that nobody saw end.

        Later changes of the capacity come with another pod.
        """
        running = self.running
        if running is not None and not running.region.is_opened_for(spec):
            log.info(
                "the region was opened as it was last known, its capacity or page size is another one now: restarting"
            )
            self.stopping.set()

    # --- serving ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        await self.source.changed.wait()
        while self.source.spec is not None and self.source.spec.mode is Mode.OBSERVE:
            self.source.changed.clear()
            await self.source.changed.wait()
        while self.running is None:
            try:
                self.running = self._open()
            except RegionUnusable as error:
                log.error("the region cannot be opened: %s", error)
                reason = RegionReason.NO_HUGETLBFS if isinstance(error, NoHugetlbfs) else RegionReason.REGION_UNUSABLE
                self._region_problem = Problem(reason, str(error))
                await asyncio.sleep(RETRY_SECONDS)
        self._region_problem = None
        gc.freeze()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.running.server.run())
            group.create_task(self.running.region.extents.run())
            group.create_task(self._sweep(self.running.registry))
            group.create_task(self._reserve(self.running.region))

    def _open(self) -> Running:
        """Raises RegionUnusable, also for whatever the mount and the state folder refuse."""
        try:
            return self._open_region()
        except OSError as error:
            raise RegionUnusable(self._state.explain(error)) from error

    def _open_region(self) -> Running:
        assert self.source.spec is not None
        holder: list[Registry] = []
        region = Region(
            self.source.spec,
            mount=read_mount(self.settings.hugepages),
            state_folder=self.settings.state,
            paths=self.paths,
            revoke=lambda tenant, positions: holder[0].revoke(tenant, positions),
            uid=self.source.uid,
            failures=self.failures,
        )
        try:
            registry = Registry(
                region=region,
                attachments=Attachments(self.settings.state / "attachments"),
                quarantine_seconds=self.settings.quarantine_seconds,
            )
        except BaseException:
            region.abandon()
            raise
        holder.append(registry)
        return Running(region, registry, Server(registry, self.settings.handoff_socket))

    async def _reserve(self, region: Region) -> None:
        """Reserve the pages, and go on trying while there are not enough."""
        while True:
            try:
                self._check_limit(region)
                region.reserve_pages()
                self._pages_problem = None
                log.info("%s of pages are reserved", format_bytes(region.capacity_bytes))
                region.extents.wake()
                return
            except PagesUnavailable as error:
                self._pages_problem = Problem(
                    *explain_shortage(
                        self.paths, wanted_bytes=region.extents.unallocated_bytes, page_bytes=region.mount.page_bytes
                    )
                )
                log.warning("%s (%s)", self._pages_problem.message, error)
            except (RegionUnusable, OSError) as error:
                words = self._state.explain(error) if isinstance(error, OSError) else str(error)
                self._pages_problem = Problem(RegionReason.REGION_UNUSABLE, f"pages cannot be reserved: {words}")
                log.error("%s", self._pages_problem.message)
            await asyncio.sleep(RETRY_SECONDS)

    def _check_limit(self, region: Region) -> None:
        """A reservation is not charged to the cgroup, extents are: better to know now. Raises PagesUnavailable."""
        limit = read_hugepage_limit(self.paths, region.mount.page_bytes)
        if (
            region.mount.is_hugetlbfs
            and limit
            and limit.limit_bytes - limit.used_bytes < region.extents.unallocated_bytes
        ):
            raise PagesUnavailable(f"the cgroup's limit is {limit.limit_bytes} bytes, {limit.used_bytes} are used")

    async def _sweep(self, registry: Registry) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                registry.sweep()
            except OSError as error:  # what it did not get to is for the next one
                self.failures.note(Part.SWEEP, f"{_NOT_CLEARED}: {self._state.explain(error)}")
            except Exception as error:  # noqa: BLE001 - one engine's odd end must not be everybody's, again at each start
                self.failures.note(Part.SWEEP, f"{_NOT_CLEARED}, a bug of this daemon: {error!r}"[:1000], bug=error)
            else:
                self.failures.clear(Part.SWEEP)

    # --- what is the matter -----------------------------------------------------------------------------------------

    def problem(self) -> str:
        """Why engines cannot attach now, empty if they can."""
        return "; ".join(
            finding.message
            for finding in self.findings()
            if finding.type == RegionCondition.READY and not finding.holds
        )

    def findings(self) -> list[Finding]:
        """The daemon's own conditions as they are now."""
        holders = ""
        if self.running is not None and self.running.region.extents.num_above_capacity:
            holders = describe_holders(self.running.registry.engines.values())
        return build_findings(
            Situation(
                spec=self.source.spec,
                region=self.running.region if self.running else None,
                region_problem=self._region_problem,
                pages_problem=self._pages_problem,
                holders=holders,
                is_stopping=self.stopping.is_set(),
                has_attacher=bool(self.running and self.running.server.attachers),
                needs_attacher=self.settings.region_file is None,
                failures=self.failures.lasting(),
            ),
            self.paths,
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Tell everybody, take no more, and wait a little for writes under way."""
        if self.running is None:
            return
        registry, server, region = self.running.registry, self.running.server, self.running.region
        registry.drain("the node daemon stops; it is back soon if it is only being updated")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                while any(  # noqa: ASYNC110 - a seal sets no event: the hot path is for engines
                    tenant.index.has_assigned_writes for tenant in region.extents.tenants.values()
                ):
                    await asyncio.sleep(DRAIN_LOOK_SECONDS)
        server.close_pods()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        if self.source.client is not None:
            self.source.client.watching.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        keep, why = await self._must_keep_files()
        log.info("stopping: the files are %s (%s)", "kept" if keep else "unlinked", why)
        if self.running is not None:
            if not keep:
                await self._give_back_pages(self.running)
            self.running.registry.close()
            self.running.region.close()
        try:
            self._leave_files(keep=keep)
        except OSError as error:
            log.error("some files are left: %s", self._state.explain(error))

    def _leave_files(self, *, keep: bool) -> None:
        if not keep:
            remove_region(region_folder(self.settings.hugepages, self.settings.pool), self.settings.state)
        elif self.source.is_deleted:
            release_region(self.settings.state)
        if self.source.is_deleted or not keep:
            self._state.forget_last()

    async def _give_back_pages(self, running: Running) -> None:
        """Engines unmap what they have; pages of those that do not answer go when they end."""
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await running.region.extents.give_back_all()
        except TimeoutError:
            log.warning("some engines still map the region: its pages are free when they end")

    async def _must_keep_files(self) -> tuple[bool, str]:
        if self.source.spec is not None and self.source.spec.reclaim_policy is ReclaimPolicy.RETAIN:
            return True, "reclaimPolicy is Retain"
        if self.source.is_deleted:
            return False, "the region is deleted"
        if self.source.client is None:
            return True, "no API server is configured"
        return await asyncio.to_thread(self.source.client.must_keep_files, self.source.uid)
