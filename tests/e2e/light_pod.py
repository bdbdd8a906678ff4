"""A pod that opts in and serves, without the weight of an engine; and whether a pod was injected."""

import json
from typing import Any

from hack.demo.servers import NAMESPACE


def light_pod(name: str, *, pool: str, image: str, annotations: dict[str, str] | None = None) -> str:
    """The manifest of a pod whose container `main` answers on port 8000."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-m", "http.server", "8000"],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
    }
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name, "kvoffload.io/pool": pool}}
    spec = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0, "containers": [container]}
    metadata |= {"annotations": annotations or {}}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def is_injected(pod: dict[str, Any]) -> bool:
    """Whether its first container was told where the daemon's socket is."""
    variables = pod["spec"]["containers"][0].get("env", [])
    return "KVOFFLOAD_SOCKET" in {variable["name"] for variable in variables}
