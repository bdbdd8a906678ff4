"""Checks of pools, their nodes, pages, daemons and regions. Pure."""

from kvoffload.api.conditions import find
from kvoffload.api.pool import Fallback, Mode, PageSize
from kvoffload.units import format_bytes
from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.checks.nodes import misses_kubelet_folder
from kvoffload_cli.facts import ClusterFacts, NodePages

MANY_RESTARTS = 5


def pool_matches_no_node(facts: ClusterFacts) -> Found:
    """The selector selects nothing."""
    for pool in facts.pools:
        if facts.nodes and not facts.matching_nodes(pool):
            wanted = ",".join(f"{key}={value}" for key, value in pool.spec.node_selector.items())
            message = f"no node has all of the labels {wanted}"
            yield Severity.ERROR, f"pool/{pool.name}", message, f"kubectl get nodes -l {wanted}; correct nodeSelector"


def pools_overlap(facts: ClusterFacts) -> Found:
    """Two pools ask more of one node than it has."""
    for node in facts.nodes:
        for size in PageSize:
            here = [pool for pool in facts.pools if pool.spec.page_size is size and node in facts.matching_nodes(pool)]
            asked, pages = sum(pool.spec.capacity for pool in here), node.pages.get(size.value)
            if len(here) > 1 and pages and asked > pages.allocatable_bytes:
                names = ", ".join(pool.name for pool in here)
                message = (
                    f"pools {names} ask {format_bytes(asked)} of {size.resource_name} together, "
                    f"the node has {format_bytes(pages.allocatable_bytes)}"
                )
                yield Severity.ERROR, f"node/{node.name}", message, "narrow a nodeSelector, or lower a capacity"


def node_is_short_of_pages(facts: ClusterFacts) -> Found:
    """A matching node cannot give the pool's capacity, or others hold its pages."""
    for pool in facts.pools:
        if pool.spec.fallback is Fallback.SHARED_MEMORY or pool.spec.mode is not Mode.ACTIVE:
            continue
        size = pool.spec.page_size
        for node in facts.matching_nodes(pool):
            pages = node.pages.get(size.value)
            allocatable = pages.allocatable_bytes if pages else 0
            subject = f"node/{node.name}"
            if pages and allocatable < pool.spec.capacity <= pages.capacity_bytes:
                continue  # not for want of pages: `kubelet_reserves_pages`
            if allocatable < pool.spec.capacity:
                found = f"allocatable {size.resource_name} is {format_bytes(allocatable)}"
                message = f"{found}, pool {pool.name} needs {format_bytes(pool.spec.capacity)}"
                yield Severity.ERROR, subject, message, reserve_remedy(size, pool.spec.capacity, allocatable, pages)
            elif pages and pages.requested_bytes_by_pool.get(pool.name, 0) == 0:
                taken = pages.requested_bytes_by_others + sum(pages.requested_bytes_by_pool.values())
                if allocatable - taken < pool.spec.capacity:
                    message = (
                        f"{format_bytes(taken)} of {format_bytes(allocatable)} {size.resource_name} are requested by "
                        f"other pods, pool {pool.name} needs {format_bytes(pool.spec.capacity)}"
                    )
                    remedy = "reserve more pages, or move the pods: kubectl describe node " + node.name
                    yield Severity.ERROR, subject, message, remedy


def reserve_remedy(size: PageSize, needed_bytes: int, allocatable_bytes: int, pages: NodePages | None) -> str:
    """The commands that make the pages: sysctl for 2Mi, the kernel's command line for 1Gi; the kubelet's restart."""
    of_others = pages.requested_bytes_by_others if pages else 0
    num_pages = -(-(needed_bytes + of_others) // size.num_bytes)
    if size is PageSize.GI_1:
        return f"on the node: kernel command line hugepagesz=1G hugepages={num_pages}, reboot"
    return (
        f"on the node: sysctl -w vm.nr_hugepages={num_pages}, then systemctl restart kubelet "
        f"(it reported {format_bytes(allocatable_bytes)} when it started)"
    )


def daemon_does_not_run(facts: ClusterFacts) -> Found:
    """A pool's daemon pod is pending, failing or often restarted."""
    for pod in facts.daemons:
        subject = f"pod/{pod.namespace}/{pod.name}"
        if not pod.is_ready and not misses_kubelet_folder(pod):
            why = ": ".join(filter(None, (pod.waiting, pod.mount_failure))) or "not ready"
            message = f"{pod.phase} on node {pod.node or '(none)'}: {why}"
            yield Severity.ERROR, subject, message, f"kubectl -n {pod.namespace} describe pod {pod.name}"
        if pod.num_restarts >= MANY_RESTARTS:
            remedy = f"kubectl -n {pod.namespace} logs {pod.name} -c daemon --previous"
            yield Severity.WARNING, subject, f"restarted {pod.num_restarts} times", remedy


def region_does_not_serve(facts: ClusterFacts) -> Found:
    """A region says that it is not ready, or degraded, with the daemon's own words."""
    for region in facts.regions:
        subject, spec = f"region/{region.name}", region.spec
        if region.deleting:
            continue
        ready, degraded = (find(region.status.conditions, kind) for kind in ("Ready", "Degraded"))
        node_ready = find(region.status.conditions, "NodeReady")
        why = f"kubectl describe kvregion {region.name}"
        if ready is None:
            if node_ready is not None and node_ready.status == "False":
                yield Severity.ERROR, subject, f"{node_ready.reason}: {node_ready.message}", why
            else:
                yield Severity.ERROR, subject, "the node daemon has not reported yet", daemon_logs(spec.pool_name)
        elif ready.status != "True" and spec.mode is Mode.ACTIVE:
            yield Severity.ERROR, subject, f"{ready.reason}: {ready.message}", why
        if degraded is not None and degraded.status == "True":
            yield Severity.WARNING, subject, f"{degraded.reason}: {degraded.message}", why


def daemon_logs(pool: str) -> str:
    """How to read a pool's daemons' logs."""
    return f"kubectl logs -A -l kvoffload.io/daemon-of={pool} -c daemon --tail=20"


def pool_is_not_ready(facts: ClusterFacts) -> Found:
    """A pool's Ready condition is not True; its message names the nodes."""
    for pool in facts.pools:
        ready = find(pool.status.conditions, "Ready")
        if pool.spec.mode is not Mode.ACTIVE:
            message = f"mode is {pool.spec.mode.value}: no pod is served"
            yield (
                Severity.WARNING,
                f"pool/{pool.name}",
                message,
                f"kubectl patch kvpool {pool.name} --type merge -p " + ('\'{"spec":{"mode":"Active"}}\''),
            )
        elif ready is None:
            message = "the operator has not looked at it yet"
            yield Severity.ERROR, f"pool/{pool.name}", message, "see the findings about the operator"
        elif ready.status != "True":
            yield (
                Severity.WARNING if pool.status.nodes.ready else Severity.ERROR,
                f"pool/{pool.name}",
                f"{ready.reason}: {ready.message}",
                f"kubectl describe kvpool {pool.name}",
            )
