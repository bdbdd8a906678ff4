"""KVOffloadPool: what an administrator asks for, and what the operator says about it.

The CRD is generated from these models (`schema.py`); the operator reads pools through them. Rules that need more than
one field stand in `pool_rules.py` as CEL, so that the API server refuses what cannot be; the operator's
`webhook/validation.py` says the same of pools that an older CRD let in.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvoffload.api.conditions import MAX_CONDITIONS, Condition
from kvoffload.api.model import (
    DNS_LABEL_PATTERN,
    ApiModel,
    ApiObject,
    Count,
    LabelKey,
    LabelValue,
    MemoryStatus,
    NamespaceName,
    NodeName,
    Quantity,
    read_metadata,
)
from kvoffload.api.pool_rules import QUOTA_RULES, SPEC_RULES

MAX_POOL_NAME_LENGTH = 40
POOL_NAME_PATTERN = DNS_LABEL_PATTERN
MAX_QUOTAS = 128
MAX_PROBLEMS = 32


class PageSize(StrEnum):
    """Sizes of huge pages."""

    MI_2 = "2Mi"
    GI_1 = "1Gi"

    @property
    def num_bytes(self) -> int:
        """Bytes of one page."""
        return 2 << 20 if self is PageSize.MI_2 else 1 << 30

    @property
    def resource_name(self) -> str:
        """Kubernetes' name of the resource."""
        return f"hugepages-{self.value}"


class Fallback(StrEnum):
    """What a node does that has too few huge pages."""

    NONE = "None"
    SHARED_MEMORY = "SharedMemory"


class NumaPolicy(StrEnum):
    """On which NUMA nodes extents are placed."""

    INTERLEAVE = "Interleave"
    LOCAL = "Local"


class ReplicatedLayout(StrEnum):
    """Whether engines may keep one copy for all ranks."""

    AUTO = "Auto"
    NEVER = "Never"


class Sharing(StrEnum):
    """Whose engines may read each other's blocks: the tenant."""

    NAMESPACE = "Namespace"
    POOL = "Pool"
    POD = "Pod"


class EvictionPolicy(StrEnum):
    """Which slots are given up first."""

    LRU = "LRU"


class Attachment(StrEnum):
    """How strongly pods are drawn to nodes where the pool is ready."""

    PREFERRED = "Preferred"
    REQUIRED = "Required"


class Mode(StrEnum):
    """What the pool does."""

    ACTIVE = "Active"
    OBSERVE = "Observe"
    PAUSED = "Paused"


class ReclaimPolicy(StrEnum):
    """What happens to the pages when the pool, or a node's part in it, goes."""

    DELETE = "Delete"
    RETAIN = "Retain"


class HugetlbfsMount(StrEnum):
    """Where the daemon finds a hugetlbfs of the page size."""

    HOST = "Host"
    MANAGED = "Managed"


class LabelSelectorRequirement(ApiModel):
    """One expression of a label selector."""

    key: LabelKey = Field(description="key is the label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="operator relates key and values: In, NotIn, Exists or DoesNotExist."
    )
    values: list[LabelValue] = Field(
        default=[],
        max_length=32,
        description="values are compared by In and NotIn, which need at least one; Exists and DoesNotExist take none.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether it is true of an object with these labels; one without the key is NotIn any values."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelector(ApiModel):
    """A label selector as Kubernetes writes it; all of it must match, and an empty one selects everything."""

    match_labels: dict[LabelKey, LabelValue] = Field(
        default={}, max_length=32, description="matchLabels are labels that must all be there with these values."
    )
    match_expressions: list[LabelSelectorRequirement] = Field(
        default=[],
        max_length=32,
        description="matchExpressions must all be true.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether it takes an object with these labels."""
        labels_match = all(labels.get(key) == value for key, value in self.match_labels.items())
        return labels_match and all(requirement.holds(labels) for requirement in self.match_expressions)


SYSTEM_NAMESPACE = "kube-system"


def allows_namespace(
    selector: LabelSelector | None, namespace: str, labels: Mapping[str, str], *, operator_namespace: str
) -> bool:
    """Whether pods of this namespace, which has these labels, may attach: webhook and attacher ask it alike.

    A selector alone decides; without one it is all but kube-system and the operator's own.
    """
    if selector is None:
        return namespace not in (SYSTEM_NAMESPACE, operator_namespace)
    return selector.selects(labels)


GPU_TOLERATION: Mapping[str, Any] = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""What GPU pods tolerate where GPU nodes are tainted, and so the daemon beside them."""


class Toleration(ApiModel):
    """A taint that the node daemon tolerates, as in a pod."""

    key: Annotated[str, Field(max_length=317)] = Field(
        default="", description="key of the taint; empty with operator Exists tolerates every taint."
    )
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="operator is Equal or Exists.")
    value: LabelValue = Field(default="", description="value of the taint, with operator Equal.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="effect of the taint; empty tolerates every effect."
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        default=None, description="tolerationSeconds is how long a NoExecute taint is tolerated; absent: for ever."
    )


class Quota(ApiModel):
    """Bytes of one Kubernetes namespace on each node, counted by the namespace of the pod that stored."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": [dict(rule) for rule in QUOTA_RULES]})

    namespace: NamespaceName = Field(description="namespace is the Kubernetes namespace that this quota is for.")
    guaranteed: Quantity = Field(
        default=0, description="guaranteed is how much on each node nobody else's stores can evict."
    )
    limit: Quantity | None = Field(
        default=None, description="limit is the most that it may hold on each node; absent: the capacity."
    )


