"""Checks of the nodes that pools match, and of their kubelets. Pure."""

from collections.abc import Iterator

from kvoffload.api.conditions import RegionCondition, RegionReason, find
from kvoffload.api.pool import Fallback, KVOffloadPool
from kvoffload.api.reservation import reserve_remedy
from kvoffload.units import format_bytes
from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.facts import ClusterFacts, DaemonPod, NodeFacts, NodePages

KUBELET_PODS_VOLUME = "kubelet-pods"
"""Volume of the daemons' pods: the kubelet's folder of pods on the host, below the chart's kubeletRootDir."""


def node_is_not_ready(facts: ClusterFacts) -> Found:
    """The kubelet of a matching node says that it is not ready, or says nothing any more."""
    matching = {node.name for pool in facts.pools for node in facts.matching_nodes(pool)}
    for node in facts.nodes:
        if node.name in matching and node.not_ready:
            message = f"its kubelet is not ready: {node.not_ready}"
            remedy = "on the node: systemctl status kubelet; journalctl -u kubelet -n 50"
            yield Severity.ERROR, f"node/{node.name}", message, remedy


def kubelet_counts_missing_pages(facts: ClusterFacts) -> Found:
    """The kubelet has room for the pool, and the node's daemon does not find the pages: they went after it started."""
    for pool, node, pages in _pages_of(facts):
        region = facts.region(pool=pool.name, node=node.name)
        ready = find(region.status.conditions, RegionCondition.READY) if region else None
        if ready is None or ready.reason != RegionReason.PAGES_UNAVAILABLE:
            continue
        if pages.allocatable_bytes >= pool.spec.capacity:
            size = pool.spec.page_size
            message = (
                f"its kubelet counts {format_bytes(pages.allocatable_bytes)} of {size.resource_name} since its start, "
                f"and the daemon does not get pool {pool.name}'s {format_bytes(pool.spec.capacity)}: {ready.message}"
            )
            num_pages = -(-pages.allocatable_bytes // size.num_bytes)
            more = "if the daemon still does not get them, end what holds them outside of pods"
            remedy = f"{reserve_remedy(size, num_pages)}; {more}"
            yield Severity.ERROR, f"node/{node.name}", message, remedy


def _pages_of(facts: ClusterFacts) -> Iterator[tuple[KVOffloadPool, NodeFacts, NodePages]]:
    """Each pool that takes huge pages, with each of its nodes and the pages there."""
    for pool in facts.pools:
        if pool.spec.fallback is Fallback.NONE:
            for node in facts.matching_nodes(pool):
                pages = node.pages.get(pool.spec.page_size.value)
                if pages is not None:
                    yield pool, node, pages


def kubelet_root_dir_is_wrong(facts: ClusterFacts) -> Found:
    """A daemon's pod cannot mount the kubelet's folder: the chart names another one than the kubelet has."""
    for pod in facts.daemons:
        if misses_kubelet_folder(pod):
            remedy = (
                f"find the kubelet's folder on node {pod.node} (ps -efww | grep -e --root-dir), then helm upgrade "
                f"kvoffload charts/kvoffload -n {pod.namespace} --reset-then-reuse-values --set kubeletRootDir=FOLDER"
            )
            yield Severity.ERROR, f"pod/{pod.namespace}/{pod.name}", pod.mount_failure, remedy


def misses_kubelet_folder(pod: DaemonPod) -> bool:
    """Whether the pod waits for the volume with the kubelet's folder of pods."""
    return not pod.is_ready and f'"{KUBELET_PODS_VOLUME}"' in pod.mount_failure
