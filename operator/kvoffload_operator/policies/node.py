"""Why a node does not serve a pool. Pure; called by the region's reconciler for every matching node.

The checks run in order, and the first violation is the node's state: shortage of pages, then the daemon's pod, then
what the daemon itself reports. `None` from all of them is a node that serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvoffload.api.conditions import RegionCondition, RegionReason, find
from kvoffload.api.pool import Fallback, KVOffloadPoolSpec
from kvoffload.api.region import KVOffloadRegion
from kvoffload.api.reservation import reserve_remedy
from kvoffload.units import format_bytes
from kvoffload_operator.observe import ObservedDaemonPod, ObservedNode, ObservedTaint


class NodeState(StrEnum):
    """How a matching node is counted; the values are the names in `status.nodes`."""

    READY = "ready"
    SHORT_OF_PAGES = "short_of_pages"
    PENDING = "pending"
    NOT_REPORTING = "not_reporting"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node as one pool sees it."""

    node: ObservedNode
    spec: KVOffloadPoolSpec
    region: KVOffloadRegion | None
    daemon_pod: ObservedDaemonPod | None
    """None: there is none, or none was looked up because `all_available`."""
    all_available: bool
    """The DaemonSet says that every wanted pod runs the newest template and is available."""
    labelled: bool
    """Whether the node carries the label that lets the daemon run there."""
    bytes_of_other_pools: int
    """Pages of this size that other pools' daemons have on this node."""
    now: datetime
    silence_seconds: float

    @property
    def daemon_runs(self) -> bool:
        """Whether the pool's daemon runs there now."""
        return (self.all_available and self.labelled) or (self.daemon_pod is not None and self.daemon_pod.is_running)

    @property
    def holds_capacity(self) -> bool:
        """Whether a running daemon has reserved what is asked: then nothing can be too little any more."""
        return self.daemon_runs and self.region is not None and self.region.status.capacity_bytes >= self.spec.capacity


@dataclass(frozen=True, slots=True)
class NodeViolation:
    """The first thing that is wrong with a node."""

    state: NodeState
    reason: RegionReason
    message: str


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """How one pool counts a node."""

    node: str
    violation: NodeViolation | None
    """None: it serves."""

    @property
    def state(self) -> NodeState:
        """The violation's, or ready."""
        return self.violation.state if self.violation is not None else NodeState.READY


NodeCheck = Callable[[NodeFacts], NodeViolation | None]

_TOLERATED_BY_DAEMONSETS = frozenset(
    f"node.kubernetes.io/{name}"
    for name in ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
)
"""Taints that Kubernetes' DaemonSet controller adds a toleration for to every pod without host network."""


