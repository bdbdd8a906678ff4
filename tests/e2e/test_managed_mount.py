"""`hugetlbfsMount: Managed` on the real node: its init container mounts a hugetlbfs, once, and the pool lives there."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster import machine
from hack.console import wait_until
from hack.demo.installation import DAEMON_SELECTOR, NAMESPACE, create_pool, delete_pool
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

NAME = "managed"
MOUNT = Path("/var/lib/kvoffload/mounts/2Mi")
POOL = f"""\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {{name: {NAME}}}
spec: {{capacity: 16Mi, pageSize: 2Mi, hugetlbfsMount: Managed}}
"""


def mounted() -> list[str]:
    """Types of what is mounted at the managed place, the oldest first."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [fields[2] for fields in lines if fields[1] == str(MOUNT)]


@pytest.fixture
def kubernetes(release: Stage) -> Iterator[Kubernetes]:
    yield release.kubernetes
    delete_pool(release.kubernetes, name=NAME)
    if mounted():
        subprocess.run(["umount", MOUNT], check=True)


def test_a_managed_pool_lives_on_a_mount_of_its_own_made_once_and_gives_its_pages_back(kubernetes: Kubernetes) -> None:
    assert mounted() == [], "left by somebody else"
    free = machine.read_hugepages("free")
    create_pool(kubernetes, POOL, name=NAME)
    assert mounted() == ["hugetlbfs"]
    assert (MOUNT / f"kvoffload-{NAME}").is_dir()
    selector = f"{DAEMON_SELECTOR}={NAME}"
    kubernetes.kubectl("delete", "pods", f"--namespace={NAMESPACE}", f"--selector={selector}", "--wait=true")
    kubernetes.wait_ready_pod(namespace=NAMESPACE, selector=selector, timeout_seconds=120)
    assert mounted() == ["hugetlbfs"], "the second daemon found the mount of the first"
    delete_pool(kubernetes, name=NAME)
    assert not (MOUNT / f"kvoffload-{NAME}").exists()
    wait_until(
        "the pages to be free again", lambda: machine.read_hugepages("free") == free, timeout_seconds=20,
        explain=lambda: f"{machine.read_hugepages('free')} of {free} are free",
    )  # fmt: skip
