"""Checks of pools, their nodes, pages, daemons and regions. Pure."""

from kvoffload.api.conditions import PoolCondition, RegionCondition, find
from kvoffload.api.pool import KVOffloadPool, Mode, PageSize
from kvoffload.api.reservation import reserve_remedy
from kvoffload.units import format_bytes
from kvoffload_cli.checks.causes import (
    allocatable_bytes,
    fails,
    holds_pages,
    is_explained,
    is_new,
    is_passing,
    is_refused,
    is_rolling_out,
    is_short,
    is_short_by_name,
    is_young,
    needs_pages,
    speaks_of_itself,
    taken_bytes,
)
from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.checks.nodes import misses_kubelet_folder
from kvoffload_cli.facts import ClusterFacts, DaemonPod, NodeFacts, Part, lacks_image
from kvoffload_cli.remedies import MEND_IMAGE

MANY_RESTARTS = 5
NOT_REPORTED = "the node daemon has not reported yet"


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
            here = [
                pool
                for pool in facts.pools
                if pool.spec.page_size is size and holds_pages(pool) and node in facts.matching_nodes(pool)
            ]
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
        if not needs_pages(pool):
            continue
        size, capacity = pool.spec.page_size, format_bytes(pool.spec.capacity)
        for node in facts.matching_nodes(pool):
            if not is_short(pool, node):
                continue
            allocatable, taken = allocatable_bytes(pool, node), taken_bytes(pool, node)
            remedy = reserve_remedy(size, wanted_pages(pool, node))
            if allocatable < pool.spec.capacity:
                found = f"the kubelet knows of {format_bytes(allocatable)} of {size.resource_name}"
            else:
                numbers = f"{format_bytes(taken)} of {format_bytes(allocatable)}"
                found = f"{numbers} {size.resource_name} are requested by other pods"
                remedy += f"; or move the pods: kubectl describe node {node.name}"
            yield Severity.ERROR, f"node/{node.name}", f"{found}, pool {pool.name} needs {capacity}", remedy