def is_short_of_pages(facts: NodeFacts) -> NodeViolation | None:
    """The node's allocatable pages, less those of other pools, do not hold the capacity."""
    spec, node = facts.spec, facts.node
    if spec.fallback is Fallback.SHARED_MEMORY or facts.holds_capacity:
        return None
    size = spec.page_size
    allocatable = node.allocatable_page_bytes[size]
    available = allocatable - facts.bytes_of_other_pools
    if available >= spec.capacity:
        return None
    missing_pages = -(-(spec.capacity - available) // size.num_bytes)
    wanted_pages = node.total_page_bytes[size] // size.num_bytes + missing_pages
    taken = (
        f", {format_bytes(facts.bytes_of_other_pools)} of them used by other pools"
        if facts.bytes_of_other_pools
        else ""
    )
    return NodeViolation(
        NodeState.SHORT_OF_PAGES,
        RegionReason.NODE_SHORT_OF_PAGES,
        f"node {node.name} has {format_bytes(allocatable)} of allocatable {size.value} pages{taken}, needed "
        f"{format_bytes(spec.capacity)}: {missing_pages} pages too few. Lower the pool's capacity, or "
        f"{reserve_remedy(size, wanted_pages)}",
    )


def daemon_fails(facts: NodeFacts) -> NodeViolation | None:
    """The daemon's pod has a container that does not start or keeps ending."""
    pod = facts.daemon_pod
    if pod is None or not pod.problem.startswith("container "):
        return None
    return NodeViolation(
        NodeState.FAILING,
        RegionReason.DAEMON_FAILING,
        f"daemon pod {pod.name} on node {facts.node.name}: {pod.problem}; see `kubectl logs {pod.name} --previous`",
    )


def taint_is_not_tolerated(facts: NodeFacts) -> NodeViolation | None:
    """No daemon runs there, and none is made: the DaemonSet controller passes over nodes whose taints it may not."""
    if facts.daemon_runs:
        return None
    unknown = [taint for taint in facts.node.taints if not _is_tolerated(taint, facts.spec)]
    if not unknown:
        return None
    taint = unknown[0]
    toleration = f"{{key: {taint.key}, operator: Exists, effect: {taint.effect}}}"
    return NodeViolation(
        NodeState.PENDING,
        RegionReason.TAINT_NOT_TOLERATED,
        f"node {facts.node.name} has the taint {taint}, which the pool does not tolerate: no daemon runs there. Add "
        f"`{toleration}` to spec.tolerations, or leave the node out by spec.nodeSelector",
    )


def _is_tolerated(taint: ObservedTaint, spec: KVOffloadPoolSpec) -> bool:
    return taint.key in _TOLERATED_BY_DAEMONSETS or any(
        one.effect in ("", taint.effect)
        and (one.key == taint.key or (one.key == "" and one.operator == "Exists"))
        and (one.operator == "Exists" or one.value == taint.value)
        for one in spec.tolerations
    )


def daemon_is_pending(facts: NodeFacts) -> NodeViolation | None:
    """No daemon runs there yet."""
    pod = facts.daemon_pod
    if facts.daemon_runs:
        return None
    starting = "it is being started; where that lasts, `kubectl kvoffload doctor` says why"
    found = "is not created yet" if pod is None else f"{pod.name} is pending: {pod.problem or starting}"
    return NodeViolation(
        NodeState.PENDING, RegionReason.DAEMON_PENDING, f"daemon pod for node {facts.node.name} {found}"
    )


NODE_CHECKS: tuple[NodeCheck, ...] = (is_short_of_pages, daemon_fails, taint_is_not_tolerated, daemon_is_pending)
"""What the operator knows: the condition NodeReady."""


def daemon_does_not_report(facts: NodeFacts) -> NodeViolation | None:
    """The daemon runs, and its region has no Ready condition for the present spec after a while."""
    region = facts.region
    ready = find(region.status.conditions, RegionCondition.READY) if region else None
    if region is not None and ready is not None and region.status.observed_generation >= region.generation:
        return None
    node_ready = find(region.status.conditions, RegionCondition.NODE_READY) if region else None
    since = node_ready.last_transition_time if node_ready is not None and node_ready.status == "True" else facts.now
    waited = (facts.now - since).total_seconds()
    if waited < facts.silence_seconds:
        return NodeViolation(
            NodeState.PENDING, RegionReason.STARTING, f"the daemon on node {facts.node.name} has not reported yet"
        )
    generation = region.generation if region else 0
    return NodeViolation(
        NodeState.NOT_REPORTING,
        RegionReason.DAEMON_NOT_REPORTING,
        f"the daemon on node {facts.node.name} has not reported generation {generation} for {waited:.0f} s, needed "
        f"within {facts.silence_seconds:.0f} s: see its log, and whether it reaches the API server",
    )


def daemon_reports_problem(facts: NodeFacts) -> NodeViolation | None:
    """The daemon says that it does not serve; its own reason and message are passed on."""
    ready = find(facts.region.status.conditions, RegionCondition.READY) if facts.region else None
    if ready is None or ready.status == "True":
        return None
    try:
        reason = RegionReason(ready.reason)
    except ValueError:  # a newer daemon's
        reason = RegionReason.DAEMON_FAILING
    state = NodeState.PENDING if reason is RegionReason.STARTING else NodeState.FAILING
    return NodeViolation(state, reason, f"node {facts.node.name}: {ready.message}")


REPORT_CHECKS: tuple[NodeCheck, ...] = (daemon_does_not_report, daemon_reports_problem)
"""What the daemon says."""


def first_violation(facts: NodeFacts, checks: tuple[NodeCheck, ...]) -> NodeViolation | None:
    """Run the checks in order and return the first violation."""
    return next((violation for check in checks if (violation := check(facts)) is not None), None)
