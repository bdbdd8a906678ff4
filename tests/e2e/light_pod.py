"""A pod that opts in and serves, without the weight of an engine: made, asked, and engines of a test on its socket."""

import contextlib
import json
import os
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from daemon_process import TestEngine
from hack.console import wait_until
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage
from hack.demo.servers import NAMESPACE
from kvoffload.api.keys import SKIP_REASON_ANNOTATION, VOLUME_NAME

SERVE = "import http.server as s; s.HTTPServer(('', 8000), s.SimpleHTTPRequestHandler).serve_forever()"


def light_pod(
    name: str, *, pool: str, image: str, annotations: dict[str, str] | None = None, arguments: Sequence[str] = ()
) -> str:
    """The manifest of a pod whose container `main` answers on port 8000; `arguments` are for who reads the manifest."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", SERVE, *arguments],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
    }
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name, "kvoffload.io/pool": pool}}
    spec = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0, "containers": [container]}
    metadata |= {"annotations": annotations or {}}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def make_pod(stage: Stage, name: str, *, pool: str) -> dict[str, Any]:
    """A light opted-in pod that serves; returned as the API server holds it."""
    named = {"kvoffload.io/container": "main"}
    stage.kubernetes.apply(light_pod(name, pool=pool, image=stage.images.python, annotations=named))
    return stage.kubernetes.wait_ready_pod(namespace=NAMESPACE, selector=f"app={name}", timeout_seconds=120)


def is_injected(pod: dict[str, Any]) -> bool:
    """Whether its first container was told where the daemon's socket is."""
    variables = pod["spec"]["containers"][0].get("env", [])
    return "KVOFFLOAD_SOCKET" in {variable["name"] for variable in variables}


def skip_reason(pod: dict[str, Any]) -> str:
    """Why the webhook left it as it is; empty where it did not, or was not asked."""
    reason: str = pod["metadata"].get("annotations", {}).get(SKIP_REASON_ANNOTATION, "")
    return reason


def wait_asked(stage: Stage, *, pool: str, answers: Callable[[dict[str, Any]], object] = is_injected) -> None:
    """Wait until a webhook is asked about a pod that is created now, and answers so. Its Deployment is available before
    the API server's connections find it, and a busy machine may miss a single call."""
    manifest = light_pod("probe", pool=pool, image=stage.images.python)

    def is_asked() -> bool:
        said = stage.kubernetes.kubectl("create", "--dry-run=server", "--output=json", "-f", "-", stdin=manifest)
        return bool(answers(json.loads(said)))

    wait_until("the webhook to be asked", is_asked, timeout_seconds=120)


def assert_serves(kubernetes: Kubernetes, pod: dict[str, Any]) -> None:
    """The very pod still answers, its container never restarted."""
    name = pod["metadata"]["name"]
    now = kubernetes.get("pod", name, namespace=NAMESPACE)
    assert now["metadata"]["uid"] == pod["metadata"]["uid"]
    assert now["status"]["containerStatuses"][0]["restartCount"] == 0
    with urllib.request.urlopen(f"http://{now['status']['podIP']}:8000/", timeout=5) as response:
        assert response.status == 200


def is_listening(path: Path) -> bool:
    """Whether a daemon has that socket; one that is gone left its file."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def daemon_socket(kubernetes: Kubernetes, pod: dict[str, Any]) -> Iterator[Path]:
    """The socket that the attacher put into the pod's emptyDir, once a daemon listens there."""
    below_pod = f"pods/{pod['metadata']['uid']}/volumes/kubernetes.io~empty-dir/{VOLUME_NAME}"
    # by a descriptor: the path is longer than a socket's name may be
    descriptor = os.open(kubernetes.settings.kubelet_root / below_pod, os.O_PATH | os.O_DIRECTORY)
    path = Path(f"/proc/self/fd/{descriptor}/daemon.sock")
    try:
        wait_until("a daemon to listen in the pod", lambda: is_listening(path), timeout_seconds=120)
        yield path
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def attached_engine(kubernetes: Kubernetes, pod: dict[str, Any], **engine: Any) -> Iterator[TestEngine]:
    """An engine of two ranks on the pod's socket; `engine`: more of `TestEngine`."""
    with daemon_socket(kubernetes, pod) as path:
        attached = TestEngine(path, engine_id=pod["metadata"]["name"], **engine)
    try:
        yield attached
    finally:
        attached.close()