def wanted_pages(pool: KVOffloadPool, node: NodeFacts) -> int:
    """How many pages the node needs in all: the pool's, and those that pods of others and of other pools request."""
    pages = node.pages.get(pool.spec.page_size.value)
    taken = 0
    if pages:
        of_pools = pages.requested_bytes_by_pool
        taken = pages.requested_bytes_by_others + sum(of_pools.values()) - of_pools.get(pool.name, 0)
    return -(-(pool.spec.capacity + taken) // pool.spec.page_size.num_bytes)


def daemons_are_replaced(facts: ClusterFacts) -> Found:
    """A rollout is under way, as after an upgrade of the chart: what it causes is no fault."""
    for one in facts.daemonsets:
        if one.is_rolling_out:
            updated = f"{one.num_updated} of {one.num_desired} daemons" if one.is_observed else "no daemon yet"
            yield (
                Severity.WARNING,
                f"daemonset/{one.namespace}/{one.name}",
                f"a rollout is under way: {updated} replaced; engines attach again by themselves",
                f"kubectl -n {one.namespace} rollout status daemonset {one.name}",
            )
    for pod in facts.daemons:
        if is_young(facts, pod) and not fails(pod) and not is_rolling_out(facts, pod.pool):
            message = f"the daemon of pool {pod.pool} on node {pod.node} is being started"
            remedy = "wait a moment; it should be ready within two minutes"
            yield Severity.WARNING, f"pod/{pod.namespace}/{pod.name}", message, remedy


def daemon_pods_are_refused(facts: ClusterFacts) -> Found:
    """The API server takes no pod of a pool's daemon: Pod Security, a quota or a policy of the namespace."""
    for one in facts.daemonsets:
        if not one.refusal:
            continue
        there = f"-n {one.namespace}"
        mend = f"kubectl {there} describe daemonset {one.name}; let its namespace take this pod"
        if "PodSecurity" in one.refusal:
            label = "pod-security.kubernetes.io/enforce=privileged"
            mend = f"kubectl label namespace {one.namespace} {label} --overwrite"
        again = f'kubectl {there} annotate daemonset {one.name} kvoffload.io/tried-again="$(date)" --overwrite'
        yield (
            Severity.ERROR,
            f"daemonset/{one.namespace}/{one.name}",
            f"{one.num_missing} of {one.num_desired} nodes have no daemon of pool {one.pool}: {one.refusal}",
            f"{mend}; its controller tries again within 17 minutes, or at once: {again}",
        )


def daemon_does_not_run(facts: ClusterFacts) -> Found:
    """A pool's daemon pod is pending, failing or often restarted."""
    for pod in facts.daemons:
        subject = f"pod/{pod.namespace}/{pod.name}"
        if not pod.is_ready and not misses_kubelet_folder(pod) and not daemon_is_explained(facts, pod):
            why = ": ".join(filter(None, (pod.waiting, pod.mount_failure))) or "not ready"
            message = f"{pod.phase} on node {pod.node or '(none)'}: {why}"
            remedy = f"kubectl -n {pod.namespace} describe pod {pod.name}"
            if lacks_image(pod.waits):
                remedy = f"{MEND_IMAGE}; the kubelet's words: {remedy}"
            yield Severity.ERROR, subject, message, remedy
        if pod.num_restarts >= MANY_RESTARTS:
            remedy = f"kubectl -n {pod.namespace} logs {pod.name} -c daemon --previous"
            yield Severity.WARNING, subject, f"restarted {pod.num_restarts} times", remedy


def daemon_is_explained(facts: ClusterFacts, pod: DaemonPod) -> bool:
    """Whether another finding says why the daemon's pod is not ready."""
    place = {"pool": pod.pool, "node": pod.node}
    if is_passing(facts, **place):
        return True
    if fails(pod):
        return "hugepages" in pod.unscheduled and is_short_by_name(facts, **place)
    region = facts.region(**place)
    return region is not None and not region.deleting and speaks_of_itself(region)


def region_does_not_serve(facts: ClusterFacts) -> Found:
    """A region says that it is not ready, or degraded, with the daemon's own words."""
    for region in facts.regions:
        subject, spec = f"region/{region.name}", region.spec
        if region.deleting:
            continue
        kinds = (RegionCondition.READY, RegionCondition.NODE_READY, RegionCondition.DEGRADED)
        ready, node_ready, degraded = (find(region.status.conditions, kind) for kind in kinds)
        why = f"kubectl describe kvregion {region.name}"
        if (ready is None or ready.status != "True") and is_explained(facts, region):
            pass
        elif ready is None:
            if node_ready is not None and node_ready.status == "False":
                yield Severity.ERROR, subject, f"{node_ready.reason}: {node_ready.message}", why
            else:
                severity = Severity.WARNING if is_new(facts, region) else Severity.ERROR
                yield severity, subject, NOT_REPORTED, daemon_logs(spec.pool_name)
        elif ready.status != "True" and spec.mode is Mode.ACTIVE:
            yield Severity.ERROR, subject, f"{ready.reason}: {ready.message}", why
        is_of_the_past = is_refused(facts, pool=spec.pool_name, node=spec.node_name)  # the daemon that wrote it is gone
        if degraded is not None and degraded.status == "True" and not is_of_the_past:
            yield Severity.WARNING, subject, f"{degraded.reason}: {degraded.message}", why


def daemon_logs(pool: str) -> str:
    """How to read a pool's daemons' logs."""
    return f"kubectl logs -A -l kvoffload.io/daemon-of={pool} -c daemon --tail=20"


def pool_is_not_ready(facts: ClusterFacts) -> Found:
    """A pool's Ready condition is not True, and nothing said before explains it; its message names the nodes."""
    for pool in facts.pools:
        ready = find(pool.status.conditions, PoolCondition.READY)
        if pool.spec.mode is Mode.ACTIVE and is_pool_explained(facts, pool):
            continue
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
            if is_new(facts, pool):
                yield Severity.WARNING, f"pool/{pool.name}", message, "wait a moment; it should within two minutes"
            else:
                yield Severity.ERROR, f"pool/{pool.name}", message, "see the findings about the operator"
        elif ready.status != "True":
            yield (
                Severity.WARNING if pool.status.nodes.ready else Severity.ERROR,
                f"pool/{pool.name}",
                f"{ready.reason}: {ready.message}",
                f"kubectl describe kvpool {pool.name}",
            )


def is_pool_explained(facts: ClusterFacts, pool: KVOffloadPool) -> bool:
    """Whether a finding about the operator, a node, a daemon or a region says why the pool is not ready."""
    if find(pool.status.conditions, PoolCondition.READY) is None:
        has_operator = any(one.component == "operator" and one.num_ready for one in facts.workloads)
        return not has_operator and Part.DEPLOYMENTS not in facts.unread
    nodes = facts.matching_nodes(pool)
    if facts.nodes and not nodes:
        return True
    if any(is_short(pool, node) for node in nodes) or is_rolling_out(facts, pool.name):
        return True
    if any(one.refusal for one in facts.daemonsets if one.pool == pool.name):
        return True
    if any(pod.pool == pool.name and not pod.is_ready for pod in facts.daemons):
        return True
    regions = {region.name for region in facts.regions if region.spec.pool_name == pool.name}
    of_regions = [
        subject.removeprefix("region/")
        for severity, subject, message, _ in region_does_not_serve(facts)
        if severity is Severity.ERROR or message == NOT_REPORTED
    ]
    return not regions.isdisjoint(of_regions)
