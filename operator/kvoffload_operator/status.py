"""The pool's status: conditions from the nodes' states, sums, and the events of what changed.

`build_pool_status` is pure. The pool's reconciler writes it once a pass if it differs, and emits the events after that
write has landed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from kvoffload.api.conditions import (
    Condition,
    ConditionStatus,
    PoolCondition,
    PoolReason,
    RegionCondition,
    RegionReason,
    find,
    transition,
)
from kvoffload.api.model import MAX_BYTE_COUNT, MAX_COUNT
from kvoffload.api.pool import (
    MAX_PROBLEMS,
    EngineCounts,
    Fallback,
    KVOffloadPoolSpec,
    KVOffloadPoolStatus,
    Mode,
    NodeCounts,
    NodeProblem,
)
from kvoffload.api.region import KVOffloadRegion
from kvoffload.units import format_bytes
from kvoffload_operator.observe import ObservedPool
from kvoffload_operator.policies.node import NodeState, NodeVerdict, NodeViolation
from kvoffload_operator.policies.pool import PoolViolation

MAX_MESSAGE_NODES = 3
MAX_PROBLEM_MESSAGE = 1024
MAX_ERROR_MESSAGE = 600
AS_TOLD = frozenset({PoolReason.OBSERVING, PoolReason.PAUSED, PoolReason.ROLLOUT_IN_PROGRESS})
"""Reasons of a condition that is False because the pool does what its administrator said: no warning."""
PAGES_REFUSED = frozenset({RegionReason.PAGES_UNAVAILABLE, RegionReason.CGROUP_LIMIT, RegionReason.NO_HUGETLBFS})
"""Reasons of a daemon that cannot have pages, whatever the kubelet says of them."""
BEGINNING = frozenset({PoolReason.NO_NODE_READY, PoolReason.REGIONS_PENDING})
"""Reasons that every pool has in its first seconds."""


@dataclass(frozen=True, slots=True)
class InjectionHealth:
    """Whether pods are injected at present, as the leader sees it."""

    reason: PoolReason
    message: str

    @property
    def is_serving(self) -> bool:
        """Whether the webhook answers with a trusted certificate."""
        return self.reason is PoolReason.WEBHOOK_SERVING


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition whose status or reason changed: an event."""

    condition: Condition
    is_first: bool = False
    """Of a new pool, which had no such condition before."""

    @property
    def is_warning(self) -> bool:
        """Whether it is a change for the worse that nobody asked for."""
        if self.condition.reason in AS_TOLD or (self.is_first and self.condition.reason in BEGINNING):
            return False
        bad = "True" if self.condition.type == PoolCondition.DEGRADED else "False"
        return self.condition.status == bad


def build_invalid_status(pool: ObservedPool, problem: str, now: datetime) -> KVOffloadPoolStatus:
    """Status of a pool whose spec cannot be acted on: what was there stays, and Ready says why."""
    message = f"{problem}; nodes keep what they were told last"
    return _build_unacted_status(pool, PoolReason.INVALID_SPEC, message, now)


def build_failed_status(pool: ObservedPool, error: Exception, now: datetime) -> KVOffloadPoolStatus:
    """Status of a pool whose pass raised what trying again may not mend: what was there stays, and Ready says so."""
    message = (
        f"the operator failed at this pool ({type(error).__name__}: {str(error)[:MAX_ERROR_MESSAGE]}) and tries again: "
        "see its log; nodes keep what they were told last"
    )
    return _build_unacted_status(pool, PoolReason.RECONCILE_FAILED, message, now)


def _build_unacted_status(pool: ObservedPool, reason: PoolReason, message: str, now: datetime) -> KVOffloadPoolStatus:
    ready = transition(
        pool.status.conditions,
        type=PoolCondition.READY,
        status="False",
        reason=reason,
        message=message,
        generation=pool.generation,
        now=now,
    )
    others = [one for one in pool.status.conditions if one.type != PoolCondition.READY]
    return pool.status.model_copy(update={"conditions": [ready, *others], "observed_generation": pool.generation})


