"""An engine that the API does not take, for whatever reason, keeps nobody else out of the region's status."""

import asyncio
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.api.pool import Fallback, Sharing
from kvoffload.api.region import KVOffloadRegionSpec, KVOffloadRegionStatus
from kvoffload_node import daemon as daemon_module
from kvoffload_node.daemon import Daemon
from kvoffload_node.failures import Part
from kvoffload_node.session.engines import SCHEDULER, Engine, Session
from kvoffload_node.settings import NodeSettings

MOUNT = Path("/dev/shm")


class Told:
    """Where the daemon's statuses go."""

    def __init__(self) -> None:
        self.statuses: asyncio.Queue[KVOffloadRegionStatus] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def apply_status(self, status: KVOffloadRegionStatus) -> None:
        self._loop.call_soon_threadsafe(self.statuses.put_nowait, status)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    pool = f"test-{uuid.uuid4().hex[:12]}"
    daemon = Daemon(
        NodeSettings(pool=pool, node_name="n", state=tmp_path, hugepages=MOUNT, handoff=tmp_path, metrics_port=0)
    )
    daemon.source.spec = KVOffloadRegionSpec(
        pool_name=pool,
        node_name="n",
        capacity_bytes=16 << 20,
        page_size_bytes=2 << 20,
        fallback=Fallback.SHARED_MEMORY,
        sharing=Sharing.POOL,
    )
    daemon.running = daemon._open()
    yield daemon
    daemon.running.registry.close()
    daemon.running.region.close()
    shutil.rmtree(MOUNT / f"kvoffload-{pool}", ignore_errors=True)


def add_engine(daemon: Daemon, engine_id: str) -> Engine:
    assert daemon.running is not None
    pod = daemon.running.registry.add_pod("uid", "ns", "pod", "auto")
    engine = Engine(number=1, storer=1, world_size=1, pod=pod, engine_id=engine_id, identity=b"")
    connection: Any = object()
    engine.sessions[SCHEDULER] = Session(1, engine, SCHEDULER, b"", connection=connection)
    daemon.running.registry.engines[1] = engine
    return engine


async def test_a_status_that_cannot_be_built_is_told_without_engines_and_whole_again_later(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_module, "LOOK_SECONDS", 0.01)
    told = Told()
    daemon.source.client = told  # type: ignore[assignment]
    engine = add_engine(daemon, "x" * 129)
    reporting = asyncio.create_task(daemon._report())
    async with asyncio.timeout(20):
        status = await told.statuses.get()
        assert status.engines == []
        (degraded,) = [condition for condition in status.conditions if condition.type == "Degraded"]
        assert (degraded.status, degraded.reason) == ("True", "DaemonImpaired")
        assert "without its 1 engines" in degraded.message
        assert daemon.failures.counts[Part.STATUS] > 0
        engine.engine_id = "x"
        while not (status := await told.statuses.get()).engines:
            pass
        assert [one.engine_id for one in status.engines] == ["x"]
    assert not reporting.done()
    reporting.cancel()
    assert caplog.text.count("the status is told without") == 1
