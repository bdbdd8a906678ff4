"""The examples against the real API server, and their pods through the real webhook."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.examples import CRDS, EXAMPLES, example_files, objects_in, pods_of
from hack.demo.installation import delete_pool
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import MANIFESTS, Stage

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

STUBS = ["leaderworkerset.yaml", "inferenceservice.yaml"]


@pytest.fixture(scope="module")
def cluster(release: Stage) -> Iterator[Kubernetes]:
    """The cluster with the stubs of LeaderWorkerSet and InferenceService, and the examples' namespaces and pools."""
    kubernetes = release.kubernetes
    names = [yaml.safe_load((CRDS / stub).read_text())["metadata"]["name"] for stub in STUBS]
    for stub in STUBS:
        kubernetes.kubectl("apply", "-f", CRDS / stub)
    for name in names:
        kubernetes.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
    made = [
        one for path in example_files() for one in objects_in(path) if one["kind"] in ("Namespace", "KVOffloadPool")
    ]
    for one in made:
        kubernetes.apply(yaml.safe_dump(one))
    yield kubernetes
    for one in reversed(made):
        if one["kind"] == "KVOffloadPool":
            delete_pool(kubernetes, name=one["metadata"]["name"])
        else:
            kubernetes.delete("namespace", one["metadata"]["name"])
    for name in names:
        kubernetes.delete("crd", name)


@pytest.mark.parametrize("path", example_files(), ids=lambda path: path.name)
def test_the_api_server_takes_every_object(cluster: Kubernetes, path: Path) -> None:
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", path)


def test_the_api_server_takes_what_the_demo_leaves_to_go_on_with(cluster: Kubernetes) -> None:
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", MANIFESTS)


def workloads() -> list[Any]:
    found = [(path.name, pod) for path in example_files() for one in objects_in(path) for pod in pods_of(one)]
    return [pytest.param(pod, id=f"{name}-{pod['metadata']['name']}") for name, pod in found]


@pytest.mark.parametrize("pod", workloads())
def test_the_webhook_injects_the_pods_of_every_workload(cluster: Kubernetes, pod: dict[str, Any]) -> None:
    text = cluster.kubectl("create", "--dry-run=server", "--output=yaml", "-f", "-", stdin=yaml.safe_dump(pod))
    created = yaml.safe_load(text)
    annotations = created["metadata"].get("annotations", {})
    assert "kvoffload.io/skip-reason" not in annotations
    assert "kvoffload.io/injected" in annotations
    wanted = "per-rank" if "llama" in text.lower() or "Qwen" in text else "replicated"
    assert annotations["kvoffload.io/replicated-layout"].startswith(wanted)
    (container,) = created["spec"]["containers"]
    assert {"name": "kvoffload", "mountPath": "/run/kvoffload", "readOnly": True} in container["volumeMounts"]
    (before,) = pod["spec"]["containers"]
    assert container.get("args") == before.get("args")


def test_an_engine_over_two_nodes_is_left_alone_with_the_reason(cluster: Kubernetes) -> None:
    (one,) = objects_in(EXAMPLES / "leaderworkerset.yaml")
    (pod,) = pods_of(one)
    container = pod["spec"]["containers"][0]
    container["args"] = [container["args"][0] + " --nnodes 2 --node-rank 0"]
    text = cluster.kubectl("create", "--dry-run=server", "--output=yaml", "-f", "-", stdin=yaml.safe_dump(pod))
    created = yaml.safe_load(text)
    assert created["metadata"]["annotations"]["kvoffload.io/skip-reason"] == "MultiNode"
    assert all(volume["name"] != "kvoffload" for volume in created["spec"]["volumes"])
