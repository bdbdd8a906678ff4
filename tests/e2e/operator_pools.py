"""What the operator's tests do with pools: make them, be their kubelets and daemons, see what is left of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.control_plane import NAMESPACE, ControlPlane, report_regions, run_daemon_pods, wait_until

QUICK = {"resync_seconds": "3", "unattached_seconds": "2", "daemon_silence_seconds": "20"}
"""Settings that make the operator look again soon."""


def pool_manifest(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvoffload.io/v1alpha1",
        "kind": "KVOffloadPool",
        "metadata": {"name": name},
        "spec": {"capacity": "64Mi", **spec},
    }


@pytest.fixture
def make_pool(control_plane: ControlPlane) -> Iterator[Callable[..., str]]:
    """Makes pools; afterwards they are deleted and everything of theirs must be gone."""
    made: list[str] = []

    def make(name: str, **spec: Any) -> str:
        control_plane.apply(pool_manifest(name, **spec))
        made.append(name)
        return name

    yield make
    for name in made:
        control_plane.kubectl("delete", "kvpool", name, "--ignore-not-found")
    wait_until(lambda: not leftovers(control_plane, made), f"everything of {made} to be gone")


def leftovers(plane: ControlPlane, pools: list[str]) -> list[str]:
    """What is still there of pools: regions, DaemonSets, pods, node labels."""
    run_daemon_pods(plane)
    found = [
        f"{kind}/{one['metadata']['name']}"
        for kind, arguments in (("kvregion", []), ("daemonset", ["-n", NAMESPACE]), ("pod", ["-n", NAMESPACE]))
        for one in plane.get(kind, *arguments)["items"]
        if (one["metadata"].get("labels") or {}).get("kvoffload.io/daemon-of") in pools
    ]
    for node in plane.get("nodes")["items"]:
        labels = node["metadata"].get("labels", {})
        found += [f"{node['metadata']['name']}: {label}" for label in labels if label.rpartition("/")[2] in pools]
    return found


def condition(plane: ControlPlane, pool: str, type: str) -> dict[str, Any]:
    status = plane.get("kvpool", pool).get("status", {})
    return next((one for one in status.get("conditions", []) if one["type"] == type), {"status": "", "reason": ""})


def make_ready(plane: ControlPlane, pool: str, *, seconds: float = 90.0) -> float:
    """Be the kubelets and daemons until the pool is Ready."""

    def is_ready() -> bool:
        run_daemon_pods(plane)
        report_regions(plane)
        return condition(plane, pool, "Ready")["status"] == "True"

    return wait_until(is_ready, f"pool {pool} to be Ready", seconds=seconds)


def node_labels(plane: ControlPlane, node: str) -> dict[str, str]:
    labels: dict[str, str] = plane.get("node", node)["metadata"].get("labels", {})
    return labels


def events_of(plane: ControlPlane, name: str, namespace: str = "default") -> list[dict[str, Any]]:
    listed = plane.get("events", "-n", namespace, f"--field-selector=involvedObject.name={name}")["items"]
    return [one for one in listed if one.get("reportingComponent") == "kvoffload.io/operator"]
