"""What pods say of themselves, whatever it is, ends neither the daemon nor the status of the others' engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_process import DaemonProcess, TestEngine, wait_until
from kvoffload.protocol.messages import Report
from small_pool import CAPACITY_BYTES

REPORT_SECONDS = 60.0
MOST_BYTES = 2**53
"""The most that one `Report` may say."""


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, from_api=True)
    assert daemon.api is not None
    daemon.api.make_region("first")
    daemon.api.start()
    with daemon:
        yield daemon
        daemon.kill()
    daemon.api.stop()


def listed(daemon: DaemonProcess) -> list[tuple[str, str, int]]:
    """Pod, engine and ranks of the status as it was last told."""
    assert daemon.api is not None
    engines = daemon.api.statuses[-1]["engines"] if daemon.api.statuses else []
    return [(engine["podName"], engine["engineID"], engine["tensorParallelSize"]) for engine in engines]


def test_a_pod_that_says_it_loaded_more_than_the_api_can_count_ends_nothing(daemon: DaemonProcess) -> None:
    assert daemon.api is not None
    assert daemon.process is not None
    boaster, other = (TestEngine(daemon.attach(pod), engine_id=pod) for pod in ("boaster", "other"))
    for _ in range(2**60 // MOST_BYTES + 1):
        boaster.workers[0].send(Report(loaded_bytes=MOST_BYTES))
    boaster.workers[0].send(Report(note="boasted"))

    def told() -> list[int]:
        assert daemon.api is not None
        engines = daemon.api.statuses[-1]["engines"] if daemon.api.statuses else []
        return [engine["loadedBytes"] for engine in engines if engine["message"].endswith("boasted")]

    wait_until(lambda: bool(told()) or daemon.process is None or daemon.process.poll() is not None, REPORT_SECONDS)
    assert daemon.process.poll() is None, daemon.log
    assert told() == [2**60]
    assert {pod for pod, _, _ in listed(daemon)} == {"boaster", "other"}
    for engine in (boaster, other):
        engine.close()


def test_of_two_engines_of_one_id_in_a_pod_the_newer_one_is_listed(daemon: DaemonProcess) -> None:
    """Server-side apply takes no list with a key twice: the whole status would be refused."""
    assert daemon.api is not None
    path = daemon.attach("pod")
    older = TestEngine(path, engine_id="same", ranks=1, process=b"a" * 16)
    newer = TestEngine(path, engine_id="same", ranks=1, process=b"b" * 16)
    third = TestEngine(daemon.attach("other"), engine_id="same", ranks=2)
    wait_until(lambda: len(listed(daemon)) > 1, REPORT_SECONDS)
    wait_until(lambda: ("other", "same", 2) in listed(daemon), REPORT_SECONDS)
    assert sorted(listed(daemon)) == [("other", "same", 2), ("pod", "same", 1)]
    assert daemon.api.statuses[-1]["enginesAttached"] == 3
    for engine in (older, newer, third):
        engine.close()
