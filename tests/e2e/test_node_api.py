"""The daemon and the attacher's watch on a real API server, with the chart's permissions and a token of their node."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_process import TestEngine
from e2e.control_plane import NAMESPACE, ControlPlane
from e2e.control_plane import wait_until as wait_up_to
from kvoffload.api.region import region_name
from kvoffload.errors import KVOffloadError
from kvoffload.protocol.messages import AttachPod
from kvoffload_node.attach.handoff import Handoff

pytestmark = pytest.mark.e2e

SECONDS = 120.0
"""A daemon is up within one; this is for a machine that does a dozen other things."""
NODE = "node-api-test"
OTHER_NODE = "node-api-other"


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    for name in (NODE, OTHER_NODE):
        control_plane.add_node(name)
    yield control_plane
    control_plane.kubectl("delete", "node", NODE, OTHER_NODE)  # other tests' pools would match them


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    wait_up_to(is_true, what, seconds=SECONDS)


def node_token(plane: ControlPlane, node: str) -> str:
    """As a daemon's pod on that node has it."""
    account = "kvoffload-node"
    bound = ["--bound-object-kind=Node", f"--bound-object-name={node}"]
    return plane.kubectl("create", "token", account, "-n", NAMESPACE, "--duration=1h", *bound).strip()


def region(pool: str, node: str = NODE, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvoffload.io/v1alpha1",
        "kind": "KVOffloadRegion",
        "metadata": {"name": region_name(pool, node)},
        "spec": {
            "poolName": pool,
            "nodeName": node,
            "capacityBytes": 32 << 20,
            "pageSizeBytes": 2 << 20,
            "fallback": "SharedMemory",
            **spec,
        },
    }


def daemonset(name: str) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "daemon", "image": "none"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"nodeSelector": {"no": "where"}, "containers": [container]},
            },
        },
    }


class NodeDaemon:
    """A daemon that takes its spec from the API server."""

    def __init__(self, plane: ControlPlane, pool: str, *, token: str = "", url: str = "") -> None:
        self.plane = plane
        self.pool = pool
        self.folder = Path(tempfile.mkdtemp(prefix="kvo-napi-"))
        self.kubeconfig = plane.write_kubeconfig(f"node-{pool}", token or node_token(plane, NODE), url=url)
        self.process: subprocess.Popen[bytes] | None = None
        self.attacher = Handoff(self.folder / "attach.sock")

    @property
    def name(self) -> str:
        return region_name(self.pool, NODE)

    @property
    def files(self) -> Path:
        return Path(f"/dev/shm/kvoffload-{self.pool}")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KVOFFLOAD_")},
            "KUBECONFIG": str(self.kubeconfig),
            "KVOFFLOAD_POOL": self.pool,
            "KVOFFLOAD_NODE_NAME": NODE,
            "KVOFFLOAD_NAMESPACE": NAMESPACE,
            "KVOFFLOAD_DAEMONSET": f"kvoffload-{self.pool}",
            "KVOFFLOAD_HUGEPAGES": "/dev/shm",
            "KVOFFLOAD_STATE": str(self.folder / "state"),
            "KVOFFLOAD_HANDOFF": str(self.folder),
            "KVOFFLOAD_METRICS_PORT": "0",
        }
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "kvoffload_node", "daemon"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        status = self.process.wait(30)
        self.process = None
        return status

    def attach(self, uid: str) -> Path:
        path = self.folder / f"{uid}.sock"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(64)

        def handed_over() -> bool:
            with contextlib.suppress(KVOffloadError):
                request = AttachPod(uid, "default", uid, "replicated")
                self.attacher.ensure_connected()
                self.attacher.attach(request, listening)
                return True
            return False

        wait_until(handed_over, "the daemon to take a pod")
        listening.close()
        return path

    def status(self) -> dict[str, Any]:
        found = self.plane.find("kvregion", self.name)
        return dict(found.get("status") or {}) if found else {}

    def condition(self, type: str) -> dict[str, Any]:
        conditions = self.status().get("conditions", [])
        return next((dict(one) for one in conditions if one["type"] == type), {})


