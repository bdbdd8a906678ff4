"""KVOffloadRegion: one pool's memory on one node.

The operator writes spec and the condition NodeReady, the node daemon the rest of the status, each by server-side apply
under its own field manager. The daemon reads its object through `KVOffloadRegion.from_manifest`.
"""

import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from kvoffload.api.conditions import MAX_CONDITIONS, Condition
from kvoffload.api.keys import PredictedLayout
from kvoffload.api.model import (
    ApiModel,
    ApiObject,
    ByteCount,
    Count,
    MemoryStatus,
    NamespaceName,
    NodeName,
    read_metadata,
)
from kvoffload.api.pool import (
    MAX_QUOTAS,
    EvictionPolicy,
    Fallback,
    LabelSelector,
    Mode,
    NumaPolicy,
    ReclaimPolicy,
    ReplicatedLayout,
    Sharing,
)

MAX_NAME_LENGTH = 253
MAX_ENGINES = 64
_Short = Annotated[str, Field(max_length=256)]


class ConfirmedLayout(StrEnum):
    """What an engine's ranks have found, in `confirmedLayout`, which is empty until all have said."""

    REPLICATED = "replicated"
    """One copy for all ranks."""
    PER_RANK = "per-rank"
    SHARED = "shared"
    """Some ranks share a part."""
    LEFT_ALONE = "left-alone"
    """The engine runs without offload, and only tells why."""


def is_mispredicted(predicted: str, confirmed: str) -> bool:
    """Whether an engine takes more of the pool than was predicted: a part for each rank, or for some."""
    more = (ConfirmedLayout.PER_RANK, ConfirmedLayout.SHARED)
    return predicted == PredictedLayout.REPLICATED and confirmed in more


def region_name(pool: str, node: str) -> str:
    """`<pool>.<node>`; where that is longer than a name may be, the node is cut and a digest of it added.

    A pool's name has no dot, so no two pairs meet.
    """
    name = f"{pool}.{node}"
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:16]
    kept = node[: MAX_NAME_LENGTH - len(pool) - len(digest) - 2].rstrip("-.")
    return f"{pool}.{kept}-{digest}"


class RegionQuota(ApiModel):
    """Bytes of one Kubernetes namespace on this node."""

    namespace: NamespaceName = Field(description="namespace is the Kubernetes namespace that this quota is for.")
    guaranteed_bytes: ByteCount = Field(default=0, description="guaranteedBytes nobody else's stores can evict.")
    limit_bytes: ByteCount = Field(description="limitBytes is the most that it may hold.")


def _immutable(field: str) -> dict[str, str]:
    return {
        "rule": f"self.{field} == oldSelf.{field}",
        "message": f"{field} cannot be changed",
        "fieldPath": f".{field}",
    }


SPEC_RULES: list[dict[str, str]] = [
    _immutable("poolName"),
    _immutable("nodeName"),
    {
        "rule": "self.capacityBytes % self.pageSizeBytes == 0",
        "message": "capacityBytes must be a multiple of pageSizeBytes",
        "fieldPath": ".capacityBytes",
    },
]


