"""The cluster as frozen facts. `handlers.py` feeds the view with events, a periodic listing corrects it, the
reconcilers read it.

Manifests end here: `observe_*` turns each into a small fact, so that what is compared, kept in memory for thousands of
nodes, and planned from is exactly what matters. A fact that equals the one before it changes nothing and wakes nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from kvoffload.api.keys import (
    DAEMON_NODE_LABEL_PREFIX,
    DAEMON_OF_LABEL,
    INJECTED_ANNOTATION,
    POOL_LABEL,
    READY_NODE_LABEL_PREFIX,
    REPLICATED_LAYOUT_ANNOTATION,
    SKIP_REASON_ANNOTATION,
)
from kvoffload.api.pool import KVOffloadPool, PageSize
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


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """A pool as stored; `pool` is None where its spec is not valid for this version, and `problem` says why."""

    name: str
    uid: str
    generation: int
    deleting: bool
    pool: KVOffloadPool | None
    problem: str
    spec_fields: frozenset[str]
    """Names of the fields that the API server stored: an older CRD prunes those that it does not know."""
    status: Mapping[str, Any] = field(default_factory=dict)


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
    )


def observe_pool(manifest: Manifest) -> ObservedPool:
    """Facts of a pool; a spec that does not parse is a fact too."""
    metadata = manifest["metadata"]
    pool, problem = None, ""
    try:
        pool = KVOffloadPool.from_manifest(dict(manifest))
    except ValidationError as error:
        problem = describe_spec_error(error)
    return ObservedPool(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        deleting="deletionTimestamp" in metadata,
        pool=pool,
        problem=problem,
        spec_fields=frozenset(manifest.get("spec", {})),
        status=manifest.get("status") or {},
    )


def describe_spec_error(error: ValidationError) -> str:
    """Every field that this version cannot read, with what is wrong with it."""
    return "; ".join(f"spec.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))


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


@dataclass(frozen=True, slots=True)
class Dirty:
    """What needs a pass after a change."""

    pools: frozenset[str] = frozenset()
    pods: frozenset[str] = frozenset()


NOTHING = Dirty()


class ClusterView:
    """What the operator knows, by name. Not frozen itself: it is the one place that events change.

    `update_*` take a manifest as it is now, `forget` a name that is gone; each returns what the change makes necessary.
    """

    def __init__(self) -> None:
        self.pools: dict[str, ObservedPool] = {}
        self.nodes: dict[str, ObservedNode] = {}
        self.regions: dict[str, KVOffloadRegion] = {}
        self.daemonsets: dict[str, ObservedDaemonSet] = {}
        self.pods: dict[str, ObservedPod] = {}
        self._versions: dict[tuple[str, str], int] = {}

    def _is_stale(self, kind: str, manifest: Manifest) -> bool:
        """Whether something newer of this object was seen: our own writes are, before their events come."""
        metadata = manifest["metadata"]
        version, key = metadata.get("resourceVersion", ""), (kind, metadata["name"])
        if not version.isdigit():
            return False
        if int(version) < self._versions.get(key, 0):
            return True
        self._versions[key] = int(version)
        return False

    def update_pool(self, manifest: Manifest) -> Dirty:
        """A pool was seen; a change of its spec may matter to the others that it overlaps."""
        if self._is_stale("kvoffloadpools", manifest):
            return NOTHING
        fact = observe_pool(manifest)
        before = self.pools.get(fact.name)
        if fact == before:
            return NOTHING
        self.pools[fact.name] = fact
        if before is None or before.generation != fact.generation or before.deleting != fact.deleting:
            return Dirty(pools=frozenset(self.pools))
        return Dirty(pools=frozenset({fact.name}))

    def update_node(self, manifest: Manifest) -> Dirty:
        """A node was seen; heartbeats change nothing that is kept."""
        if self._is_stale("nodes", manifest):
            return NOTHING
        fact = observe_node(manifest)
        before = self.nodes.get(fact.name)
        if fact == before:
            return NOTHING
        self.nodes[fact.name] = fact
        return self._pools_of_node(*(node for node in (before, fact) if node is not None))

    def update_region(self, manifest: Manifest) -> Dirty:
        """A region was seen."""
        if self._is_stale("kvoffloadregions", manifest):
            return NOTHING
        fact = observe_region(manifest)
        if fact == self.regions.get(fact.name):
            return NOTHING
        self.regions[fact.name] = fact
        pods = {key for key, pod in self.pods.items() if pod.node == fact.spec.node_name}
        return Dirty(pools=frozenset({fact.spec.pool_name}), pods=frozenset(pods))

    def update_daemonset(self, manifest: Manifest) -> Dirty:
        """A DaemonSet of ours was seen."""
        if self._is_stale("daemonsets", manifest):
            return NOTHING
        fact = observe_daemonset(manifest)
        if fact == self.daemonsets.get(fact.name):
            return NOTHING
        self.daemonsets[fact.name] = fact
        return Dirty(pools=frozenset({fact.pool}))

    def update_pod(self, manifest: Manifest) -> Dirty:
        """A pod that opted in was seen."""
        fact = observe_pod(manifest)
        key = f"{fact.namespace}/{fact.name}"
        if fact == self.pods.get(key):
            return NOTHING
        self.pods[key] = fact
        return Dirty(pods=frozenset({key}))

    def forget(self, kind: str, key: str) -> Dirty:
        """An object is gone. `kind` is a plural, `key` a name, for pods `<namespace>/<name>`."""
        self._versions.pop((kind, key), None)
        match kind:
            case "kvoffloadpools":
                self.pools.pop(key, None)
                return Dirty(pools=frozenset({key, *self.pools}))
            case "nodes":
                node = self.nodes.pop(key, None)
                return self._pools_of_node(node) if node else NOTHING
            case "kvoffloadregions":
                region = self.regions.pop(key, None)
                return Dirty(pools=frozenset({region.spec.pool_name})) if region else NOTHING
            case "daemonsets":
                daemonset = self.daemonsets.pop(key, None)
                return Dirty(pools=frozenset({daemonset.pool})) if daemonset else NOTHING
            case "pods":
                self.pods.pop(key, None)
                return NOTHING
            case _:
                raise ValueError(f"unknown kind {kind!r}")

    def keys_of(self, kind: str) -> frozenset[str]:
        """Names known of a kind, to find those that a listing no longer has."""
        stores: dict[str, Mapping[str, object]] = {
            "kvoffloadpools": self.pools,
            "nodes": self.nodes,
            "kvoffloadregions": self.regions,
            "daemonsets": self.daemonsets,
            "pods": self.pods,
        }
        return frozenset(stores[kind])

    def _pools_of_node(self, *states: ObservedNode) -> Dirty:
        names = set()
        for node in states:
            names |= set(pools_in_labels(node.labels))
            names |= {
                pool.name
                for pool in self.pools.values()
                if pool.pool is None or node_matches(node, pool.pool.spec.node_selector)
            }
        return Dirty(pools=frozenset(names))

    def regions_of(self, pool: str) -> dict[str, KVOffloadRegion]:
        """Regions of a pool by node name."""
        return {region.spec.node_name: region for region in self.regions.values() if region.spec.pool_name == pool}

    def daemonset_of(self, pool: str) -> ObservedDaemonSet | None:
        """The pool's DaemonSet, if there is one."""
        return next((one for one in self.daemonsets.values() if one.pool == pool), None)

    def pools_known(self) -> frozenset[str]:
        """Names of pools, and of those that only left something behind: a DaemonSet, a node label."""
        left = {one.pool for one in self.daemonsets.values()}
        for node in self.nodes.values():
            left |= set(pools_in_labels(node.labels))
        return frozenset(self.pools) | left


def pools_in_labels(labels: Iterable[str]) -> list[str]:
    """Pools that a node's labels name."""
    return [
        label.removeprefix(prefix)
        for label in labels
        for prefix in (READY_NODE_LABEL_PREFIX, DAEMON_NODE_LABEL_PREFIX)
        if label.startswith(prefix)
    ]


def node_matches(node: ObservedNode, selector: Mapping[str, str]) -> bool:
    """Whether the node carries every label of the selector."""
    return all(node.labels.get(key) == value for key, value in selector.items())
