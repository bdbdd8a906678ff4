"""The examples on the real cluster: applied, and the pods that the workloads' controllers make go through the webhook.

The pods stay Pending, for the node has no GPU. InferenceService has no controller here, and LeaderWorkerSet's own is
tried in test_leader_worker_set.py; of these two the pods are made by hand and only shown to the API server.
"""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.foreign_kinds import define, remove
from fixtures.examples import (
    EXAMPLES,
    assert_injected,
    assert_left_alone,
    example_files,
    objects_in,
    pods_of,
)
from hack.console import StepError, wait_until
from hack.demo.installation import delete_pool
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import MANIFESTS, Stage

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

FOREIGN_KINDS = ("LeaderWorkerSet", "InferenceService")
OWNERS = {"Deployment": "ReplicaSet", "StatefulSet": "StatefulSet"}
"""Kinds whose controllers run here: what owns their pods."""
LACKS = ("Insufficient nvidia.com/gpu", "unbound immediate PersistentVolumeClaims")
"""Why a pod of the examples may wait: for GPUs, and the StatefulSet's for its disk before that."""
Object = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(release: Stage) -> Iterator[Kubernetes]:
    """The cluster with the CRDs of LeaderWorkerSet and KServe, and the examples' namespaces and pools."""
    kubernetes = release.kubernetes
    define(kubernetes, *FOREIGN_KINDS)
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
    remove(kubernetes, *FOREIGN_KINDS)


@contextlib.contextmanager
def applied(kubernetes: Kubernetes, path: Path) -> Iterator[None]:
    """The workloads of a file, for as long as the block runs; its disks go as well."""
    workloads = [one for one in objects_in(path) if one["kind"] not in ("Namespace", "KVOffloadPool")]
    kubernetes.kubectl("apply", "--validate=strict", "-f", path)
    try:
        yield
    finally:
        for one in workloads:
            place = f"--namespace={one['metadata']['namespace']}"
            kubernetes.kubectl("delete", one["kind"], one["metadata"]["name"], place, "--cascade=foreground")
            if one["spec"].get("volumeClaimTemplates"):
                kubernetes.kubectl("delete", "pvc", place, selector_of(one))


def selector_of(workload: Object) -> str:
    labels = workload["spec"]["selector"]["matchLabels"]
    return "--selector=" + ",".join(f"{key}={value}" for key, value in labels.items())


def wait_pending(kubernetes: Kubernetes, workload: Object) -> list[Object]:
    """The pods that its controller made, all that it makes while none runs, once the scheduler has found no place."""
    is_ordered = workload["kind"] == "StatefulSet"  # one after the other, each when the one before is ready
    number = 1 if is_ordered else workload["spec"].get("replicas", 1)
    place = f"--namespace={workload['metadata']['namespace']}"

    def pods() -> list[Object]:
        return list(json.loads(kubernetes.kubectl("get", "pods", place, selector_of(workload), "-o", "json"))["items"])

    def verdicts() -> list[str]:
        return [
            condition.get("message", "")
            for pod in pods()
            for condition in pod["status"].get("conditions", [])
            if (condition["type"], condition["status"]) == ("PodScheduled", "False")
        ]

    wait_until(
        f"the scheduler to say what {workload['metadata']['name']} lacks",
        lambda: len(verdicts()) == number and all(any(lack in said for lack in LACKS) for said in verdicts()),
        timeout_seconds=60,
        explain=lambda: f"{verdicts()}",
    )
    return pods()


@pytest.mark.parametrize("path", example_files(), ids=lambda path: path.name)
def test_every_example_is_applied_and_its_controllers_pods_are_injected(cluster: Kubernetes, path: Path) -> None:
    with applied(cluster, path):
        for one in objects_in(path):
            if one["kind"] in OWNERS:
                (asked,) = pods_of(one)
                for pod in wait_pending(cluster, one):
                    (owner,) = pod["metadata"]["ownerReferences"]
                    assert owner["kind"] == OWNERS[one["kind"]]
                    assert pod["status"]["phase"] == "Pending"
                    assert_injected(pod, asked)
            else:
                name, namespace = one["metadata"]["name"], one["metadata"].get("namespace", "")
                assert cluster.get(one["kind"], name, namespace=namespace)


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [("leaderworkerset.yaml", "restartPolicy:", "restart_policy:"), ("kserve.yaml", "minReplicas:", "minReplica:")],
)
def test_a_field_that_their_kinds_do_not_have_is_refused(
    cluster: Kubernetes, path: str, before: str, after: str
) -> None:
    text = (EXAMPLES / path).read_text()
    assert before in text
    with pytest.raises(StepError, match=f"unknown field .*{after[:-1]}"):
        cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text.replace(before, after))


def test_the_api_server_takes_what_the_demo_leaves_to_go_on_with(cluster: Kubernetes) -> None:
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", MANIFESTS)


def foreign_pods() -> list[Any]:
    return [
        pytest.param(pod, id=path.name)
        for path in example_files()
        for one in objects_in(path)
        if one["kind"] in FOREIGN_KINDS
        for pod in pods_of(one)
    ]


def show(kubernetes: Kubernetes, pod: Object) -> Object:
    """The pod as the API server would store it."""
    text = kubernetes.kubectl("create", "--dry-run=server", "--output=json", "-f", "-", stdin=json.dumps(pod))
    created: Object = json.loads(text)
    return created


@pytest.mark.parametrize("pod", foreign_pods())
def test_the_webhook_injects_the_pods_that_others_controllers_would_make(cluster: Kubernetes, pod: Object) -> None:
    assert_injected(show(cluster, pod), pod)


def test_an_engine_over_two_nodes_is_left_alone_with_the_reason(cluster: Kubernetes) -> None:
    (one,) = objects_in(EXAMPLES / "leaderworkerset.yaml")
    (pod,) = copy.deepcopy(list(pods_of(one)))
    pod["spec"]["containers"][0]["args"][0] += " --nnodes 2 --node-rank 0"
    assert_left_alone(show(cluster, pod), "MultiNode")