@pytest.fixture
def start(plane: ControlPlane) -> Iterator[Callable[..., NodeDaemon]]:
    """Starts daemons of new pools, each with its region and DaemonSet; all end with the test."""
    started: list[NodeDaemon] = []

    def start_one(pool: str, *, with_daemonset: bool = True, token: str = "", url: str = "", **spec: Any) -> NodeDaemon:
        plane.apply(region(pool, **spec))
        if with_daemonset:
            plane.apply(daemonset(f"kvoffload-{pool}"))
        daemon = NodeDaemon(plane, pool, token=token, url=url)
        started.append(daemon)
        daemon.start()
        return daemon

    yield start_one
    for daemon in started:
        print(daemon.log)  # pytest shows it where the test failed
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()
        daemon.attacher.close()
        plane.kubectl("delete", "kvregion", daemon.name, "--ignore-not-found")
        plane.kubectl("delete", "daemonset", "-n", NAMESPACE, f"kvoffload-{daemon.pool}", "--ignore-not-found")
        shutil.rmtree(daemon.files, ignore_errors=True)
        shutil.rmtree(daemon.folder)


def test_a_daemon_reports_what_it_serves_and_leaves_the_operators_condition_alone(
    plane: ControlPlane, start: Callable[..., NodeDaemon]
) -> None:
    daemon = start("napi-report")
    wait_until(lambda: daemon.condition("Ready").get("status") == "True", "the region to be Ready")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    by_operator = {"type": "NodeReady", "status": "True", "reason": "DaemonRunning", "message": "runs"}
    manifest = {
        **{key: value for key, value in region("napi-report").items() if key != "spec"},
        "status": {"conditions": [{**by_operator, "observedGeneration": 1, "lastTransitionTime": now}]},
    }
    apply = ["apply", "--server-side", "--field-manager=kvoffload-operator", "--subresource=status", "-f", "-"]
    plane.kubectl(*apply, stdin=json.dumps(manifest))
    engine = TestEngine(daemon.attach("pod-a"))
    wait_until(lambda: daemon.status().get("enginesReplicated") == 1, "the engine to be reported")
    status = daemon.status()
    assert {one["type"] for one in status["conditions"]} == {"Ready", "PagesReady", "Degraded", "NodeReady"}
    assert daemon.condition("NodeReady")["message"] == "runs"
    assert daemon.condition("Degraded")["reason"] == "SharedMemoryFallback"
    assert status["capacityBytes"] == 32 << 20
    assert status["capacity"] == "32Mi"
    assert status["epoch"] == 1
    assert status["engines"][0]["podUID"] == "pod-a"
    assert status["engines"][0]["predictedLayout"] == status["engines"][0]["confirmedLayout"] == "replicated"
    since = daemon.condition("Ready")["lastTransitionTime"]
    engine.close()
    wait_until(lambda: daemon.status().get("enginesAttached") == 0, "the engine's end to be reported")
    assert daemon.condition("Ready")["lastTransitionTime"] == since


def test_a_daemon_may_write_its_own_nodes_region_only(plane: ControlPlane, start: Callable[..., NodeDaemon]) -> None:
    daemon = start("napi-foreign", token=node_token(plane, OTHER_NODE))
    wait_until(lambda: "the status could not be written: 422" in daemon.log or "403" in daemon.log, "a refusal")
    assert daemon.status() == {}


def test_a_changed_mode_arrives_and_is_reported(plane: ControlPlane, start: Callable[..., NodeDaemon]) -> None:
    daemon = start("napi-mode")
    wait_until(lambda: daemon.condition("Ready").get("reason") == "Serving", "the region to serve")
    plane.apply(region("napi-mode", mode="Paused"))
    wait_until(lambda: daemon.condition("Ready").get("reason") == "Paused", "the pause to be reported")
    assert daemon.condition("Ready")["observedGeneration"] == 2
    plane.apply(region("napi-mode"))
    wait_until(lambda: daemon.condition("Ready").get("reason") == "Serving", "the region to serve again")


