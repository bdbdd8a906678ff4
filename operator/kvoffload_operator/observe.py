"""Manifests as frozen facts, for `view.py` to keep and the reconcilers to plan from. Pure.

Manifests end here: `observe_*` turns each into a small fact, so that what is compared, kept in memory for thousands of
nodes, and planned from is exactly what matters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from kvoffload.api.keys import (
    DAEMON_OF_LABEL,
    INJECTED_ANNOTATION,
    POOL_LABEL,
    REPLICATED_LAYOUT_ANNOTATION,
    SKIP_REASON_ANNOTATION,
)
from kvoffload.api.opt_in import came_label_late
from kvoffload.api.pool import KVOffloadPoolSpec, KVOffloadPoolStatus, PageSize
from kvoffload.api.region import KVOffloadRegion
from kvoffload.errors import InvalidSpec
from kvoffload.units import parse_quantity
from kvoffload_operator.resources.daemonset import SPEC_HASH_ANNOTATION

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ObservedTaint:
    """A taint of a node."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        """As kubectl writes it."""
        return f"{self.key}{'=' * bool(self.value)}{self.value}:{self.effect}"


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node: its labels, and the bytes of huge pages that pods may ask for in all."""

    name: str
    labels: Mapping[str, str]
    allocatable_page_bytes: Mapping[PageSize, int]
    total_page_bytes: Mapping[PageSize, int]
    taints: tuple[ObservedTaint, ...]
    """Those that keep pods away: PreferNoSchedule does not."""


@dataclass(frozen=True, slots=True)
class ObservedDaemonSet:
    """A pool's DaemonSet."""

    name: str
    pool: str
    uid: str
    spec_hash: str
    observed_current: bool
    """Whether the controller has seen the newest spec."""
    num_desired: int
    num_updated: int
    num_available: int

    @property
    def is_settled(self) -> bool:
        """Every wanted pod runs the newest template and is available."""
        return self.observed_current and self.num_updated == self.num_desired == self.num_available


@dataclass(frozen=True, slots=True)
class ObservedDaemonPod:
    """A pod of a pool's DaemonSet on its node."""

    name: str
    node: str
    is_running: bool
    problem: str
    """What scheduler or kubelet say of a pod that does not run, or of a container that fails; empty if nothing."""


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod that opted in by label."""

    namespace: str
    name: str
    uid: str
    pool: str
    node: str
    injected: str
    skip_reason: str
    predicted_layout: str
    is_running: bool
    is_over: bool
    started_at: datetime | None
    label_is_late: bool | None = None
    """Whether the label came after the pod was created; None where that cannot be told."""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """A pool as stored."""

    name: str
    uid: str
    generation: int
    deleting: bool
    spec: KVOffloadPoolSpec | None
    """None where it is not valid for this version."""
    problem: str
    """Why the spec is not valid; empty where it is."""
    spec_fields: frozenset[str]
    """Names of the fields that the API server stored: an older CRD prunes those that it does not know."""
    status: KVOffloadPoolStatus = field(default_factory=KVOffloadPoolStatus)
    """As stored; empty where this version cannot read it, so that it is written anew."""


def observe_node(manifest: Manifest) -> ObservedNode:
    """Facts of a Node."""
    status = manifest.get("status", {})
    return ObservedNode(
        name=manifest["metadata"]["name"],
        labels=dict(manifest["metadata"].get("labels") or {}),
        allocatable_page_bytes=_pages(status.get("allocatable", {})),
        total_page_bytes=_pages(status.get("capacity", {})),
        taints=tuple(
            ObservedTaint(taint["key"], taint.get("value") or "", taint["effect"])
            for taint in manifest.get("spec", {}).get("taints") or []
            if taint["effect"] != "PreferNoSchedule"
        ),
    )


def _pages(resources: Mapping[str, str]) -> dict[PageSize, int]:
    return {size: parse_quantity(resources.get(size.resource_name, "0")) for size in PageSize}


def observe_daemonset(manifest: Manifest) -> ObservedDaemonSet:
    """Facts of a DaemonSet of ours."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    return ObservedDaemonSet(
        name=metadata["name"],
        pool=metadata["labels"][DAEMON_OF_LABEL],
        uid=metadata["uid"],
        spec_hash=(metadata.get("annotations") or {}).get(SPEC_HASH_ANNOTATION, ""),
        observed_current=status.get("observedGeneration", 0) >= metadata["generation"],
        num_desired=status.get("desiredNumberScheduled", 0),
        num_updated=status.get("updatedNumberScheduled", 0),
        num_available=status.get("numberAvailable", 0),
    )


