"""What the daemon is asked: the region's spec, from the KVOffloadRegion, a file, or what was served last.

Runs in the node daemon's event loop, owned by `daemon.py`. The API server's words come in a thread of `report.py`.

    last spec in the state folder ──> served until the API server is asked
    KVOffloadRegion, or a file    ──> each spec that is another one ──> kept for the next start, `on_spec`
                                  ──> the API server's first word    ──> `on_first_word`
                                  ──> deleted, or of another uid     ──> `is_deleted`, `on_end`
"""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.api.conditions import Condition
from kvoffload.api.region import KVOffloadRegion, KVOffloadRegionSpec
from kvoffload.errors import KVOffloadError
from kvoffload_node.failures import Failures, Part
from kvoffload_node.settings import NodeSettings
from kvoffload_node.state_folder import StateFolder

if TYPE_CHECKING:
    from kvoffload_node.report import RegionClient

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
FILE_SECONDS = 0.1
"""How often a spec that comes from a file is read again."""


class SpecSource:
    """The spec as it is known now."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        state: StateFolder,
        failures: Failures,
        on_spec: Callable[[KVOffloadRegionSpec], None],
        on_first_word: Callable[[KVOffloadRegionSpec], None],
        on_end: Callable[[], None],
    ) -> None:
        self.spec: KVOffloadRegionSpec | None = None
        self.changed = asyncio.Event()
        """Set with each spec that is another one."""
        self.uid = ""
        """Of the KVOffloadRegion that the spec is of; empty where there is no API server."""
        self.generation = 0
        self.conditions: list[Condition] = []
        """Of the KVOffloadRegion, whoever set them, as of the last word."""
        self.is_deleted = False
        self.client: RegionClient | None = None
        """None where there is no API server, and until its library is loaded."""
        self._settings = settings
        self._state = state
        self._failures = failures
        self._on_spec, self._on_first_word, self._on_end = on_spec, on_first_word, on_end
        self._is_told = False
        """Whether the API server has answered since the start."""
        self._keep_again: asyncio.TimerHandle | None = None
        """Until the state folder has taken the spec."""

    async def follow(self) -> None:
        """Take every spec that comes, until cancelled."""
        if self._settings.region_file is not None:
            await self._follow_file(self._settings.region_file)
            return
        if (last := self._state.read_last()) is not None:  # serve that before the API server is asked
            self.uid, spec = last
            self.take_spec(spec)
        loop = asyncio.get_running_loop()

        def on_unreadable(why: str) -> None:
            loop.call_soon_threadsafe(self._note_region, why)

        def on_region(region: KVOffloadRegion | None) -> None:
            loop.call_soon_threadsafe(self._take_region, region)

        while True:
            try:
                client = await asyncio.to_thread(self._connect, on_unreadable)
                break
            except KVOffloadError as error:
                self._note_region(str(error))
                await asyncio.sleep(RETRY_SECONDS)
        client.follow(on_region)
        self.client = client
        await asyncio.Event().wait()

    def _connect(self, on_unreadable: Callable[[str], None]) -> "RegionClient":
        from kvoffload_node.report import RegionClient  # the client library takes a second to load: serve meanwhile

        return RegionClient(
            pool=self._settings.pool,
            node_name=self._settings.node_name,
            daemonset=self._settings.daemonset,
            namespace=self._settings.namespace,
            on_unreadable=on_unreadable,
        )

    def _note_region(self, why: str) -> None:
        if why:
            self._failures.note(Part.REGION_OBJECT, why)
        else:
            self._failures.clear(Part.REGION_OBJECT)

    async def _follow_file(self, path: Path) -> None:
        seen = ""
        while True:
            try:
                text = await asyncio.to_thread(path.read_text)
            except FileNotFoundError:
                self._take_region(None)
                return
            except OSError as error:
                self._note_region(f"{path} cannot be read: {error.strerror}")
                await asyncio.sleep(FILE_SECONDS)
                continue
            self._note_region("")
            if text != seen:
                seen = text
                self.take_spec(KVOffloadRegionSpec.model_validate(json.loads(text)))
            await asyncio.sleep(FILE_SECONDS)

    def _take_region(self, region: KVOffloadRegion | None) -> None:
        """What the API server (or the file) says now; None: there is none.

        A region of another uid is a later one of the same name: the one that is served was deleted while nobody
        looked. It ends as any deleted region does, and the daemon's next start takes up the new one.
        """
        self._note_region("")
        is_another = region is not None and self.uid not in ("", region.uid)
        if region is None or region.deleting or is_another:
            if self.spec is not None and not self.is_deleted:
                why = f"another one has its name (uid {region.uid})" if region and is_another else "it is deleted"
                log.info("the region (uid %s) is no more, %s: draining, then giving the pages back", self.uid, why)
                self.is_deleted = True
                self._on_end()
            return
        self.uid = region.uid
        self.generation = region.generation
        self.conditions = list(region.status.conditions)
        self.take_spec(region.spec)
        if not self._is_told:
            self._is_told = True
            self._on_first_word(region.spec)

    def take_spec(self, spec: KVOffloadRegionSpec) -> None:
        """This is asked from now on."""
        if spec == self.spec:
            return
        self.spec = spec
        self._keep_spec()
        self._on_spec(spec)
        self.changed.set()

    def _keep_spec(self) -> None:
        """Write the spec down for the next start, now or as soon as the state folder takes it."""
        assert self.spec is not None
        if self._keep_again is not None:
            self._keep_again.cancel()
            self._keep_again = None
        if not self._state.write_last(self.uid, self.spec):
            self._keep_again = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._keep_spec)