def build_pool_status(
    pool: ObservedPool,
    spec: KVOffloadPoolSpec,
    *,
    nodes: Sequence[NodeVerdict],
    regions: Mapping[str, KVOffloadRegion],
    no_match: PoolViolation | None,
    name_taken: PoolViolation | None,
    shortage: PoolViolation | None,
    degradations: Sequence[PoolViolation],
    injection: InjectionHealth,
    rollout_message: str,
    now: datetime,
) -> KVOffloadPoolStatus:
    """The whole status. `nodes` are the matching nodes, `regions` the pool's regions by node."""
    previous = pool.status.conditions
    counts = _count(nodes)

    def condition(type: PoolCondition, status: ConditionStatus, reason: PoolReason, message: str) -> Condition:
        return transition(
            previous, type=type, status=status, reason=reason, message=message, generation=pool.generation, now=now
        )

    served = [regions[verdict.node] for verdict in nodes if verdict.node in regions]
    # a region's numbers count while its daemon answers for them, also of a pool that is paused and keeps its pages
    alive = [regions[verdict.node] for verdict in nodes if verdict.node in regions and _answers(verdict)]
    return KVOffloadPoolStatus(
        observed_generation=pool.generation,
        conditions=[
            condition(PoolCondition.READY, *_ready(spec, nodes, counts, no_match)),
            condition(
                PoolCondition.REGIONS_PROVISIONED,
                *_provisioned(spec, nodes, counts, name_taken or no_match, rollout_message),
            ),
            condition(PoolCondition.HUGEPAGES_AVAILABLE, *_pages(spec, nodes, counts, shortage, no_match)),
            condition(
                PoolCondition.INJECTION_READY,
                "True" if injection.is_serving else "False",
                injection.reason,
                injection.message,
            ),
            condition(PoolCondition.DEGRADED, *_degraded(served, degradations)),
        ],
        nodes=counts,
        problems=[
            NodeProblem(
                node=verdict.node,
                reason=verdict.violation.reason,
                message=verdict.violation.message[:MAX_PROBLEM_MESSAGE],
            )
            for verdict in sorted(nodes, key=lambda verdict: verdict.node)
            if verdict.violation is not None and not _is_as_told(spec, verdict.violation)
        ][:MAX_PROBLEMS],
        capacity_bytes=_sum((region.status.capacity_bytes for region in alive), MAX_BYTE_COUNT),
        used_bytes=_sum((region.status.used_bytes for region in alive), MAX_BYTE_COUNT),
        free_bytes=_sum((region.status.free_bytes for region in alive), MAX_BYTE_COUNT),
        saved_bytes=_sum((region.status.saved_bytes for region in alive), MAX_BYTE_COUNT),
        engines=EngineCounts(
            attached=_sum((region.status.engines_attached for region in alive), MAX_COUNT),
            replicated=_sum((region.status.engines_replicated for region in alive), MAX_COUNT),
        ),
    )


def _sum(counts: Iterable[int], most: int) -> int:
    """The sum, or the most that a status takes: each region's number is its daemon's word."""
    return min(sum(counts), most)


def _is_as_told(spec: KVOffloadPoolSpec, violation: NodeViolation) -> bool:
    """Whether the node does not serve only because the pool's mode says so."""
    if spec.mode is Mode.OBSERVE and violation.state is NodeState.PENDING:
        return True  # no daemon is made
    return violation.reason in (RegionReason.OBSERVING, RegionReason.PAUSED)


def _count(nodes: Sequence[NodeVerdict]) -> NodeCounts:
    by_state = {state.value: sum(verdict.state is state for verdict in nodes) for state in NodeState}
    return NodeCounts(matching=len(nodes), **by_state)


Verdict = tuple[ConditionStatus, PoolReason, str]


def _ready(
    spec: KVOffloadPoolSpec, nodes: Sequence[NodeVerdict], counts: NodeCounts, no_match: PoolViolation | None
) -> Verdict:
    if no_match is not None:
        return "False", no_match.reason, no_match.message
    if spec.mode is Mode.OBSERVE:
        able = counts.matching - counts.short_of_pages
        give = format_bytes(able * spec.capacity)
        found = f"{able} of {counts.matching} nodes could give {give} in all"
        return "False", PoolReason.OBSERVING, f"mode is Observe: {found}; set mode: Active to use them"
    if spec.mode is Mode.PAUSED:
        return (
            "False",
            PoolReason.PAUSED,
            "mode is Paused: engines are detached and pages kept; set mode: Active to go on",
        )
    found = f"{counts.ready} of {counts.matching} nodes ready"
    if counts.ready == counts.matching:
        return "True", PoolReason.ALL_NODES_READY, found
    detail = _name_problems(nodes)
    if counts.ready == 0:
        return "False", PoolReason.NO_NODE_READY, f"{found}. {detail}"
    return "False", PoolReason.SOME_NODES_NOT_READY, f"{found}, pods are served there. {detail}"


def _answers(verdict: NodeVerdict) -> bool:
    return verdict.state is NodeState.READY or (
        verdict.violation is not None and verdict.violation.reason in (RegionReason.PAUSED, RegionReason.OBSERVING)
    )


def _name_problems(nodes: Sequence[NodeVerdict], *states: NodeState) -> str:
    violations = [
        verdict.violation
        for verdict in sorted(nodes, key=lambda verdict: verdict.node)
        if verdict.violation is not None and (not states or verdict.state in states)
    ]
    named = "; ".join(violation.message for violation in violations[:MAX_MESSAGE_NODES])
    more = len(violations) - MAX_MESSAGE_NODES
    return f"{named}; and {more} more nodes (status.problems)" if more > 0 else named


