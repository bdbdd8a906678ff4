"""The LeaderWorkerSet example with LeaderWorkerSet's own controllers and webhooks, and ours: what becomes of its pods.

A control plane without kubelets: the pods stay Pending. LeaderWorkerSet is installed by its chart, its manager is built
the first time (hack/leader_worker_set.py) and runs as a process with its service account's token. The test is that
manager's kubelet: it writes the Secret with its certificate into the folder where it looks, and the endpoints.
"""

import base64
import copy
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.control_plane import ControlPlane, free_port, render_chart, wait_until
from e2e.operator_process import operator_token
from e2e.webhook_replicas import publish, serving_replicas
from fixtures.examples import EXAMPLES, assert_injected, assert_left_alone, objects_in, pods_of
from hack.cluster.programs import ensure_program
from hack.leader_worker_set import PROGRAM, leader_worker_set_chart

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NAMESPACE = "lws-system"
SECRET = "lws-webhook-server-cert"
NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Our webhooks and LeaderWorkerSet's, called by one API server; a pool that the example names."""
    program = ensure_program(PROGRAM)
    objects = render_chart(chart=leader_worker_set_chart(), namespace=NAMESPACE)
    crds = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(crds))
    control_plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    control_plane.apply(*(one for one in objects if one["kind"] not in ("CustomResourceDefinition", "Deployment")))
    control_plane.kubectl("apply", "-f", str(EXAMPLES / "pool.yaml"))
    (example,) = objects_in(EXAMPLES / "leaderworkerset.yaml")
    with serving_replicas(control_plane):
        process = start_manager(control_plane, str(program))
        try:
            wait_until(lambda: is_taken(control_plane, example), "LeaderWorkerSet's webhooks to serve")
            yield control_plane
        finally:
            control_plane.kubectl("delete", "leaderworkersets", "--all", "-n", "default", check=False)
            process.terminate()
            process.wait(20)
            for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
                names = [one["metadata"]["name"] for one in objects if one["kind"].lower() == kind]
                control_plane.kubectl("delete", kind, *names)


def start_manager(plane: ControlPlane, program: str) -> "subprocess.Popen[bytes]":
    """Start the manager as its Deployment would, and give it its certificate once it has made one."""
    port, tls = free_port(), plane.folder / "lws-tls"
    configuration = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": True},
        "internalCertManagement": {"enable": True},
        "webhook": {"port": port, "certDir": str(tls)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
    }
    path = plane.folder / "lws.yaml"
    path.write_text(yaml.safe_dump(configuration))
    token = operator_token(plane, "lws-controller-manager", namespace=NAMESPACE)
    command = [program, f"--config={path}", f"--kubeconfig={plane.write_kubeconfig('lws', token)}"]
    with (plane.folder / "lws-manager.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    publish(plane, "lws-webhook-service", {"manager": port}, namespace=NAMESPACE, port_name="")

    def has_certificate() -> bool:
        assert process.poll() is None, (plane.folder / "lws-manager.log").read_text()
        return "tls.crt" in plane.get("secret", SECRET, "-n", NAMESPACE).get("data", {})

    wait_until(has_certificate, "LeaderWorkerSet to make its certificate")
    tls.mkdir()
    for name, value in plane.get("secret", SECRET, "-n", NAMESPACE)["data"].items():
        (tls / name).write_bytes(base64.b64decode(value))
    return process


def is_taken(plane: ControlPlane, manifest: Object) -> bool:
    said = plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(manifest), check=False)
    return "(server dry run)" in said


def wait_pods(plane: ControlPlane, name: str, *, number: int) -> list[Object]:
    """The pods of a LeaderWorkerSet, once its controllers have made that many."""

    def pods() -> list[Object]:
        return list(plane.get("pods", "-n", "default", "-l", f"{NAME_LABEL}={name}")["items"])

    wait_until(lambda: len(pods()) == number, f"{number} pods of {name}")
    return pods()


def variables_of(pod: Object) -> set[str]:
    return {variable["name"] for variable in pod["spec"]["containers"][0]["env"]}


def test_the_pods_of_every_group_carry_the_label_and_are_injected(plane: ControlPlane) -> None:
    path = EXAMPLES / "leaderworkerset.yaml"
    (example,), name = objects_in(path), "kimi-k2"
    plane.kubectl("apply", "--validate=strict", "-f", str(path))
    pods = wait_pods(plane, name, number=example["spec"]["replicas"])
    (asked,) = pods_of(example)
    for pod in pods:
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "StatefulSet"
        assert_injected(pod, asked)
        assert "LWS_LEADER_ADDRESS" in variables_of(pod), "theirs is there beside ours, which is called before it"


def test_the_pods_of_an_engine_over_two_nodes_are_left_alone_leader_and_worker(plane: ControlPlane) -> None:
    (example,) = objects_in(EXAMPLES / "leaderworkerset.yaml")
    wide = copy.deepcopy(example)
    wide["metadata"]["name"] = "wide"
    wide["spec"]["replicas"] = 1
    wide["spec"]["leaderWorkerTemplate"]["size"] = 2
    (container,) = wide["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    container["args"][0] += " --nnodes 2 --node-rank $LWS_WORKER_INDEX --master-addr $LWS_LEADER_ADDRESS"
    plane.apply(wide)
    pods = wait_pods(plane, "wide", number=2)
    assert {pod["metadata"]["name"] for pod in pods} == {"wide-0", "wide-0-1"}
    for pod in pods:
        assert_left_alone(pod, "MultiNode")