def _without_pattern(schema: dict[str, Any]) -> None:
    """A rule says it better (`pool_rules.SPEC_RULES`): with both, what is no quantity would be refused twice."""
    del schema["pattern"]


class KVOffloadPoolSpec(ApiModel):
    """What an administrator asks for: one region of huge pages on each matching node."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": [dict(rule) for rule in SPEC_RULES]})

    node_selector: dict[LabelKey, LabelValue] = Field(
        default={},
        max_length=32,
        description="nodeSelector is the labels of the nodes that give memory; empty: every node.",
    )
    tolerations: list[Toleration] = Field(
        default=[Toleration(**GPU_TOLERATION)],
        max_length=32,
        description="tolerations of the node daemon; by default the taint that GPU nodes commonly have.",
        json_schema_extra={"default": [dict(GPU_TOLERATION)], "x-kubernetes-list-type": "atomic"},
    )
    capacity: Quantity = Field(
        description="capacity is the bytes of huge pages on each node, a multiple of pageSize. Growing takes pages "
        "that are free on the node; shrinking waits for leased blocks and frees the rest.",
        json_schema_extra=_without_pattern,
    )
    page_size: PageSize = Field(
        default=PageSize.MI_2, description="pageSize of the huge pages, 2Mi or 1Gi. Cannot be changed."
    )
    fallback: Fallback = Field(
        default=Fallback.NONE,
        description="fallback instead of huge pages: None takes huge pages, and says in a condition where they cannot "
        "be had; SharedMemory takes 4 KiB pages on tmpfs on every node, also where huge pages are free, and says so in "
        "the condition Degraded.",
    )
    numa_policy: NumaPolicy = Field(
        default=NumaPolicy.INTERLEAVE,
        description="numaPolicy spreads extents over NUMA nodes (Interleave) or fills one before the next (Local).",
    )
    replicated_layout: ReplicatedLayout = Field(
        default=ReplicatedLayout.AUTO,
        description="replicatedLayout lets engines whose ranks hold equal bytes keep one copy (Auto) or not (Never).",
    )
    sharing: Sharing = Field(
        default=Sharing.NAMESPACE,
        description="sharing is whose pods may hit each other's blocks: those of one Kubernetes Namespace, of the "
        "whole Pool, or each Pod alone. Cannot be changed.",
    )
    namespace_selector: LabelSelector | None = Field(
        default=None,
        description="namespaceSelector is the namespaces whose pods may attach; absent: all but kube-system and the "
        "operator's own.",
    )
    quotas: list[Quota] = Field(
        default=[],
        max_length=MAX_QUOTAS,
        description="quotas by namespace, on each node; a namespace without one shares what is not guaranteed.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["namespace"]},
    )
    eviction_policy: EvictionPolicy = Field(
        default=EvictionPolicy.LRU, description="evictionPolicy chooses what is given up first: LRU."
    )
    max_engines_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=64, description="maxEnginesPerNode is how many engines may attach on one node; one pod may have half."
    )
    attachment: Attachment = Field(
        default=Attachment.PREFERRED,
        description="attachment of pods to nodes where the pool is ready: Preferred pods start anywhere, Required pods "
        "wait for such a node.",
    )
    mode: Mode = Field(
        default=Mode.ACTIVE,
        description="mode is Active; Observe, which reports what nodes would give and which pods would attach and "
        "touches nothing; or Paused, which detaches all and keeps the pages.",
    )
    reclaim_policy: ReclaimPolicy = Field(
        default=ReclaimPolicy.DELETE,
        description="reclaimPolicy frees (Delete) or keeps (Retain) pages when the pool, or a node's part in it goes.",
    )
    hugetlbfs_mount: HugetlbfsMount = Field(
        default=HugetlbfsMount.HOST,
        description="hugetlbfsMount is the node's own (Host), or one that a privileged init container makes (Managed).",
    )


class NodeCounts(ApiModel):
    """How many nodes are in which state; a node counts once, in the first state that applies after `matching`."""

    matching: Count = Field(default=0, description="matching nodeSelector.")
    ready: Count = Field(default=0, description="ready: region and daemon serve.")
    short_of_pages: Count = Field(default=0, description="shortOfPages: fewer allocatable huge pages than capacity.")
    pending: Count = Field(default=0, description="pending: the daemon's pod is not running yet.")
    not_reporting: Count = Field(default=0, description="notReporting: the daemon runs, its region says nothing new.")
    failing: Count = Field(default=0, description="failing: the daemon reports that it cannot serve.")


class EngineCounts(ApiModel):
    """Engines attached to the pool."""

    attached: Count = Field(default=0, description="attached now, over all nodes.")
    replicated: Count = Field(default=0, description="replicated of them: one copy for all ranks.")


class NodeProblem(ApiModel):
    """A node that does not serve, and why."""

    node: NodeName = Field(description="node is its name.")
    reason: Annotated[str, Field(max_length=64)] = Field(description="reason of its region's NodeReady or Ready.")
    message: Annotated[str, Field(max_length=1024)] = Field(description="message with numbers and the remedy.")


class KVOffloadPoolStatus(MemoryStatus):
    """What the operator says about the pool; sums are over all nodes."""

    observed_generation: Annotated[int, Field(ge=0, le=2**60)] = Field(
        default=0, description="observedGeneration is metadata.generation of the spec that was last acted on."
    )
    conditions: list[Condition] = Field(
        default=[],
        max_length=MAX_CONDITIONS,
        description="conditions Ready, RegionsProvisioned, HugepagesAvailable, InjectionReady and Degraded.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    nodes: NodeCounts = Field(default=NodeCounts(), description="nodes counts the nodes by state.")
    problems: list[NodeProblem] = Field(
        default=[],
        max_length=MAX_PROBLEMS,
        description="problems names the first nodes that do not serve, in order of their names.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["node"]},
    )
    engines: EngineCounts = Field(default=EngineCounts(), description="engines counts the engines attached.")


class KVOffloadPool(ApiObject):
    """KVOffloadPool gives part of the huge pages of each matching node to the KV caches of vLLM pods."""

    spec: KVOffloadPoolSpec
    status: KVOffloadPoolStatus = KVOffloadPoolStatus()

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> "KVOffloadPool":
        """Read an object as the API server sends it.

        Raises:
            pydantic.ValidationError: the spec lacks a field or holds a value that this version does not know.
        """
        return cls(
            **read_metadata(manifest),
            spec=KVOffloadPoolSpec.model_validate(manifest.get("spec", {})),
            status=KVOffloadPoolStatus.model_validate(manifest.get("status") or {}),
        )


POOL_COLUMNS: list[dict[str, str | int]] = [
    {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].status"},
    {"name": "Mode", "type": "string", "jsonPath": ".spec.mode", "priority": 1},
    {"name": "Nodes", "type": "integer", "jsonPath": ".status.nodes.matching", "description": "Matching nodes"},
    {"name": "NodesReady", "type": "integer", "jsonPath": ".status.nodes.ready"},
    {"name": "PerNode", "type": "string", "jsonPath": ".spec.capacity", "description": "Capacity asked on each node"},
    {"name": "Capacity", "type": "string", "jsonPath": ".status.capacity", "description": "Over all nodes"},
    {"name": "Used", "type": "string", "jsonPath": ".status.used"},
    {"name": "Free", "type": "string", "jsonPath": ".status.free", "priority": 1},
    {"name": "Engines", "type": "integer", "jsonPath": ".status.engines.attached"},
    {"name": "Replicated", "type": "integer", "jsonPath": ".status.engines.replicated"},
    {"name": "Saved", "type": "string", "jsonPath": ".status.saved"},
    {"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].reason", "priority": 1},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]