def _provisioned(
    spec: KVOffloadPoolSpec,
    nodes: Sequence[NodeVerdict],
    counts: NodeCounts,
    obstacle: PoolViolation | None,
    rollout_message: str,
) -> Verdict:
    if obstacle is not None:
        return "False", obstacle.reason, obstacle.message
    if spec.mode is Mode.OBSERVE:
        return "False", PoolReason.OBSERVING, "mode is Observe: no region or daemon is made"
    fit = counts.matching - counts.short_of_pages
    if not fit:
        found = f"none of {counts.matching} nodes has the pages, so no daemon is made: see HugepagesAvailable"
        return "False", PoolReason.NODES_SHORT_OF_PAGES, found
    waiting = counts.pending
    if waiting:
        detail = _name_problems(nodes, NodeState.PENDING)
        return "False", PoolReason.REGIONS_PENDING, f"{fit - waiting} of {fit} daemons run. {detail}"
    if rollout_message:
        return "False", PoolReason.ROLLOUT_IN_PROGRESS, rollout_message
    return "True", PoolReason.ALL_REGIONS_PROVISIONED, f"{fit} of {fit} daemons run"


def _pages(
    spec: KVOffloadPoolSpec,
    nodes: Sequence[NodeVerdict],
    counts: NodeCounts,
    shortage: PoolViolation | None,
    no_match: PoolViolation | None,
) -> Verdict:
    if spec.fallback is Fallback.SHARED_MEMORY:
        return "True", PoolReason.PAGES_NOT_NEEDED, "fallback is SharedMemory: 4 KiB pages on tmpfs are used, none huge"
    if no_match is not None:
        return "Unknown", no_match.reason, no_match.message
    if shortage is not None:
        return "False", shortage.reason, f"{shortage.message}. {_name_problems(nodes, NodeState.SHORT_OF_PAGES)}"
    if counts.short_of_pages:
        detail = _name_problems(nodes, NodeState.SHORT_OF_PAGES)
        found = f"{counts.short_of_pages} of {counts.matching} nodes are short of pages"
        return "False", PoolReason.NODES_SHORT_OF_PAGES, f"{found}. {detail}"
    refused = [
        verdict.violation.message
        for verdict in sorted(nodes, key=lambda verdict: verdict.node)
        if verdict.violation is not None and verdict.violation.reason in PAGES_REFUSED
    ]
    if refused:
        found = f"{len(refused)} of {counts.matching} nodes do not give the pages that their kubelet counts"
        return "False", PoolReason.NODES_SHORT_OF_PAGES, f"{found}. {'; '.join(refused[:MAX_MESSAGE_NODES])}"
    need = f"{format_bytes(spec.capacity)} of {spec.page_size.value} pages"
    return "True", PoolReason.PAGES_SUFFICIENT, f"each of {counts.matching} nodes has {need} allocatable"


def _degraded(regions: Sequence[KVOffloadRegion], degradations: Sequence[PoolViolation]) -> Verdict:
    degraded = []
    for region in sorted(regions, key=lambda region: region.spec.node_name):
        condition = find(region.status.conditions, RegionCondition.DEGRADED)
        if condition is not None and condition.status == "True":
            degraded.append(f"node {region.spec.node_name}: {condition.message}")
    if degraded:
        named = "; ".join(degraded[:MAX_MESSAGE_NODES])
        others = [violation.message for violation in degradations]
        message = "; ".join([f"{len(degraded)} regions are degraded: {named}", *others])
        return "True", PoolReason.REGIONS_DEGRADED, message
    if degradations:
        return "True", degradations[0].reason, "; ".join(violation.message for violation in degradations)
    return "False", PoolReason.AS_ASKED, "everything works as asked"


def count_degradations(status: KVOffloadPoolStatus, regions: Iterable[KVOffloadRegion]) -> Mapping[str, int]:
    """Why the pool is degraded: its regions by the reason that each gives, or 1 for a reason of the pool's own."""
    condition = find(status.conditions, PoolCondition.DEGRADED)
    if condition is None or condition.status != "True":
        return {}
    if condition.reason != PoolReason.REGIONS_DEGRADED:
        return {condition.reason: 1}
    found = (find(region.status.conditions, RegionCondition.DEGRADED) for region in regions)
    return Counter(one.reason for one in found if one is not None and one.status == "True")


def find_transitions(previous: KVOffloadPoolStatus, status: KVOffloadPoolStatus) -> list[Transition]:
    """Conditions whose status or reason is not what it was."""
    changed = []
    for condition in status.conditions:
        old = find(previous.conditions, condition.type)
        change = Transition(condition, is_first=old is None)
        if old is None:
            # a new pool: only what is wrong is news, and whether it is ready
            is_news = change.is_warning or condition.type == PoolCondition.READY
        else:
            is_news = (old.status, old.reason) != (condition.status, condition.reason)
        if is_news:
            changed.append(change)
    return changed
