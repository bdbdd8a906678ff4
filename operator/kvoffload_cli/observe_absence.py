"""Why there is nothing to explain: no such pod, one without the label, or a name of what makes pods. For `observe`."""

from collections.abc import Mapping
from typing import Any

from kvoffload.api import keys
from kvoffload_cli.kube import Denied, Reader, ReadFailed

MAKERS = {
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments/{name}",
    "StatefulSet": "/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}",
}
MAX_NAMES = 10
OPT_IN = f"label the pod template with {keys.POOL_LABEL}: <pool> and let the pod be created anew"


def explain_absence(reader: Reader, pod: Mapping[str, Any] | None, *, namespace: str, name: str) -> str:
    """What to say instead: the pod has no label, or there is none, and whose pods could be meant."""
    if pod is not None:
        return f"pod {namespace}/{name} does not have the label {keys.POOL_LABEL}, so it was left as it is; {OPT_IN}"
    for kind, path in MAKERS.items():
        try:
            maker = reader.get(path.format(namespace=namespace, name=name))
            pods = pods_of(reader, maker, namespace=namespace) if maker else []
        except (Denied, ReadFailed):
            continue
        if maker:
            return f"{namespace}/{name} is a {kind}, not a pod; {name_pods(kind, pods)}"
    return f"there is no pod {name} in namespace {namespace}: kubectl get pods -n {namespace} -l {keys.POOL_LABEL}"


def pods_of(reader: Reader, maker: Mapping[str, Any], *, namespace: str) -> list[str]:
    """Names of the pods that a Deployment or StatefulSet selects by labels, in order."""
    labels = maker["spec"]["selector"].get("matchLabels", {})
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    found = reader.list_objects(f"/api/v1/namespaces/{namespace}/pods", labels=selector) if selector else []
    return sorted(one["metadata"]["name"] for one in found)


def name_pods(kind: str, pods: list[str]) -> str:
    """Its pods, as far as a line holds them."""
    more = f" and {len(pods) - MAX_NAMES} more" if len(pods) > MAX_NAMES else ""
    return f"its pods are {', '.join(pods[:MAX_NAMES])}{more}" if pods else f"this {kind} has no pod now"
