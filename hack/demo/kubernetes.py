"""kubectl and helm on the local cluster, for the demo and the end-to-end tests."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster import lifecycle
from hack.cluster.settings import ClusterSettings
from hack.console import StepError, wait_until
from hack.shell import TAIL_LINES, is_successful, run


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """The local cluster as a user reaches it."""

    settings: ClusterSettings

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints."""
        return run([*lifecycle.kubectl(self.settings), *arguments], stdin=stdin)

    def helm(self, *arguments: str | Path) -> str:
        """Run helm and return what it prints."""
        helm = self.settings.binaries / "helm"
        return run([helm, f"--kubeconfig={self.settings.kubeconfig}", *arguments])

    def apply(self, manifest: str) -> None:
        """Apply a manifest."""
        self.kubectl("apply", "-f", "-", stdin=manifest)

    def get(self, kind: str, name: str = "", *, namespace: str = "", selector: str = "") -> dict[str, Any]:
        """Return one object, or a list of objects under `items`, as the API server holds it."""
        arguments = ["get", kind, *([name] if name else []), "--output=json"]
        if namespace:
            arguments.append(f"--namespace={namespace}")
        if selector:
            arguments.append(f"--selector={selector}")
        answer: dict[str, Any] = json.loads(self.kubectl(*arguments))
        return answer

    def find(self, kind: str, name: str, *, namespace: str = "") -> dict[str, Any] | None:
        """Return one object, or None if there is none."""
        arguments = ["get", kind, name, "--output=json", "--ignore-not-found"]
        text = self.kubectl(*arguments, *([f"--namespace={namespace}"] if namespace else []))
        return json.loads(text) if text.strip() else None

    def is_known(self, kind: str) -> bool:
        """The API server serves this kind."""
        return is_successful([*lifecycle.kubectl(self.settings), "get", kind, "--output=name"])

    def ensure_namespace(self, name: str) -> None:
        """Make a namespace, and wait for the service account that its pods need."""
        self.apply(f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")
        wait_until(
            f"the default service account of namespace {name}",
            lambda: self.find("serviceaccount", "default", namespace=name) is not None,
            timeout_seconds=30,
        )

    def delete(self, kind: str, name: str, *, namespace: str = "") -> None:
        """Delete an object if it is there, and wait until it is gone."""
        arguments = ["delete", kind, name, "--ignore-not-found", "--wait=true", "--timeout=90s"]
        self.kubectl(*arguments, *([f"--namespace={namespace}"] if namespace else []))

    def pods(self, *, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the pods that match and are not being deleted."""
        listed = self.get("pods", namespace=namespace, selector=selector)["items"]
        return [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]

    def wait_ready_pod(self, *, namespace: str, selector: str, timeout_seconds: float) -> dict[str, Any]:
        """Wait for exactly one matching pod to be Ready and return it; a container that ends is told at once."""

        def is_ready() -> bool:
            pods = self.pods(namespace=namespace, selector=selector)
            for pod in pods:
                for status in pod["status"].get("containerStatuses", []):
                    if status.get("restartCount", 0) > 0 or "terminated" in status["state"]:
                        raise StepError(
                            f"container {status['name']} of pod {pod['metadata']['name']} ended: {self.log_tail(pod)}",
                            log=self.settings.logs / "pods",
                        )
            return len(pods) == 1 and condition_status(pods[0], "Ready") == "True"

        wait_until(
            f"a Ready pod with {selector} in {namespace}",
            is_ready,
            timeout_seconds=timeout_seconds,
            poll_seconds=0.5,
            explain=lambda: self.describe_pods(namespace=namespace, selector=selector),
            log=self.settings.logs / "pods",
        )
        return self.pods(namespace=namespace, selector=selector)[0]

    def log_tail(self, pod: dict[str, Any]) -> str:
        """Return the last lines of a pod's log, of the container before a restart where there is one."""
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        arguments = ["logs", name, f"--namespace={namespace}", "--all-containers", f"--tail={TAIL_LINES}"]
        try:
            return self.kubectl(*arguments, "--previous")
        except StepError:
            try:
                return self.kubectl(*arguments)
            except StepError as failure:
                return str(failure)  # no container of it has started yet: the pod's state and events say why

    def describe_pods(self, *, namespace: str, selector: str) -> str:
        """Return the state of pods that do not become ready, and the last warnings about them."""
        listed = self.kubectl("get", "pods", f"--namespace={namespace}", f"--selector={selector}").strip()
        names = {pod["metadata"]["name"] for pod in self.pods(namespace=namespace, selector=selector)}
        events = self.get("events", namespace=namespace)["items"]
        warnings = [
            f"{event['involvedObject']['name']}: {event['reason']}: {event['message']}"
            for event in events
            if event["type"] == "Warning" and event["involvedObject"]["name"] in names
        ]
        return "\n".join([listed, *warnings[-5:]])


def condition_status(manifest: dict[str, Any], kind: str) -> str:
    """Return the status of one condition of an object; empty if it is not there."""
    conditions = manifest.get("status", {}).get("conditions", [])
    return next((condition["status"] for condition in conditions if condition["type"] == kind), "")


def describe_conditions(manifest: dict[str, Any]) -> str:
    """Return an object's conditions, one a line."""
    conditions = manifest.get("status", {}).get("conditions", [])
    lines = [f"{item['type']}={item['status']} {item['reason']}: {item['message']}" for item in conditions]
    return "\n".join(lines) or "it has no conditions"