def test_a_deleted_region_ends_the_daemon_and_its_files(plane: ControlPlane, start: Callable[..., NodeDaemon]) -> None:
    daemon = start("napi-deleted")
    wait_until(lambda: daemon.condition("Ready").get("status") == "True", "the region to be Ready")
    assert daemon.files.exists()
    plane.kubectl("delete", "kvregion", daemon.name)
    assert daemon.process is not None
    assert daemon.process.wait(30) == 0
    daemon.process = None
    assert not daemon.files.exists()


def test_a_daemon_without_a_region_waits_for_one(plane: ControlPlane) -> None:
    daemon = NodeDaemon(plane, "napi-late")
    daemon.start()
    try:
        wait_until(lambda: "endpoints on port" in daemon.log, "the daemon to be up")
        plane.apply(region("napi-late"))
        wait_until(lambda: daemon.condition("Ready").get("status") == "True", "the region to be Ready")
    finally:
        assert daemon.process is not None
        plane.kubectl("delete", "kvregion", daemon.name)
        daemon.process.wait(30)
        shutil.rmtree(daemon.folder)


# --- case 27: what a daemon told to stop does with its files ----------------------------------------------------------


def stop_after(daemon: NodeDaemon, prepare: Callable[[], object]) -> bool:
    """Whether the files are still there after SIGTERM."""
    wait_until(lambda: daemon.condition("Ready").get("status") == "True", "the region to be Ready")
    daemon.attach("pod")
    assert list(daemon.files.iterdir())
    prepare()
    assert daemon.stop() == 0
    return daemon.files.exists()


def test_files_are_kept_for_a_successor(start: Callable[..., NodeDaemon]) -> None:
    assert stop_after(start("napi-update"), lambda: None)


def test_files_go_when_the_daemonset_is_gone(start: Callable[..., NodeDaemon]) -> None:
    assert not stop_after(start("napi-nods", with_daemonset=False), lambda: None)


def test_files_go_when_the_daemonset_is_being_deleted(plane: ControlPlane, start: Callable[..., NodeDaemon]) -> None:
    daemon = start("napi-dsdel")

    def delete_slowly() -> None:
        name = f"kvoffload-{daemon.pool}"
        patch = '{"metadata":{"finalizers":["test/hold"]}}'
        plane.kubectl("patch", "daemonset", "-n", NAMESPACE, name, "--type=merge", "-p", patch)
        plane.kubectl("delete", "daemonset", "-n", NAMESPACE, name, "--wait=false")

    try:
        assert not stop_after(daemon, delete_slowly)
    finally:
        patch = '{"metadata":{"finalizers":null}}'
        plane.kubectl("patch", "daemonset", "-n", NAMESPACE, "kvoffload-napi-dsdel", "--type=merge", "-p", patch)


def test_files_go_when_the_rights_are_gone(plane: ControlPlane, start: Callable[..., NodeDaemon]) -> None:
    daemon = start("napi-rbac")
    role = plane.kubectl("get", "role", "kvoffload-node", "-n", NAMESPACE, "-o", "json")
    try:
        assert not stop_after(daemon, lambda: plane.kubectl("delete", "role", "kvoffload-node", "-n", NAMESPACE))
    finally:
        kept = json.loads(role)
        kept["metadata"] = {key: kept["metadata"][key] for key in ("name", "namespace", "labels")}
        plane.apply(kept)


