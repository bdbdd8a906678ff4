"""A release of the chart that a test may break: namespace and pool of its own, and no other release beside it.

Requests that it gets refused are its own: `test_rbac_use.py` looks at the release that the other tests share.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster import machine
from hack.demo import run as demo
from hack.demo.installation import DAEMON_SELECTOR, create_pool, install_chart, read_region, uninstall_chart
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage
from hack.demo.servers import NAMESPACE as USERS
from hack.demo.servers import find_pod_processes

POOL = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {{name: {name}}}
spec: {{capacity: 64Mi, pageSize: 2Mi}}
"""


@dataclass(frozen=True, slots=True)
class OwnRelease:
    """The release `name` and its pool of that name."""

    stage: Stage
    name: str
    free_pages_before: int
    """On the node, before the pool was made."""

    @property
    def kubernetes(self) -> Kubernetes:
        return self.stage.kubernetes

    @property
    def namespace(self) -> str:
        return f"{self.name}-system"

    @property
    def files(self) -> Path:
        """The pool's folder on the node's hugetlbfs."""
        return machine.HUGETLBFS / f"kvoffload-{self.name}"

    def install(self, *values: str) -> None:
        """Install it, upgrade it, or bring back what is missing of it; returns when operator and webhook are ready."""
        install_chart(self.kubernetes, self.stage.images, *values, release=self.name, namespace=self.namespace)

    def make_pool(self) -> None:
        """Make its pool, unless it is there, and wait until it is Ready."""
        create_pool(self.kubernetes, POOL.format(name=self.name), name=self.name)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Pods of `operator`, `webhook` or `node`."""
        return self.kubernetes.pods(namespace=self.namespace, selector=f"app.kubernetes.io/component={component}")

    def daemon(self) -> dict[str, Any]:
        """The pod of its daemon."""
        (pod,) = self.pods("node")
        return pod

    def daemon_process(self) -> int:
        """Process id of the daemon that runs in that pod."""
        processes = find_pod_processes(self.daemon())
        (pid,) = [pid for pid, command in processes.items() if command.endswith("kvoffload_node daemon")]
        return pid

    def region(self) -> dict[str, Any]:
        """The region object of the one node."""
        return read_region(self.kubernetes, pool=self.name)

    def remove(self) -> None:
        """Remove everything of it that is there, and the pods that opted in to its pool."""
        kubernetes, selector = self.kubernetes, f"--selector=kvoffload.io/pool={self.name}"
        kubernetes.kubectl("delete", "deployments,replicasets,pods", f"--namespace={USERS}", selector, "--wait=true")
        if kubernetes.is_known("kvpool"):
            kubernetes.delete("kvpool", self.name)
        daemons = [f"--selector={DAEMON_SELECTOR}={self.name}", f"--namespace={self.namespace}", "--timeout=90s"]
        kubernetes.kubectl("delete", "daemonsets", *daemons)  # an operator that was taken away deletes none
        kubernetes.kubectl("wait", "--for=delete", "pods", *daemons)
        uninstall_chart(kubernetes, release=self.name, namespace=self.namespace)
        kubernetes.delete("namespace", self.namespace)


@contextlib.contextmanager
def own_release(stage: Stage, name: str) -> Iterator[OwnRelease]:
    """The place for a release of that name; the shared one is removed first, this one at the end."""
    demo.remove_leftovers(stage)
    uninstall_chart(stage.kubernetes)
    OwnRelease(stage, name, 0).remove()  # what a run that was killed left
    release = OwnRelease(stage, name, machine.read_hugepages("free"))
    yield release
    release.remove()
