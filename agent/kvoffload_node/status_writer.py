"""When the region's status is worth a write to the API server: what is said changed, or its figures are old.

Runs in the node daemon, one task of `daemon.py`. `status.py` builds it, `report.py` writes it. Nothing that fails here
ends the task: the daemon serves, whatever it cannot tell.
"""

import asyncio
import contextlib
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvoffload.api.region import KVOffloadRegionStatus
from kvoffload.errors import KVOffloadError
from kvoffload_node.failures import Part
from kvoffload_node.session.engines import Engine
from kvoffload_node.status import build_status

if TYPE_CHECKING:
    from kvoffload_node.daemon import Daemon

log = logging.getLogger(__name__)

FIGURES_SECONDS = 30.0
"""How often figures alone are worth a write to the API server; conditions and engines are written when they change."""
LOOK_SECONDS = 2.0
RETRY_SECONDS = 5.0


class StatusWriter:
    """See the module's docstring."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    async def run(self) -> None:
        """Until the daemon stops: the last status says so."""
        daemon = self._daemon
        last: object = None
        last_at = 0.0
        loop = asyncio.get_running_loop()
        is_last = False
        while not is_last:
            await self._wait_for_stop(LOOK_SECONDS)
            is_last = daemon.stopping.is_set()  # the last status says that the daemon stops: nobody sees a stale Ready
            source = daemon.source
            if source.client is None or source.spec is None or source.is_deleted:
                continue
            try:
                status, is_whole = self._build_status()
                urgent = (
                    [(c.type, c.status, c.reason, c.message) for c in status.conditions],
                    [(e.pod_uid, e.engine_id, e.confirmed_layout, e.message) for e in status.engines],
                    status.observed_generation,
                )
                if urgent == last and loop.time() - last_at < FIGURES_SECONDS:
                    continue
                await asyncio.to_thread(source.client.apply_status, status)
                last, last_at = urgent, loop.time()
                if is_whole:
                    daemon.failures.clear(Part.STATUS)
            except KVOffloadError as error:
                log.warning("the status could not be written: %s", error)
                await self._wait_for_stop(RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - the daemon serves, whatever it cannot tell
                daemon.failures.note(Part.STATUS, f"the status cannot be told: {error!r}"[:1000], bug=error)
                await self._wait_for_stop(RETRY_SECONDS)

    def _build_status(self) -> tuple[KVOffloadRegionStatus, bool]:
        """With every engine, or where that fails without any: no engine keeps the conditions from being told. And
        whether it has all."""
        running = self._daemon.running
        engines = list(running.registry.engines.values()) if running else []
        try:
            return self._build_status_of(engines), True
        except Exception as error:  # noqa: BLE001 - as above
            words = f"the status is told without its {len(engines)} engines, a bug of this daemon: {error!r}"
            self._daemon.failures.note(Part.STATUS, words[:1000], bug=error)
            return self._build_status_of([]), False

    def _build_status_of(self, engines: list[Engine]) -> KVOffloadRegionStatus:
        daemon, running = self._daemon, self._daemon.running
        return build_status(
            previous=daemon.source.conditions,
            generation=daemon.source.generation,
            figures=running.region.figures() if running else None,
            findings=daemon.findings(),
            engines=engines,
            epoch=running.region.epoch if running else 0,
            now=datetime.now(UTC),
        )

    async def _wait_for_stop(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._daemon.stopping.wait(), seconds)
