"""The node daemon: puts the parts together, runs them, stops them.

Runs as `python -m kvoffload_node daemon`, one for each pool and node.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal

from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import PagesUnavailable, RegionUnusable
from kvoffload.protocol.messages import Drain
from kvoffload_node.region.hugetlbfs import read_mount
from kvoffload_node.region.region import Region
from kvoffload_node.session.locks import Attachments
from kvoffload_node.session.registry import SWEEP_SECONDS, Registry
from kvoffload_node.session.server import Server
from kvoffload_node.settings import NodeSettings

log = logging.getLogger(__name__)

RESERVE_RETRY_SECONDS = 5.0


class Daemon:
    """One pool's daemon on this node."""

    def __init__(self, settings: NodeSettings, spec: KVOffloadRegionSpec) -> None:
        """Open the region. Raises RegionUnusable."""
        self.settings = settings
        self._state_lock = _lock_folder(settings)
        boot_id = (settings.host_root / "proc/sys/kernel/random/boot_id").read_text().strip()
        self.region = Region(
            spec,
            mount=read_mount(settings.hugepages),
            state_folder=settings.state,
            boot_id=boot_id,
            revoke=lambda tenant, positions: self.registry.revoke(tenant, positions),
        )
        self.registry = Registry(
            region=self.region,
            attachments=Attachments(settings.state / "attachments"),
            quarantine_seconds=settings.quarantine_seconds,
        )
        self.registry.recover()
        self.server = Server(self.registry, settings.handoff_socket)
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        gc.freeze()  # slots are many and without cycles: the collector need not walk them
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.server.run()),
                group.create_task(self.region.extents.run()),
                group.create_task(self._sweep()),
                group.create_task(self._reserve()),
            ]
            await self.stopping.wait()
            await self._drain()
            for task in tasks:
                task.cancel()
        self.region.close(unlink=await self._must_unlink())

    async def _reserve(self) -> None:
        while True:
            try:
                self.region.reserve_pages()
                log.info("%d bytes of pages are reserved", self.region.span_bytes)
                return
            except PagesUnavailable as error:
                log.warning("pages are not available: %s", error)
                await asyncio.sleep(RESERVE_RETRY_SECONDS)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.registry.sweep()

    async def _drain(self) -> None:
        """Tell everybody, take no more, and wait a little for writes under way."""
        self.registry.draining = "the node daemon stops; it is back soon if it is only being updated"
        for connection in list(self.registry.connections):
            connection.send(Drain(self.registry.draining))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                while any(tenant.index.has_assigned_writes for tenant in self.region.extents.tenants.values()):
                    await asyncio.sleep(0.02)
        self.server.close_pods()

    async def _must_unlink(self) -> bool:
        return False


def _lock_folder(settings: NodeSettings) -> int:
    """One daemon for one state folder. Raises RegionUnusable."""
    settings.state.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(settings.state / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RegionUnusable(f"another daemon runs on {settings.state}; one daemon serves a pool on a node") from error
    return descriptor
