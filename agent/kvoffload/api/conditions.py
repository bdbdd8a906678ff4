"""Conditions: their types, their reasons, and the rule by which they change.

Pure. The operator and the node daemon build conditions with `transition`; the tables below are the closed sets that
`docs/reference/conditions.md` explains to users.

    object   type                  True when                                                   set and cleared by
    pool     Ready                 every matching node that may serve does, and there is one   operator
    pool     RegionsProvisioned    every matching node has its KVOffloadRegion and daemon      operator
    pool     HugepagesAvailable    no matching node is short of pages                          operator
    pool     InjectionReady        the webhook answers and its certificate is trusted          operator
    pool     Degraded              something works worse than asked                            operator
    region   NodeReady             the daemon may run there: pages allocatable, pod scheduled  operator
    region   Ready                 the daemon serves engines                                   node daemon
    region   PagesReady            the capacity is reserved                                    node daemon
    region   Degraded              something works worse than asked                            node daemon
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from kvoffload.api.model import ApiModel

ConditionStatus = Literal["True", "False", "Unknown"]

MAX_CONDITIONS = 16
MAX_MESSAGE_LENGTH = 4096


class Condition(ApiModel):
    """One observation about an object (`metav1.Condition`)."""

    type: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64, description="type is what is observed.")]
    status: Annotated[
        ConditionStatus, Field(description="status is True, False, or Unknown where it cannot be told now.")
    ]
    observed_generation: Annotated[
        int,
        Field(
            default=0,
            ge=0,
            le=2**60,
            description="observedGeneration is metadata.generation of the spec that this speaks of.",
        ),
    ]
    last_transition_time: Annotated[
        datetime, Field(description="lastTransitionTime is when status last changed; other changes do not move it.")
    ]
    reason: Annotated[
        str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64, description="reason is one stable CamelCase word.")
    ]
    message: Annotated[
        str,
        Field(
            max_length=MAX_MESSAGE_LENGTH,
            description="message says with numbers what was found, what was needed, and the remedy.",
        ),
    ]


class PoolCondition(StrEnum):
    """Condition types of a KVOffloadPool."""

    READY = "Ready"
    REGIONS_PROVISIONED = "RegionsProvisioned"
    HUGEPAGES_AVAILABLE = "HugepagesAvailable"
    INJECTION_READY = "InjectionReady"
    DEGRADED = "Degraded"


class PoolReason(StrEnum):
    """Reasons in a KVOffloadPool's conditions."""

    ALL_NODES_READY = "AllNodesReady"
    SOME_NODES_NOT_READY = "SomeNodesNotReady"
    NO_NODE_READY = "NoNodeReady"
    NO_MATCHING_NODES = "NoMatchingNodes"
    INVALID_SPEC = "InvalidSpec"
    RECONCILE_FAILED = "ReconcileFailed"
    OBSERVING = "Observing"
    PAUSED = "Paused"
    ALL_REGIONS_PROVISIONED = "AllRegionsProvisioned"
    REGIONS_PENDING = "RegionsPending"
    PAGES_SUFFICIENT = "PagesSufficient"
    NODES_SHORT_OF_PAGES = "NodesShortOfPages"
    EXCEEDS_EVERY_NODE = "ExceedsEveryNode"
    PAGES_NOT_NEEDED = "PagesNotNeeded"
    WEBHOOK_SERVING = "WebhookServing"
    WEBHOOK_UNAVAILABLE = "WebhookUnavailable"
    CERTIFICATE_MISSING = "CertificateMissing"
    WEBHOOK_UNKNOWN = "WebhookUnknown"
    AS_ASKED = "AsAsked"
    REGIONS_DEGRADED = "RegionsDegraded"
    OVERLAPS_ANOTHER_POOL = "OverlapsAnotherPool"
    CRD_OUTDATED = "CRDOutdated"
    CRD_NEWER = "CRDNewer"
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    FALLBACK_IN_USE = "FallbackInUse"
    DAEMONSET_NAME_TAKEN = "DaemonSetNameTaken"


class RegionCondition(StrEnum):
    """Condition types of a KVOffloadRegion."""

    NODE_READY = "NodeReady"
    READY = "Ready"
    PAGES_READY = "PagesReady"
    DEGRADED = "Degraded"


class RegionReason(StrEnum):
    """Reasons in a KVOffloadRegion's conditions; the first six are the operator's, the rest the daemon's."""

    DAEMON_RUNNING = "DaemonRunning"
    NODE_SHORT_OF_PAGES = "NodeShortOfPages"
    TAINT_NOT_TOLERATED = "TaintNotTolerated"
    DAEMON_PENDING = "DaemonPending"
    DAEMON_NOT_REPORTING = "DaemonNotReporting"
    DAEMON_FAILING = "DaemonFailing"
    SERVING = "Serving"
    STARTING = "Starting"
    DRAINING = "Draining"
    PAUSED = "Paused"
    OBSERVING = "Observing"
    PAGES_RESERVED = "PagesReserved"
    PAGES_UNAVAILABLE = "PagesUnavailable"
    CGROUP_LIMIT = "CgroupLimit"
    NO_HUGETLBFS = "NoHugetlbfs"
    REGION_UNUSABLE = "RegionUnusable"
    SHARED_MEMORY_FALLBACK = "SharedMemoryFallback"
    SHRINK_WAITS = "ShrinkWaits"
    ATTACHER_MISSING = "AttacherMissing"
    NUMA_NODE_OUT_OF_REACH = "NumaNodeOutOfReach"
    DAEMON_IMPAIRED = "DaemonImpaired"
    AS_ASKED = "AsAsked"


def transition(
    previous: Iterable[Condition],
    *,
    type: str,
    status: ConditionStatus,
    reason: str,
    message: str,
    generation: int,
    now: datetime,
) -> Condition:
    """The condition as it is now; `lastTransitionTime` is kept from `previous` unless the status changed."""
    before = next((condition for condition in previous if condition.type == type), None)
    changed = before is None or before.status != status
    return Condition(
        type=type,
        status=status,
        observed_generation=generation,
        last_transition_time=now.replace(microsecond=0) if before is None or changed else before.last_transition_time,
        reason=reason,
        message=message if len(message) <= MAX_MESSAGE_LENGTH else message[: MAX_MESSAGE_LENGTH - 1] + "…",
    )


def find(conditions: Sequence[Condition], type: str) -> Condition | None:
    """The condition of that type, None if it has never been set."""
    return next((condition for condition in conditions if condition.type == type), None)
