"""The local cluster gives back what it took, mends what is half there, and does nothing when it runs."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hack.cluster import lifecycle, machine, processes
from hack.cluster.settings import ClusterSettings

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

# beside the cluster that the other tests use
SETTINGS = ClusterSettings(name="kvo-t", node_subnet="172.30.9", pod_subnet="10.246.0", num_hugepages=4)


def observe_machine():
    """Everything on this machine that has the cluster's name, its addresses or one of its kinds of mount."""
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    mounts = [str(path) for path in machine.read_mount_points()]
    return {
        "mounts": [path for path in mounts if SETTINGS.name in path or path in ("/dev/hugepages", "/run/netns")],
        "routes": [route for route in routes if SETTINGS.node_subnet in route or SETTINGS.pod_subnet in route],
        "namespace": SETTINGS.namespace_path.exists(),
        "cgroups": [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{SETTINGS.name}")],
        "run": SETTINGS.run.exists(),
        "state": [path.name for path in SETTINGS.state.glob("*") if path.name != "logs"],
    }


@pytest.fixture
def own_cluster(stage):
    """A cluster of this test's own, while the shared one runs; it is taken down whatever happens."""
    del stage  # the shared one is up before we look at the machine
    before = observe_machine()
    lifecycle.up(SETTINGS)
    yield
    lifecycle.down(SETTINGS)
    assert observe_machine() == before


def test_a_killed_program_is_started_again_the_rest_is_left_alone_and_down_gives_all_back(own_cluster):
    names = (*lifecycle.CONTROL_PLANE, *lifecycle.NODE)
    running = {name: pid for name in names if (pid := processes.find_running(name, SETTINGS)) is not None}
    assert list(running) == list(names)
    lifecycle.up(SETTINGS)
    assert {name: processes.find_running(name, SETTINGS) for name in names} == running
    os.kill(running["kubelet"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while processes.find_running("kubelet", SETTINGS) is not None:
        assert time.monotonic() < deadline
    lifecycle.up(SETTINGS)
    mended = {name: pid for name in names if (pid := processes.find_running(name, SETTINGS)) is not None}
    assert list(mended) == list(names)
    assert {name for name in names if mended[name] != running[name]} == {"kubelet"}
    pages = machine.read_hugepages("nr")
    lifecycle.down(SETTINGS)
    assert machine.read_hugepages("nr") == pages - SETTINGS.num_hugepages
    assert [name for name in names if processes.find_running(name, SETTINGS) is not None] == []
    assert all(processes.read_start_time(pid) is None for pid in mended.values())
