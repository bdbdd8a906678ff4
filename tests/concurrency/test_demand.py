"""Memory follows demand: between models, tenants and namespaces with quotas, and with the capacity."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest

from byte_engine import key_of
from daemon_process import DaemonProcess, wait_until
from kvoffload.errors import DaemonUnavailable
from small_pool import CAPACITY_BYTES, NUM_SLOTS, attach, fill, hits, start


@pytest.mark.hugepages
def test_a_pool_filled_by_one_model_is_given_to_another_of_the_same_tenant(mount: Path, folder: Path) -> None:
    with start(folder, mount) as daemon:
        path = daemon.attach("pod")
        first, second = attach(path, "a"), attach(path, "b", part_bytes=49152, identity=2)
        fill(first, NUM_SLOTS, salt=1)
        keys = fill(second, 120, salt=2)
        assert hits(second, keys) == 120
        assert daemon.metrics()['kvoffload_evicted_bytes_total{reason="ExtentMoved"}'] > 0
        first.close()
        second.close()


@pytest.mark.hugepages
def test_a_pool_filled_by_one_tenant_is_given_to_another_after_it_let_go(mount: Path, folder: Path) -> None:
    with start(folder, mount, sharing="Namespace") as daemon:
        first = attach(daemon.attach("a", namespace="one"), "a")
        keys = fill(first, NUM_SLOTS, salt=1)
        held = [offset for offset in first.lookup(keys[-4:]) if offset >= 0]
        second = attach(daemon.attach("b", namespace="two"), "b")
        others = [key_of(number, salt=2) for number in range(100)]
        deadline = time.monotonic() + 30
        while hits(second, others) < 100:
            assert time.monotonic() < deadline, "the first tenant's extents did not come over"
            missing = [key for key in others if hits(second, [key]) == 0]
            if missing:
                second.store(missing[:16])
            first.acknowledge_revocations()
        first.check_held()
        first.unpin(held)
        assert second.lookup(keys[-4:]) == [-1] * 4
        first.close()
        second.close()


@pytest.mark.hugepages
def test_a_pod_that_shares_with_nobody_leaves_nothing_behind(mount: Path, folder: Path) -> None:
    with start(folder, mount, sharing="Pod") as daemon:
        first, second = attach(daemon.attach("a"), "x"), attach(daemon.attach("b"), "x")
        keys = fill(first, 32, salt=1)
        assert second.lookup(keys[:4]) == [-1] * 4
        files = set((mount / f"kvoffload-{daemon.pool}").iterdir())
        first.close()
        first.regions.clear()
        second.close()
        second.regions.clear()
        daemon.detach("a")
        daemon.detach("b")
        wait_until(lambda: not list((mount / f"kvoffload-{daemon.pool}").iterdir()))
        assert len(files) == 2
        # counted on without it: a counter that falls would be a reset for Prometheus
        assert daemon.metrics()['kvoffload_evicted_bytes_total{reason="TenantGone"}'] == 32 * 65536
        assert daemon.metrics()["kvoffload_prefault_ratio"] == 0


@pytest.mark.hugepages
def test_a_tenant_that_does_not_let_go_loses_nothing_and_holds_nobody_else_up(mount: Path, folder: Path) -> None:
    with start(folder, mount, sharing="Namespace") as daemon:
        stuck = attach(daemon.attach("a", namespace="one"), "a")
        fill(stuck, NUM_SLOTS, salt=1)
        needy = attach(daemon.attach("b", namespace="two"), "b")
        for _ in range(30):
            assert needy.reserve_and_return(4) == []
        assert hits(needy, [key_of(1)]) == 0
        stuck.close()
        wait_until(lambda: len(needy.reserve_and_return(4)) == 4)
        needy.close()


@pytest.mark.hugepages
def test_a_namespace_at_its_limit_replaces_its_own_and_a_guarantee_is_never_taken(mount: Path, folder: Path) -> None:
    quotas = [
        {"namespace": "small", "guaranteedBytes": 0, "limitBytes": 32 * 65536},
        {"namespace": "safe", "guaranteedBytes": 64 * 65536, "limitBytes": CAPACITY_BYTES},
    ]
    with start(folder, mount, quotas=quotas) as daemon:
        safe = attach(daemon.attach("s", namespace="safe"), "s")
        kept = fill(safe, 64, salt=1)
        small = attach(daemon.attach("t", namespace="small"), "t")
        keys = fill(small, 80, salt=2)
        assert hits(small, keys) == 32
        greedy = attach(daemon.attach("g", namespace="greedy"), "g")
        fill(greedy, 2 * NUM_SLOTS, salt=3)
        assert hits(safe, kept) == 64
        for engine in (safe, small, greedy):
            engine.close()


@pytest.mark.hugepages
def test_a_capacity_that_changed_keeps_the_cache_and_gives_back_what_is_above_it(mount: Path, folder: Path) -> None:
    with start(folder, mount) as daemon:
        path = daemon.attach("pod")
        engine = attach(path, "a")
        keys = fill(engine, NUM_SLOTS, salt=1)
        daemon.stop()
        daemon.spec["capacityBytes"] = CAPACITY_BYTES // 2
        daemon.start()
        engine.connect()

        def shrunk() -> bool:
            engine.acknowledge_revocations()
            return daemon.metrics()["kvoffload_prefault_ratio"] <= 1

        wait_until(shrunk)
        kept = hits(engine, keys)
        assert 0 < kept <= NUM_SLOTS // 2
        daemon.stop()
        daemon.spec["capacityBytes"] = CAPACITY_BYTES
        daemon.start()
        engine.connect()
        assert hits(engine, keys) == kept
        fill(engine, NUM_SLOTS - kept, salt=2)
        assert daemon.metrics()["kvoffload_prefault_ratio"] == 1
        engine.close()


@pytest.mark.hugepages
def test_a_smaller_capacity_says_on_whom_it_waits_until_that_one_lets_go(mount: Path, folder: Path) -> None:
    daemon = DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, mount=mount, from_api=True)
    api = daemon.api
    assert api is not None
    api.make_region("uid")
    api.start()
    with daemon:
        reader = attach(daemon.attach("reader", namespace="team"), "r")
        idle = attach(daemon.attach("idle"), "i")
        keys = fill(reader, NUM_SLOTS, salt=1)
        for at in range(0, NUM_SLOTS, 64):
            reader.lookup(keys[at : at + 64])
        api.make_region("uid", capacityBytes=CAPACITY_BYTES // 2)
        wait_until(lambda: f'"capacityBytes": {CAPACITY_BYTES // 2}' in (daemon.state / "region.json").read_text())
        daemon.stop()
        daemon.start()
        idle.connect()

        def said(reason: str, words: str) -> bool:
            for engine in (reader, idle):
                with contextlib.suppress(DaemonUnavailable):  # the reader has not yet connected again
                    engine.acknowledge_revocations()
            found = api.condition("Degraded")
            return found.get("reason") == reason and words in found["message"]

        wait_until(lambda: said("ShrinkWaits", "1 engine: pod team/reader engine r (has not said"), timeout_seconds=60)
        reader.connect()
        wait_until(lambda: said("ShrinkWaits", "wait for 1 engine: pod team/reader engine r ("), timeout_seconds=60)
        wait_until(lambda: said("ShrinkWaits", "extents); "), timeout_seconds=60)
        reader.check_held()
        reader.unpin(list(reader.held.pins))
        wait_until(lambda: said("AsAsked", ""), timeout_seconds=60)
        assert daemon.metrics()["kvoffload_prefault_ratio"] == 1
        reader.close()
        idle.close()
        daemon.kill()
    api.stop()


def host_of_two_nodes(folder: Path, *cpus: str, allowed: str) -> dict[str, str]:
    """The environment of a daemon that sees two NUMA nodes of these CPUs."""
    root = folder / "host"
    shutil.copytree(Path(__file__).parents[1] / "fixtures/sysfs/two-nodes-v2", root)
    for number, one in enumerate(cpus):
        (root / f"sys/devices/system/node/node{number}/cpulist").write_text(one)
    (root / "proc/self/status").write_text(f"Cpus_allowed_list:\t{allowed}\n")
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("boot")
    return {"KVOFFLOAD_HOST_ROOT": str(root)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_extents_are_given_to_two_numa_nodes_in_turn(folder: Path) -> None:
    first, second = (str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2])
    with start(folder, None, host_of_two_nodes(folder, first, second, allowed=f"{first},{second}")) as daemon:
        engine = attach(daemon.attach("pod"), "a")
        fill(engine, NUM_SLOTS, salt=1)
        given = [daemon.metrics()[f'kvoffload_numa_extents{{numa_node="{node}"}}'] for node in (0, 1)]
        assert given[0] == given[1] > 0
        assert "come from any NUMA node" not in daemon.log
        engine.close()


@pytest.mark.parametrize(
    ("allowed", "words"),
    [("0", "NUMA nodes that the daemon has no CPU of: [1] of 2"), ("0,1000", "extent's pages come from any NUMA node")],
)
def test_a_numa_node_that_the_daemon_cannot_run_on_is_a_message_and_no_failure(
    folder: Path, allowed: str, words: str
) -> None:
    with start(folder, None, host_of_two_nodes(folder, "0", "1000", allowed=allowed)) as daemon:
        engine = attach(daemon.attach("pod"), "a")
        fill(engine, NUM_SLOTS, salt=1)
        assert words in daemon.log
        engine.close()
