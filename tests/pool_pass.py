"""What one pass over a pool looks at, and what its plan says; every test names only what it is about."""

from datetime import timedelta
from typing import Any

from kvoffload.api.conditions import Condition, PoolReason, find
from kvoffload.api.region import KVOffloadRegion
from kvoffload_operator.observe import ObservedDaemonSet, observe_node, observe_pool
from kvoffload_operator.reconcilers.pool import PoolFacts, PoolPlan
from kvoffload_operator.resources.daemonset import SPEC_HASH_ANNOTATION, build_daemonset
from kvoffload_operator.resources.region import build_region, build_region_spec
from kvoffload_operator.status import InjectionHealth
from operator_builders import NOW, daemonset_options, node_manifest, pool_manifest, spec_of

OPTIONS = daemonset_options()
SERVING = InjectionHealth(PoolReason.WEBHOOK_SERVING, "2 replicas answer")
RUN = {"daemon.kvoffload.io/main": "run"}
READY = {**RUN, "pool.kvoffload.io/main": "ready"}


def condition(
    type: str, status: str = "True", reason: str = "Serving", message: str = "m", age: float = 600
) -> Condition:
    return Condition(
        type=type,
        status=status,
        observed_generation=1,
        last_transition_time=NOW - timedelta(seconds=age),
        reason=reason,
        message=message,
    )


def region(node: str, *conditions: Condition, spec: dict[str, Any] | None = None, **status: Any) -> KVOffloadRegion:
    manifest = build_region("main", "uid-main", build_region_spec("main", node, spec_of(**(spec or {}))))
    manifest["metadata"] |= {"uid": f"uid-{node}", "generation": 1}
    manifest["status"] = {
        "observedGeneration": 1,
        "conditions": [one.to_manifest() for one in conditions],
        **status,
    }
    return KVOffloadRegion.from_manifest(manifest)


def serving(node: str, **status: Any) -> KVOffloadRegion:
    node_ready = condition("NodeReady", reason="DaemonRunning", message="the daemon runs and its pages are allocatable")
    return region(node, node_ready, condition("Ready"), **{"capacityBytes": 1 << 30, "freeBytes": 1 << 30, **status})


def daemonset(spec: dict[str, Any] | None = None, **changes: Any) -> ObservedDaemonSet:
    built = build_daemonset("main", spec_of(**(spec or {})), capacity_bytes=1 << 30, options=OPTIONS)
    fields: dict[str, Any] = {
        "name": "kvoffload-main",
        "pool": "main",
        "uid": "uid-ds",
        "spec_hash": built["metadata"]["annotations"][SPEC_HASH_ANNOTATION],
        "observed_current": True,
        "num_desired": 2,
        "num_updated": 2,
        "num_available": 2,
        **changes,
    }
    return ObservedDaemonSet(**fields)


def facts(pool: dict[str, Any] | None = None, **changes: Any) -> PoolFacts:
    observed = observe_pool(pool or pool_manifest())
    fields: dict[str, Any] = {
        "pool": observed,
        "pools": {observed.name: observed},
        "nodes": tuple(observe_node(node_manifest(name, labels=READY)) for name in ("a", "b")),
        "regions": {"a": serving("a"), "b": serving("b")},
        "daemonset": daemonset(),
        "daemon_pods": None,
        "injection": SERVING,
        "now": NOW,
        "silence_seconds": 90.0,
        **changes,
    }
    return PoolFacts(**fields)


def status_condition(plan: PoolPlan, type: str) -> Condition:
    assert plan.status is not None
    found = find(plan.status.conditions, type)
    assert found is not None
    return found


def with_status(pool: dict[str, Any], plan: PoolPlan) -> dict[str, Any]:
    assert plan.status is not None
    return {**pool, "status": plan.status.to_manifest()}