def test_files_are_kept_when_the_api_server_cannot_be_reached(start: Callable[..., NodeDaemon]) -> None:
    daemon = start("napi-away")

    def cut_off() -> None:
        """The daemon's client library read the address at its start: let it start again with a wrong one."""
        assert daemon.process is not None
        daemon.process.kill()
        daemon.process.wait()
        config = daemon.kubeconfig.read_text()
        daemon.kubeconfig.write_text(config.replace(f":{daemon.plane.port}", ":1"))
        daemon.start()
        wait_until(lambda: daemon.log.count("are reserved") == 2, "the daemon to serve without the API server")

    assert stop_after(daemon, cut_off)


def test_files_are_kept_and_the_end_is_not_held_up_when_the_api_server_does_not_answer(
    plane: ControlPlane, start: Callable[..., NodeDaemon]
) -> None:
    (process,) = [one for one in plane.processes if "kube-apiserver" in str(one.args)]
    daemon = start("napi-silent")
    try:
        assert stop_after(daemon, lambda: process.send_signal(signal.SIGSTOP))
    finally:
        process.send_signal(signal.SIGCONT)


def test_files_are_kept_always_with_reclaim_policy_retain(
    plane: ControlPlane, start: Callable[..., NodeDaemon]
) -> None:
    daemon = start("napi-retain", reclaimPolicy="Retain", with_daemonset=False)
    assert stop_after(daemon, lambda: None)


# --- the attacher's view of pods --------------------------------------------------------------------------------------

WATCH = """
import sys, time
from kvoffload_node.attach.pods import NodePods
pods = NodePods(pool=sys.argv[1], node_name=sys.argv[2], own_namespace=sys.argv[3])
pods.start()
last = None
while True:
    now = sorted((p.namespace, p.name, p.predicted_layout) for p in pods.current.values())
    if now != last:
        print(now, flush=True)
        last = now
    time.sleep(0.02)
"""


def user_pod(name: str, namespace: str, pool: str, node: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"kvoffload.io/pool": pool},
            "annotations": {"kvoffload.io/replicated-layout": "per-rank (NotMLA: no latent attention)"},
        },
        "spec": {
            "nodeName": node,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "vllm", "image": "none"}],
        },
    }


def test_the_attacher_sees_its_own_nodes_opted_in_pods_of_allowed_namespaces_only(plane: ControlPlane) -> None:
    selector = {"matchLabels": {"team": "ml"}}
    plane.apply(region("napi-pods", namespaceSelector=selector))
    for name, labels in (("napi-in", {"team": "ml"}), ("napi-out", {"team": "web"})):
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    for namespace in ("napi-in", "napi-out"):
        found = lambda namespace=namespace: plane.find("serviceaccount", "default", "-n", namespace)  # noqa: E731
        wait_until(lambda found=found: found() is not None, "the namespace to be ready")  # type: ignore[misc]
    kubeconfig = plane.write_kubeconfig("attacher", node_token(plane, NODE))
    watch = subprocess.Popen(
        [sys.executable, "-c", WATCH, "napi-pods", NODE, NAMESPACE],
        stdout=subprocess.PIPE,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        text=True,
    )
    try:
        assert watch.stdout is not None
        assert watch.stdout.readline().strip() == "[]"
        plane.apply(
            user_pod("other-node", "napi-in", "napi-pods", OTHER_NODE),
            user_pod("other-pool", "napi-in", "napi-pods-2", NODE),
            user_pod("other-namespace", "napi-out", "napi-pods", NODE),
            user_pod("ours", "napi-in", "napi-pods", NODE),
        )
        assert watch.stdout.readline().strip() == "[('napi-in', 'ours', 'per-rank')]"
        plane.kubectl("delete", "pod", "ours", "-n", "napi-in", "--force", "--grace-period=0")
        assert watch.stdout.readline().strip() == "[]"
    finally:
        watch.kill()
        watch.communicate()
        plane.kubectl("delete", "namespace", "napi-in", "napi-out", "--wait=false")
        plane.kubectl("delete", "kvregion", region_name("napi-pods", NODE))
