"""What this user may not read, and which role would help. Called by `observe`."""

from kvoffload_cli.kube import Denied, Reader, ReadFailed

DEPLOYMENTS = "/apis/apps/v1/deployments"
CLUSTER_ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
OURS = "app.kubernetes.io/name=kvoffload"
OPERATORS = f"{OURS},app.kubernetes.io/component=operator"
VIEWERS = f"{OURS},app.kubernetes.io/component=viewer"
ANY_VIEWER = "RELEASE-viewer (RELEASE: the helm release's name)"


def find_viewer_role(reader: Reader) -> str:
    """The ClusterRole that lets people read pools and regions, by the release in the cluster as far as it is visible.

    The chart names it after the release, or after `nameOverride`.
    """
    for path, labels in ((CLUSTER_ROLES, VIEWERS), (DEPLOYMENTS, OPERATORS)):
        try:
            found = reader.list_objects(path, labels=labels)
        except (Denied, ReadFailed):
            continue
        if found:
            name: str = found[0]["metadata"]["name"]
            return name if name.endswith("-viewer") else name.removesuffix("-operator") + "-viewer"
    return ANY_VIEWER


def has_operator(reader: Reader, namespace: str) -> bool:
    """Whether the chart is installed in that namespace, as far as this user may see."""
    try:
        return bool(reader.list_objects(f"/apis/apps/v1/namespaces/{namespace}/deployments", labels=OPERATORS))
    except (Denied, ReadFailed):
        return False


def does_operator_run(reader: Reader) -> bool | None:
    """Whether an operator is ready; None where this user may not see."""
    try:
        found = reader.list_objects(DEPLOYMENTS, labels=OPERATORS)
    except (Denied, ReadFailed):
        return None
    return any(one.get("status", {}).get("readyReplicas", 0) for one in found)
