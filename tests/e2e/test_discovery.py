"""What the demo tells its Prometheus of our pods is what Prometheus finds by itself, and so are the targets it makes.

A control plane without kubelets: the test writes what they would report of the chart's pods, and nothing answers there.
Prometheus itself and the Prometheus operator's generator of configurations are built the first time (hack/prometheus);
Prometheus reads of the pods with a service account's token, as a user's does.
"""

import json
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.control_plane import NAMESPACE, ControlPlane, render_chart, wait_until
from e2e.operator_pools import pool_manifest
from e2e.operator_process import operator_token, running_operator
from hack.cluster.programs import ensure_program
from hack.demo.discovery import META, discover, documented_job, pod_monitor_job
from hack.demo.prometheus import PrometheusServer, running_prometheus, serving_prometheus
from hack.prometheus.program import PROMETHEUS, SCRAPE_CONFIGURATION

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ACCOUNT = "prometheus"
PERMISSIONS = f"""
apiVersion: v1
kind: ServiceAccount
metadata: {{name: {ACCOUNT}, namespace: {NAMESPACE}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: {ACCOUNT}, namespace: {NAMESPACE}}}
rules:
- {{apiGroups: [""], resources: [pods], verbs: [get, list, watch]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: {ACCOUNT}, namespace: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: {ACCOUNT}}}
subjects:
- {{kind: ServiceAccount, name: {ACCOUNT}, namespace: {NAMESPACE}}}
"""
DISCOVERED = ("__address__", META)
"""Beginnings of the labels that discovery gives a target; what the job gives all of its own is not of interest."""
Object = dict[str, Any]


@dataclass
class Pods:
    """As the demo's `Kubernetes` lists them."""

    plane: ControlPlane

    def pods(self, **_: str) -> list[Object]:
        return list(self.plane.get("pods", "-n", NAMESPACE)["items"])


@pytest.fixture(scope="module")
def pods(control_plane: ControlPlane) -> Iterator[Pods]:
    """The chart's pods, and the daemons of a pool, each with an address; the daemon on n1 is not ready."""
    pods = Pods(control_plane)
    with running_operator(control_plane, "operator-d"):
        control_plane.apply(pool_manifest("main"))
        wait_until(lambda: len(placed(pods)) >= 5, "operator, webhook and daemons to be placed")
    for number, pod in enumerate(placed(pods)):
        report(control_plane, pod, address=f"127.0.1.{number}", ready=number != 0)
    yield pods
    control_plane.kubectl("delete", "kvpool", "main", "--wait=false")


def placed(pods: Pods) -> list[Object]:
    return [pod for pod in pods.pods() if pod["spec"].get("nodeName")]


def report(plane: ControlPlane, pod: Object, *, address: str, ready: bool) -> None:
    """Be its kubelet."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": now}
    statuses = [
        {
            "name": one["name"],
            "image": one["image"],
            "imageID": "x",
            "ready": ready,
            "restartCount": 0,
            "containerID": f"containerd://{one['name']}",
        }
        for one in pod["spec"]["containers"]
    ]
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "hostIP": "192.0.2.1",
        "hostIPs": [{"ip": "192.0.2.1"}],
        "conditions": [condition],
        "containerStatuses": statuses,
    }
    plane.kubectl(
        "patch", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p",
        json.dumps({"status": status}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def monitor() -> Object:
    (found,) = [one for one in render_chart("monitoring.podMonitor.enabled=true") if one["kind"] == "PodMonitor"]
    return found


@pytest.fixture(scope="module")
def generated_job(monitor: Object) -> Object:
    """What the Prometheus operator makes of the PodMonitor."""
    program = ensure_program(SCRAPE_CONFIGURATION)
    done = subprocess.run([program], input=yaml.safe_dump(monitor), capture_output=True, text=True, check=True)
    # the one shard that there is: the operator's sidecar fills that in
    (job,) = yaml.safe_load(done.stdout.replace("$(SHARD)", "0"))["scrape_configs"]
    return dict(job)


@pytest.fixture(scope="module")
def found(
    control_plane: ControlPlane, pods: Pods, generated_job: Object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    """Prometheus with its own discovery, the operator's job and the page's; in them only the API server is ours."""
    control_plane.apply(PERMISSIONS)
    kubeconfig = control_plane.write_kubeconfig(ACCOUNT, operator_token(control_plane, ACCOUNT))
    jobs = [generated_job, documented_job()]
    for job in jobs:
        (discovery,) = job["kubernetes_sd_configs"]
        assert (discovery["role"], discovery["namespaces"]) == ("pod", {"names": [NAMESPACE]})
        discovery["kubeconfig_file"] = str(kubeconfig)
    folder = tmp_path_factory.mktemp("prometheus-by-itself")
    with serving_prometheus({"scrape_configs": jobs}, folder, program=ensure_program(PROMETHEUS)) as server:
        wait_until(lambda: len(server.targets("active")) == 2 * len(placed(pods)), "it to find every pod")
        yield server


def in_order(all_labels: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The labels of targets, so that they can be compared."""
    return sorted(all_labels, key=lambda labels: sorted(labels.items()))


def test_what_we_write_of_pods_is_what_prometheus_discovers(found: PrometheusServer, pods: Pods) -> None:
    targets = [*found.targets("active"), *found.targets("dropped")]
    discovered = [
        {name: one["discoveredLabels"][name] for name in one["discoveredLabels"] if name.startswith(DISCOVERED)}
        for one in targets
        if one["scrapePool"] == "kvoffload"
    ]
    ours = [one["labels"] | {"__address__": one["targets"][0]} for one in discover(pods.pods())]
    assert len(ours) > len(placed(pods)), "containers without the port are targets as well, which the job drops"
    assert in_order(discovered) == in_order(ours)


@pytest.mark.parametrize("which", ["PodMonitor", "page"])
def test_targets_of_the_demo_are_those_of_a_prometheus_that_discovers(
    found: PrometheusServer, pods: Pods, monitor: Object, which: str, tmp_path: Path
) -> None:
    job = pod_monitor_job(monitor) if which == "PodMonitor" else documented_job()
    by_itself = [one["labels"] for one in found.targets("active") if one["scrapePool"] == job["job_name"]]
    assert by_itself
    with running_prometheus(pods, tmp_path, job=job) as ours:  # type: ignore[arg-type]
        wait_until(lambda: len(ours.targets("active")) == len(by_itself), "ours to read the file")
        assert in_order(one["labels"] for one in ours.targets("active")) == in_order(by_itself)


def test_each_pod_is_one_target_with_component_node_and_pool(found: PrometheusServer, pods: Pods) -> None:
    wanted = {
        (
            pod["metadata"]["name"],
            pod["metadata"]["labels"]["app.kubernetes.io/component"],
            pod["spec"]["nodeName"],
            pod["metadata"]["labels"].get("kvoffload.io/daemon-of"),
        )
        for pod in placed(pods)
    }
    assert {("node", "n1", "main"), ("node", "n2", "main")} <= {of_pod[1:] for of_pod in wanted}
    for job in {one["scrapePool"] for one in found.targets("active")}:
        scraped = [one["labels"] for one in found.targets("active") if one["scrapePool"] == job]
        assert {(one["pod"], one["component"], one["node"], one.get("pool")) for one in scraped} == wanted
        assert len(scraped) == len(wanted)
