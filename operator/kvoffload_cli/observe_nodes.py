"""From nodes and the pods on them to what the checks ask of nodes. For `observe`."""

from collections.abc import Iterable

from kvoffload.api import keys
from kvoffload.api.pool import PageSize
from kvoffload.errors import InvalidSpec
from kvoffload.units import parse_quantity
from kvoffload_cli.facts import NodeFacts, NodePages
from kvoffload_cli.observe_pods import Manifest, labels_of

FINISHED = ("Succeeded", "Failed")


def observe_nodes(nodes: Iterable[Manifest], pods: Iterable[Manifest]) -> tuple[NodeFacts, ...]:
    """Every node, with what the pods that are bound to it and not over asked for; one pass over the cluster's pods."""
    bound: dict[str, list[Manifest]] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") not in FINISHED:
            bound.setdefault(pod["spec"].get("nodeName", ""), []).append(pod)
    return tuple(node_facts(node, bound.get(node["metadata"]["name"], [])) for node in nodes)


def node_facts(node: Manifest, pods: Iterable[Manifest]) -> NodeFacts:
    """A node and the huge pages that these pods on it asked for."""
    status = node["status"]
    pages = {}
    for size in PageSize:
        if size.resource_name not in status.get("allocatable", {}):
            continue
        by_pool: dict[str, int] = {}
        by_others = 0
        for pod in pods:
            requested = requested_bytes(pod, size.resource_name)
            pool = labels_of(pod).get(keys.DAEMON_OF_LABEL)
            if pool:
                by_pool[pool] = by_pool.get(pool, 0) + requested
            else:
                by_others += requested
        pages[size.value] = NodePages(
            allocatable_bytes=parse_quantity(status["allocatable"][size.resource_name]),
            requested_bytes_by_pool=by_pool,
            requested_bytes_by_others=by_others,
        )
    return NodeFacts(
        name=node["metadata"]["name"],
        labels=labels_of(node),
        pages=pages,
        not_ready=not_ready(status),
    )


def not_ready(status: Manifest) -> str:
    """Why a node is not ready, as its kubelet, or the controller that misses it, says; empty where it is."""
    ready = next((one for one in status.get("conditions", []) if one["type"] == "Ready"), None)
    if ready is None:
        return "it has not reported yet"
    if ready["status"] == "True":
        return ""
    return ": ".join(filter(None, (ready.get("reason"), ready.get("message")))) or f"Ready is {ready['status']}"


def requested_bytes(pod: Manifest, resource: str) -> int:
    """What a pod asks of a resource: its containers' sum, or its largest init container."""
    of_containers = [_request(container, resource) for container in pod["spec"].get("containers", [])]
    of_init = [_request(container, resource) for container in pod["spec"].get("initContainers", [])]
    return max(sum(of_containers), *of_init, 0)


def _request(container: Manifest, resource: str) -> int:
    resources = container.get("resources", {})
    amount = resources.get("requests", {}).get(resource) or resources.get("limits", {}).get(resource) or "0"
    try:
        return parse_quantity(amount)
    except InvalidSpec:
        return 0
