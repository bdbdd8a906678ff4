"""What the operator knows of the cluster. `handlers.py` feeds the view with events, a periodic listing corrects it, the
reconcilers read it. A fact that equals the one before it changes nothing and wakes nobody.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvoffload.api.keys import DAEMON_NODE_LABEL_PREFIX, READY_NODE_LABEL_PREFIX
from kvoffload.api.region import KVOffloadRegion
from kvoffload.errors import InvalidSpec
from kvoffload_operator.observe import (
    Manifest,
    ObservedDaemonSet,
    ObservedNode,
    ObservedPod,
    ObservedPool,
    node_matches,
    observe_daemonset,
    observe_node,
    observe_pod,
    observe_pool,
    observe_region,
)

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class Dirty:
    """What needs a pass after a change."""

    pools: frozenset[str] = frozenset()
    pods: frozenset[str] = frozenset()


NOTHING = Dirty()


class ClusterView:
    """What the operator knows, by name. Not frozen itself: it is the one place that events change.

    `update_*` take a manifest as it is now, `forget` a name that is gone; each returns what the change makes necessary.
    A manifest that is not as this version knows it raises InvalidSpec: it counts as if it were not there.
    """

    def __init__(self) -> None:
        self.pools: dict[str, ObservedPool] = {}
        self.nodes: dict[str, ObservedNode] = {}
        self.regions: dict[str, KVOffloadRegion] = {}
        self.daemonsets: dict[str, ObservedDaemonSet] = {}
        self.pods: dict[str, ObservedPod] = {}
        self._versions: dict[tuple[str, str], int] = {}
        self._deleted: set[tuple[str, str]] = set()

    def _is_stale(self, kind: str, manifest: Manifest) -> bool:
        """Whether something newer of this object was seen: its deletion, or our own write before its event comes."""
        version, key = manifest["metadata"].get("resourceVersion", ""), (kind, key_of(kind, manifest))
        if not version.isdigit():
            return False
        if int(version) < self._versions.get(key, 0):
            return True
        self._versions[key] = int(version)
        self._deleted.discard(key)
        return False

    def begin_listing(self) -> None:
        """What was deleted before a listing began cannot be in it: the memory of these deletions ends."""
        for key in self._deleted:
            self._versions.pop(key, None)
        self._deleted.clear()

    def _take(
        self, kind: str, known: dict[str, Fact], observe: Callable[[Manifest], Fact], manifest: Manifest
    ) -> tuple[Fact | None, Fact] | None:
        """Keep what a manifest says. The fact before and now; None where nothing has changed."""
        if self._is_stale(kind, manifest):
            return None
        fact, key = _read(observe, manifest), key_of(kind, manifest)
        before = known.get(key)
        if fact == before:
            return None
        known[key] = fact
        return before, fact

    def update_pool(self, manifest: Manifest) -> Dirty:
        """A pool was seen; a change of its spec may matter to the others that it overlaps."""
        if (taken := self._take("kvoffloadpools", self.pools, observe_pool, manifest)) is None:
            return NOTHING
        before, fact = taken
        if before is None or before.generation != fact.generation or before.deleting != fact.deleting:
            return Dirty(pools=frozenset(self.pools))
        return Dirty(pools=frozenset({fact.name}))

    def update_node(self, manifest: Manifest) -> Dirty:
        """A node was seen; heartbeats change nothing that is kept."""
        if (taken := self._take("nodes", self.nodes, observe_node, manifest)) is None:
            return NOTHING
        return self._pools_of_node(*(node for node in taken if node is not None))

    def update_region(self, manifest: Manifest) -> Dirty:
        """A region was seen."""
        if (taken := self._take("kvoffloadregions", self.regions, observe_region, manifest)) is None:
            return NOTHING
        spec = taken[1].spec
        pods = {key for key, pod in self.pods.items() if pod.node == spec.node_name}
        return Dirty(pools=frozenset({spec.pool_name}), pods=frozenset(pods))

    def update_daemonset(self, manifest: Manifest) -> Dirty:
        """A DaemonSet of ours was seen."""
        if (taken := self._take("daemonsets", self.daemonsets, observe_daemonset, manifest)) is None:
            return NOTHING
        return Dirty(pools=frozenset({taken[1].pool}))

    def update_pod(self, manifest: Manifest) -> Dirty:
        """A pod that opted in was seen."""
        if self._take("pods", self.pods, observe_pod, manifest) is None:
            return NOTHING
        return Dirty(pods=frozenset({key_of("pods", manifest)}))

    def forget(self, kind: str, key: str, *, version: str = "") -> Dirty:
        """An object is gone. `kind` is a plural, `key` a name, for pods `<namespace>/<name>`.

        `version` is the resourceVersion of its deletion: what a listing read before it does not bring the object back.
        """
        if version.isdigit():
            if int(version) < self._versions.get((kind, key), 0):
                return NOTHING  # it was made again, which was read already
            self._versions[kind, key] = int(version)
            self._deleted.add((kind, key))
        else:
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
                if pool.spec is None or node_matches(node, pool.spec.node_selector)
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


def key_of(kind: str, manifest: Manifest) -> str:
    """How the view names an object: by its name, a pod by `<namespace>/<name>`."""
    metadata = manifest["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if kind == "pods" else str(metadata["name"])


def _read(observe: Callable[[Manifest], Fact], manifest: Manifest) -> Fact:
    """The manifest's fact; one object that is not as anybody expected must not end what looks at all of them."""
    try:
        return observe(manifest)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidSpec(f"not read: {type(error).__name__}: {error}") from error
