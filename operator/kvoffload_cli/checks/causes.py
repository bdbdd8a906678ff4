"""One finding for one cause: what is said of a node, a daemon's pod or a rollout is not said again of region and pool.

Used by the checks of pools. Pure. In the order in which one thing explains the next:

    node short of pages  ->  daemon's pod pending  ->  region not ready  ->  pool not ready
    pods of the DaemonSet refused  ->  region without a daemon  ->  pool not ready
    DaemonSet rolling out  ->  daemon's pod not ready  ->  region draining, starting  ->  pool not ready
    daemon says what is wrong (region)  ->  daemon's pod not ready  ->  pool not ready
"""

from datetime import timedelta

from kvoffload.api.conditions import RegionCondition, RegionReason, find
from kvoffload.api.pool import Fallback, KVOffloadPool, Mode
from kvoffload.api.region import KVOffloadRegion
from kvoffload_cli.facts import ClusterFacts, DaemonPod, NodeFacts

STARTING = timedelta(minutes=2)
"""How long a new daemon's pod may take to be ready (its image is pulled, its pages are reserved), and a new pool or
region to have a status."""
PASSING_REASONS = (
    RegionReason.DRAINING,
    RegionReason.STARTING,
    RegionReason.DAEMON_PENDING,
    RegionReason.DAEMON_NOT_REPORTING,
)
"""What a region says while its daemon is replaced."""


def needs_pages(pool: KVOffloadPool) -> bool:
    """Whether the pool wants huge pages of its nodes now."""
    return pool.spec.fallback is not Fallback.SHARED_MEMORY and pool.spec.mode is Mode.ACTIVE


def holds_pages(pool: KVOffloadPool) -> bool:
    """Whether the pool's daemons have huge pages, or would: a paused one keeps them, one that observes has none."""
    return pool.spec.fallback is not Fallback.SHARED_MEMORY and pool.spec.mode is not Mode.OBSERVE


def taken_bytes(pool: KVOffloadPool, node: NodeFacts) -> int:
    """Bytes of the pool's page size that others have on the node, 0 where the pool's own daemon has its share."""
    pages = node.pages.get(pool.spec.page_size.value)
    if pages is None or pages.requested_bytes_by_pool.get(pool.name, 0):
        return 0
    return pages.requested_bytes_by_others + sum(pages.requested_bytes_by_pool.values())


def allocatable_bytes(pool: KVOffloadPool, node: NodeFacts) -> int:
    """Bytes of the pool's page size that the node's kubelet knows of."""
    pages = node.pages.get(pool.spec.page_size.value)
    return pages.allocatable_bytes if pages else 0


def is_short(pool: KVOffloadPool, node: NodeFacts) -> bool:
    """Whether the kubelet knows of fewer pages than the pool wants there, or others have too many of them."""
    return needs_pages(pool) and allocatable_bytes(pool, node) - taken_bytes(pool, node) < pool.spec.capacity


def is_short_by_name(facts: ClusterFacts, *, pool: str, node: str) -> bool:
    """The same of names; False where either is not known."""
    wanted = facts.pool(pool)
    found = facts.node(node)
    return wanted is not None and found is not None and is_short(wanted, found)


def counts_missing_pages(facts: ClusterFacts, *, pool: str, node: str) -> bool:
    """Whether the kubelet counts enough pages for the pool: where the daemon does not get them, they are gone."""
    wanted = facts.pool(pool)
    found = facts.node(node)
    return wanted is not None and found is not None and allocatable_bytes(wanted, found) >= wanted.spec.capacity


def fails(pod: DaemonPod) -> bool:
    """Whether the pod waits for something that will not come by itself."""
    if pod.phase == "Failed" or pod.mount_failure or pod.unscheduled:
        return True
    return not all(wait.is_passing for wait in pod.waits)


def is_passing(facts: ClusterFacts, *, pool: str, node: str) -> bool:
    """Whether the pool's daemon on that node is being replaced or started now, and nothing there fails."""
    pods = [pod for pod in facts.daemons if (pod.pool, pod.node) == (pool, node)]
    if any(fails(pod) for pod in pods):
        return False
    return is_rolling_out(facts, pool) or any(pod.is_deleting or is_young(facts, pod) for pod in pods)


def is_rolling_out(facts: ClusterFacts, pool: str) -> bool:
    """Whether the pool's daemons are being replaced."""
    return any(one.is_rolling_out for one in facts.daemonsets if one.pool == pool)


def is_refused(facts: ClusterFacts, *, pool: str, node: str) -> bool:
    """Whether the node has no daemon of the pool because the API server takes none."""
    has_pod = any((pod.pool, pod.node) == (pool, node) for pod in facts.daemons)
    return not has_pod and any(one.refusal for one in facts.daemonsets if one.pool == pool)


def is_young(facts: ClusterFacts, pod: DaemonPod) -> bool:
    """Whether the pod was created a moment ago and is not ready yet."""
    return not pod.is_ready and pod.created_at is not None and facts.now - pod.created_at < STARTING


def is_new(facts: ClusterFacts, one: KVOffloadPool | KVOffloadRegion) -> bool:
    """Whether the object was created a moment ago: who writes its status may not have seen it yet."""
    return one.created_at is not None and facts.now - one.created_at < STARTING


def speaks_of_itself(region: KVOffloadRegion) -> bool:
    """Whether the daemon says in the region why it does not serve."""
    ready = find(region.status.conditions, RegionCondition.READY)
    return ready is not None and ready.status != "True" and ready.reason not in PASSING_REASONS


def is_explained(facts: ClusterFacts, region: KVOffloadRegion) -> bool:
    """Whether another finding says why the region is not ready."""
    node_ready, ready = (
        find(region.status.conditions, kind) for kind in (RegionCondition.NODE_READY, RegionCondition.READY)
    )
    said = node_ready if node_ready is not None and node_ready.status == "False" else ready
    place = {"pool": region.spec.pool_name, "node": region.spec.node_name}
    if (ready is None or said is node_ready) and is_short_by_name(facts, **place):
        return True
    if said is ready and ready is not None and ready.reason == RegionReason.PAGES_UNAVAILABLE:
        return counts_missing_pages(facts, **place)
    if said is not None and said.reason not in (*PASSING_REASONS, RegionReason.DAEMON_FAILING):
        return False
    if is_refused(facts, **place):
        return True
    pods = [pod for pod in facts.daemons if (pod.pool, pod.node) == (place["pool"], place["node"])]
    return is_passing(facts, **place) or any(not pod.is_ready and not pod.is_deleting for pod in pods)
