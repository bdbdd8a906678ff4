"""An engine that the API does not take, for whatever reason, keeps nobody else out of the region's status."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffload.api.region import KVOffloadRegionStatus
from kvoffload_node import status_writer
from kvoffload_node.daemon import Daemon
from kvoffload_node.failures import Part
from kvoffload_node.session.engines import SCHEDULER, Engine, Session


class Told:
    """Where the daemon's statuses go."""

    def __init__(self) -> None:
        self.statuses: asyncio.Queue[KVOffloadRegionStatus] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def apply_status(self, status: KVOffloadRegionStatus) -> None:
        self._loop.call_soon_threadsafe(self.statuses.put_nowait, status)


@pytest.fixture
def daemon(daemon: Daemon) -> Iterator[Daemon]:
    """The one of conftest.py, with its region open."""
    daemon.running = daemon._open()
    yield daemon
    daemon.running.registry.close()
    daemon.running.region.close()


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
    monkeypatch.setattr(status_writer, "LOOK_SECONDS", 0.01)
    told = Told()
    daemon.source.client = told  # type: ignore[assignment]
    engine = add_engine(daemon, "x" * 129)
    reporting = asyncio.create_task(status_writer.StatusWriter(daemon).run())
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
