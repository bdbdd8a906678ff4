"""The daemon and its KVOffloadRegion: one that was deleted, or deleted and made again, while no daemon was there; an
API server that is away; the last word of a daemon that stops.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_engine import ByteEngine, key_of
from daemon_process import DaemonProcess, wait_until
from kvoffload.protocol.messages import Drain
from kvoffload_engine import plugin
from kvoffload_engine.environment import SOCKET_VARIABLE
from stub_vllm import install

CAPACITY_BYTES = 16 << 20
REPORT_SECONDS = 60.0
"""How long a test waits for a status: 3 s on a quiet machine, most of them the Kubernetes client's import, which takes
a second of CPU; at a load of 14 on two CPUs 20 s were too few."""
KEYS = [key_of(number) for number in range(8)]


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    """Serves the region of uid `first`."""
    environment = {"KVOFFLOAD_DRAIN_SECONDS": "0.5"}
    daemon = DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, environment=environment, from_api=True)
    assert daemon.api is not None
    daemon.api.make_region("first")
    daemon.api.start()
    with daemon:
        yield daemon
        daemon.kill()
    daemon.api.stop()


def store(daemon: DaemonProcess) -> ByteEngine:
    """An engine that has stored KEYS and leases them."""
    engine = ByteEngine(daemon.attach("pod"), "engine")
    engine.connect()
    engine.wait_for_room(len(KEYS))
    engine.store(KEYS)
    wait_until(lambda: -1 not in engine.lookup(KEYS))
    return engine


def files(daemon: DaemonProcess) -> list[Path]:
    return [*daemon.mount.glob(f"kvoffload-{daemon.pool}/*"), *daemon.state.glob("tenant-*")]


def wait_for_end(daemon: DaemonProcess) -> None:
    assert daemon.process is not None
    assert daemon.process.wait(REPORT_SECONDS) == 0, daemon.log
    daemon.process = None


def test_a_region_that_is_deleted_while_no_daemon_runs_leaves_nothing_and_a_reader_keeps_its_bytes(
    daemon: DaemonProcess,
) -> None:
    assert daemon.api is not None
    engine = store(daemon)
    daemon.kill()
    daemon.api.region = None
    daemon.start()
    wait_for_end(daemon)
    assert files(daemon) == []
    assert not (daemon.state / "region.json").exists()
    engine.check_held()
    engine.close()


@pytest.mark.parametrize("retained", [False, True])
def test_a_pool_made_again_under_its_name_has_what_was_retained_and_nothing_else(
    daemon: DaemonProcess, retained: bool
) -> None:
    assert daemon.api is not None
    if retained:
        daemon.api.make_region("first", reclaimPolicy="Retain")
        daemon.kill()
        daemon.start()
    engine = store(daemon)
    epoch = engine.epoch
    daemon.kill()
    daemon.api.make_region("second", capacityBytes=2 * CAPACITY_BYTES)
    daemon.start()
    wait_for_end(daemon)
    assert bool(files(daemon)) == retained
    engine.check_held()
    daemon.start()
    other = ByteEngine(daemon.folder / "pods/pod.sock", "other")
    other.connect()
    assert [offset >= 0 for offset in other.lookup(KEYS)] == [retained] * len(KEYS)
    assert other.epoch > epoch, "an epoch that was used before would make slots of the old file look like new ones"
    other.wait_for_room(len(KEYS))
    assert other.scheduler is not None
    assert other.scheduler.welcome.region_bytes == 2 * CAPACITY_BYTES, "the capacity is the old pool's"
    other.close()
    engine.close()


def test_a_stopped_daemon_whose_region_was_made_again_keeps_no_files_for_it(daemon: DaemonProcess) -> None:
    assert daemon.api is not None
    engine = store(daemon)
    daemon.api.stop()  # the daemon does not hear of it before it is told to stop
    daemon.api.make_region("second")
    engine.close()
    assert daemon.process is not None
    daemon.api.start()
    daemon.process.terminate()
    wait_for_end(daemon)
    assert files(daemon) == []


def test_files_of_a_pool_that_only_observes_now_go_with_its_region(daemon: DaemonProcess) -> None:
    api = daemon.api
    assert api is not None
    store(daemon).close()
    api.make_region("first", mode="Observe")
    wait_until(lambda: api.condition("Ready").get("reason") == "Observing", timeout_seconds=REPORT_SECONDS)
    daemon.stop()
    assert files(daemon) != []
    api.statuses.clear()
    daemon.pods_are_gone()
    daemon.start()
    wait_until(lambda: api.condition("Ready").get("reason") == "Observing", timeout_seconds=REPORT_SECONDS)
    api.region = None
    wait_for_end(daemon)
    assert files(daemon) == []


def test_a_daemon_that_cannot_ask_serves_what_it_served_last(daemon: DaemonProcess) -> None:
    assert daemon.api is not None
    store(daemon).close()
    daemon.kill()
    daemon.api.stop()
    daemon.api.region = None
    daemon.start()
    engine = ByteEngine(daemon.folder / "pods/pod.sock", "again")
    engine.connect()
    assert -1 not in engine.lookup(KEYS)
    daemon.api.start()  # now it can be asked, and says that the region is deleted
    assert engine.scheduler is not None
    engine.scheduler.wait_for(Drain, 30)
    wait_for_end(daemon)
    engine.check_held()
    engine.close()


def test_a_capacity_that_changed_while_no_daemon_ran_is_had_after_one_more_restart(daemon: DaemonProcess) -> None:
    api = daemon.api
    assert api is not None
    store(daemon).close()
    daemon.kill()
    api.make_region("first", capacityBytes=2 * CAPACITY_BYTES)
    daemon.start()
    wait_for_end(daemon)
    api.statuses.clear()
    daemon.start()
    wait_until(lambda: api.condition("Ready").get("status") == "True", timeout_seconds=REPORT_SECONDS)
    assert api.statuses[-1]["capacityBytes"] == 2 * CAPACITY_BYTES
    engine = ByteEngine(daemon.folder / "pods/pod.sock", "again")
    engine.connect()
    assert -1 not in engine.lookup(KEYS)
    engine.close()


def test_a_daemon_that_is_told_to_stop_says_so_before_it_ends(daemon: DaemonProcess) -> None:
    assert daemon.api is not None
    api = daemon.api
    daemon.kill()
    api.statuses.clear()
    daemon.environment["KVOFFLOAD_DRAIN_SECONDS"] = "10"  # of which its last word needs milliseconds
    daemon.start()
    wait_until(lambda: api.condition("Ready").get("status") == "True", timeout_seconds=REPORT_SECONDS)
    daemon.stop()
    ready = daemon.api.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Draining")
    assert "told to stop" in ready["message"]


def told(daemon: DaemonProcess) -> list[tuple[str, str, str]]:
    """The engines of the status, as it was last told."""
    assert daemon.api is not None
    engines = daemon.api.statuses[-1].get("engines", []) if daemon.api.statuses else []
    return [(engine["confirmedLayout"], engine["reason"], engine["message"]) for engine in engines]


def test_an_engine_that_runs_without_offload_tells_a_restarted_daemon_why(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = daemon.api
    assert api is not None
    monkeypatch.setenv(SOCKET_VARIABLE, str(daemon.attach("pod")))
    monkeypatch.setattr(plugin, "_telling", [])
    plugin.leave_alone("MultiNode", "the engine spans 2 nodes, needed 1")
    expected = [("left-alone", "MultiNode", "MultiNode: the engine spans 2 nodes, needed 1")]
    try:
        wait_until(lambda: told(daemon) == expected, timeout_seconds=REPORT_SECONDS)
        daemon.kill()
        api.statuses.clear()
        daemon.start()
        wait_until(lambda: told(daemon) == expected, timeout_seconds=REPORT_SECONDS)
    finally:
        for connector in plugin._telling:
            connector.close()


@pytest.mark.parametrize(
    ("version", "reason", "message"),
    [
        ("0.34.0", "UnsupportedVersion", "vLLM 0.34.0 is not supported, needed 0.28 to 0.33"),
        ("0.32.0", "MissingName", "this vLLM has no vllm.v1.kv_offload.base.LookupResult.RETRY"),
    ],
    ids=["a vLLM of tomorrow", "a vLLM that lacks a name"],
)
def test_what_the_plugin_decides_stands_in_the_status_once(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, version: str, reason: str, message: str
) -> None:
    arguments = install(monkeypatch, daemon.attach("pod"))
    sys.modules["vllm"].__version__ = version
    del sys.modules["vllm.v1.kv_offload.base"].LookupResult.RETRY
    monkeypatch.setattr(plugin, "_telling", [])
    plugin.register()
    try:
        for _ in range(2):  # as in the API server and the engine core
            assert arguments().create_engine_config().kv_transfer_config is None
        wait_until(lambda: told(daemon) != [], timeout_seconds=REPORT_SECONDS)
        ((layout, said, words),) = told(daemon)
        assert (layout, said) == ("left-alone", reason)
        assert words.startswith(f"{reason}: {message}")
        assert daemon.api is not None
        assert daemon.api.statuses[-1]["engines"][0]["model"] == "stub"
    finally:
        for connector in plugin._telling:
            connector.close()


def test_a_region_of_a_newer_operator_is_said_and_does_not_deafen_the_daemon(daemon: DaemonProcess) -> None:
    api = daemon.api
    assert api is not None
    wait_until(lambda: api.condition("Ready").get("status") == "True", timeout_seconds=REPORT_SECONDS)
    api.make_region("first", numaPolicy="OfTomorrow")
    wait_until(lambda: api.condition("Degraded").get("reason") == "DaemonImpaired", timeout_seconds=REPORT_SECONDS)
    assert "OfTomorrow" in api.condition("Degraded")["message"]
    assert "update the node's image" in api.condition("Degraded")["message"]
    assert api.condition("Ready")["status"] == "True", "what it knows it serves"
    api.make_region("first", mode="Paused")
    wait_until(lambda: api.condition("Ready").get("reason") == "Paused", timeout_seconds=REPORT_SECONDS)
    assert api.condition("Degraded")["reason"] != "DaemonImpaired"