def observe_daemon_pod(manifest: Manifest) -> ObservedDaemonPod:
    """Facts of a daemon's pod; a DaemonSet's pending pod names its node in an affinity only."""
    spec, status = manifest["spec"], manifest.get("status", {})
    node = spec.get("nodeName") or _affinity_node(spec)
    return ObservedDaemonPod(
        name=manifest["metadata"]["name"],
        node=node,
        is_running=status.get("phase") == "Running" and "deletionTimestamp" not in manifest["metadata"],
        problem=_pod_problem(status),
    )


def _affinity_node(spec: Manifest) -> str:
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.get("nodeSelectorTerms", []):
        for match in term.get("matchFields", []):
            if match["key"] == "metadata.name":
                return str(match["values"][0])
    return ""


def _pod_problem(status: Manifest) -> str:
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            terminated = container.get("lastState", {}).get("terminated", {})
            details = waiting.get("message", "") or terminated.get("message", "")
            return f"container {container['name']}: {waiting.get('reason')}: {details}".strip(": ")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    return ""


def observe_pod(manifest: Manifest) -> ObservedPod:
    """Facts of a pod that opted in."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    annotations = metadata.get("annotations") or {}
    return ObservedPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        pool=metadata["labels"][POOL_LABEL],
        node=manifest.get("spec", {}).get("nodeName", ""),
        injected=annotations.get(INJECTED_ANNOTATION, ""),
        skip_reason=annotations.get(SKIP_REASON_ANNOTATION, ""),
        predicted_layout=annotations.get(REPLICATED_LAYOUT_ANNOTATION, ""),
        is_running=status.get("phase") == "Running",
        is_over=status.get("phase") in ("Succeeded", "Failed") or "deletionTimestamp" in metadata,
        started_at=_time(status.get("startTime")),
        label_is_late=came_label_late(manifest),
    )


def observe_pool(manifest: Manifest) -> ObservedPool:
    """Facts of a pool; a spec that does not parse is a fact too."""
    metadata = manifest["metadata"]
    spec, problem = None, ""
    try:
        spec = KVOffloadPoolSpec.model_validate(manifest.get("spec", {}))
    except ValidationError as error:
        problem = describe_spec_error(error)
    return ObservedPool(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        problem=problem,
        spec_fields=frozenset(manifest.get("spec", {})),
        status=_read_pool_status(manifest),
    )


def _read_pool_status(manifest: Manifest) -> KVOffloadPoolStatus:
    try:
        return KVOffloadPoolStatus.model_validate(manifest.get("status") or {})
    except ValidationError:  # by another version, or by hand
        return KVOffloadPoolStatus()


def describe_spec_error(error: ValidationError) -> str:
    """Every field that this version cannot read, with what is wrong with it."""
    return "; ".join(f"spec{_path(one['loc'])}: {one['msg']}" for one in error.errors(include_url=False))


def _path(location: Iterable[int | str]) -> str:
    """As the API server writes it: `.quotas[0].limit`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def observe_region(manifest: Manifest) -> KVOffloadRegion:
    """A region.

    Raises:
        InvalidSpec: this version cannot read it; it counts as if it were not there, and is written anew.
    """
    try:
        return KVOffloadRegion.from_manifest(dict(manifest))
    except ValidationError as error:
        raise InvalidSpec(f"region {manifest['metadata']['name']}: {error}") from error


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def node_matches(node: ObservedNode, selector: Mapping[str, str]) -> bool:
    """Whether the node carries every label of the selector."""
    return all(node.labels.get(key) == value for key, value in selector.items())