class KVOffloadRegionSpec(ApiModel):
    """What the operator asks of the node's daemon; sizes are bytes, and everything is said."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": [dict(rule) for rule in SPEC_RULES]})

    pool_name: Annotated[str, Field(min_length=1, max_length=40)] = Field(description="poolName is the pool's name.")
    node_name: NodeName = Field(description="nodeName is the node's name.")
    capacity_bytes: ByteCount = Field(description="capacityBytes to reserve.")
    page_size_bytes: Annotated[int, Field(ge=4096, le=1 << 30)] = Field(
        description="pageSizeBytes of the huge pages, 2097152 or 1073741824."
    )
    fallback: Fallback = Field(default=Fallback.NONE, description="fallback as in the pool.")
    numa_policy: NumaPolicy = Field(default=NumaPolicy.INTERLEAVE, description="numaPolicy as in the pool.")
    replicated_layout: ReplicatedLayout = Field(
        default=ReplicatedLayout.AUTO, description="replicatedLayout as in the pool."
    )
    sharing: Sharing = Field(default=Sharing.NAMESPACE, description="sharing as in the pool.")
    namespace_selector: LabelSelector | None = Field(
        default=None,
        description="namespaceSelector as in the pool; absent: all but kube-system and the operator's own.",
    )
    quotas: list[RegionQuota] = Field(
        default=[],
        max_length=MAX_QUOTAS,
        description="quotas by namespace.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["namespace"]},
    )
    eviction_policy: EvictionPolicy = Field(default=EvictionPolicy.LRU, description="evictionPolicy as in the pool.")
    max_engines: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=64, description="maxEngines is how many engines may attach; one pod may have half of them."
    )
    mode: Mode = Field(default=Mode.ACTIVE, description="mode as in the pool.")
    reclaim_policy: ReclaimPolicy = Field(default=ReclaimPolicy.DELETE, description="reclaimPolicy as in the pool.")


class RegionEngine(ApiModel):
    """One engine that is attached, or a pod that failed to."""

    pod_namespace: NamespaceName = Field(description="podNamespace of the engine's pod.")
    pod_name: _Short = Field(description="podName of the engine's pod.")
    pod_uid: Annotated[str, Field(max_length=64)] = Field(description="podUID of the engine's pod.")
    engine_id: Annotated[str, Field(max_length=128)] = Field(description="engineID as vLLM names it.")
    model: _Short = Field(default="", description="model as the engine names it.")
    tensor_parallel_size: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="tensorParallelSize is the number of ranks."
    )
    predicted_layout: Annotated[str, Field(max_length=64)] = Field(
        default="", description="predictedLayout by the webhook: replicated, per-rank or auto."
    )
    confirmed_layout: Annotated[str, Field(max_length=64)] = Field(
        default="",
        description="confirmedLayout by the engine's ranks: replicated, per-rank, shared, or empty until all said; "
        "left-alone: the engine runs without offload.",
    )
    reason: Annotated[str, Field(max_length=64)] = Field(
        default="",
        description="reason is the first condition of replication that failed, or why it is left alone, CamelCase.",
    )
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="message says it in words.")
    stored_bytes: ByteCount = Field(default=0, description="storedBytes since it attached.")
    loaded_bytes: ByteCount = Field(default=0, description="loadedBytes since it attached.")
    attached_since: datetime | None = Field(default=None, description="attachedSince is when its first rank attached.")

    @property
    def is_left_alone(self) -> bool:
        """Whether the engine runs without offload, and only tells why."""
        return self.confirmed_layout == ConfirmedLayout.LEFT_ALONE

    @property
    def is_mispredicted(self) -> bool:
        """Whether its ranks found a layout that takes more of the pool than was predicted."""
        return is_mispredicted(self.predicted_layout, self.confirmed_layout)


class KVOffloadRegionStatus(MemoryStatus):
    """What the node daemon says; of the conditions, NodeReady is the operator's."""

    observed_generation: Annotated[int, Field(ge=0, le=2**60)] = Field(
        default=0, description="observedGeneration is metadata.generation of the spec that the daemon last acted on."
    )
    conditions: list[Condition] = Field(
        default=[],
        max_length=MAX_CONDITIONS,
        description="conditions Ready, PagesReady, Degraded (node daemon) and NodeReady (operator).",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    allocated_bytes: ByteCount = Field(default=0, description="allocatedBytes of pages, in extents.")
    daemon_version: Annotated[str, Field(max_length=64)] = Field(default="", description="daemonVersion that reports.")
    epoch: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=0, description="epoch counts the daemon's starts over this region."
    )
    engines: list[RegionEngine] = Field(
        default=[],
        max_length=MAX_ENGINES,
        description="engines attached, then those left alone, the first 64; enginesAttached counts all attached.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["podUID", "engineID"]},
    )
    engines_attached: Count = Field(default=0, description="enginesAttached counts the engines attached.")
    engines_replicated: Count = Field(default=0, description="enginesReplicated of them keep one copy for all ranks.")


class KVOffloadRegion(ApiObject):
    """KVOffloadRegion is one pool's memory on one node; made by the operator, reported on by the node daemon."""

    spec: KVOffloadRegionSpec
    status: KVOffloadRegionStatus = KVOffloadRegionStatus()

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> "KVOffloadRegion":
        """Read an object as the API server sends it.

        Raises:
            pydantic.ValidationError: the spec lacks a field or holds a value that this version does not know.
        """
        return cls(
            **read_metadata(manifest),
            spec=KVOffloadRegionSpec.model_validate(manifest.get("spec", {})),
            status=KVOffloadRegionStatus.model_validate(manifest.get("status") or {}),
        )


REGION_COLUMNS: list[dict[str, str | int]] = [
    {"name": "Pool", "type": "string", "jsonPath": ".spec.poolName"},
    {"name": "Node", "type": "string", "jsonPath": ".spec.nodeName"},
    {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].status"},
    {
        "name": "NodeReady",
        "type": "string",
        "jsonPath": ".status.conditions[?(@.type=='NodeReady')].status",
        "priority": 1,
    },
    {"name": "Capacity", "type": "string", "jsonPath": ".status.capacity"},
    {"name": "Used", "type": "string", "jsonPath": ".status.used"},
    {"name": "Free", "type": "string", "jsonPath": ".status.free", "priority": 1},
    {"name": "Engines", "type": "integer", "jsonPath": ".status.enginesAttached"},
    {"name": "Replicated", "type": "integer", "jsonPath": ".status.enginesReplicated"},
    {"name": "Saved", "type": "string", "jsonPath": ".status.saved"},
    {"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].reason", "priority": 1},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]
