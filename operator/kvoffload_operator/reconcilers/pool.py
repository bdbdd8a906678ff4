"""Reconciles a pool: observe, plan (pure), apply, one status write, then events. Called by `operator.py`'s worker.

Order of writing, so that a daemon told to stop can see why: regions of nodes that no longer match are deleted before
their node's label is taken away; the DaemonSet is applied before nodes are labelled for it.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvoffload.api.conditions import PoolReason
from kvoffload.api.keys import (
    DAEMON_OF_LABEL,
    OPERATOR_FIELD_MANAGER,
    daemon_node_label,
    ready_node_label,
)
from kvoffload.api.pool import Fallback, KVOffloadPoolSpec, KVOffloadPoolStatus, Mode
from kvoffload.api.region import KVOffloadRegion
from kvoffload.errors import KVOffloadError
from kvoffload_operator.events import EventRecorder, Regarding
from kvoffload_operator.kube import DAEMONSETS, PODS, POOLS, REGIONS, ApiServerError, KubeClient
from kvoffload_operator.observe import (
    ObservedDaemonPod,
    ObservedDaemonSet,
    ObservedNode,
    ObservedPool,
    node_matches,
    observe_daemon_pod,
)
from kvoffload_operator.policies.node import NodeFacts, NodeState
from kvoffload_operator.policies.pool import (
    PoolViolation,
    crd_is_newer,
    crd_is_outdated,
    daemonset_name_is_taken,
    exceeds_every_node,
    matches_no_node,
    overlaps_another,
)
from kvoffload_operator.reconcilers.region import NodePlan, apply_node, label_node, plan_node
from kvoffload_operator.resources.daemonset import SPEC_HASH_ANNOTATION, DaemonSetOptions, build_daemonset
from kvoffload_operator.status import (
    InjectionHealth,
    build_failed_status,
    build_invalid_status,
    build_pool_status,
    find_transitions,
)
from kvoffload_operator.view import ClusterView
from kvoffload_operator.webhook.validation import validate_pool_name, validate_pool_spec

logger = logging.getLogger(__name__)

REQUEUE_PENDING_SECONDS = 5.0
MAX_CONFLICT_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """All that one pass looks at."""

    pool: ObservedPool
    pools: Mapping[str, ObservedPool]
    nodes: tuple[ObservedNode, ...]
    regions: Mapping[str, KVOffloadRegion]
    """By node."""
    daemonset: ObservedDaemonSet | None
    """Ours, by its label."""
    daemon_pods: Mapping[str, ObservedDaemonPod] | None
    """By node; None where the DaemonSet says that all are available, so that nobody asked."""
    injection: InjectionHealth
    now: datetime
    silence_seconds: float
    name_conflict: str = ""
    """Why this pass could not make the DaemonSet: another one has its name; empty if it could or did not try."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What one pass writes."""

    daemonset: Mapping[str, Any] | None
    nodes: tuple[NodePlan, ...]
    regions_to_delete: tuple[tuple[str, str], ...]
    """Name and uid."""
    labels_to_remove: Mapping[str, tuple[str, ...]]
    """By node that no longer matches."""
    status: KVOffloadPoolStatus | None
    requeue_seconds: float | None = None


def plan_pool(facts: PoolFacts, options: DaemonSetOptions) -> PoolPlan:
    """Decide everything for one pool. Pure."""
    observed, spec = facts.pool, facts.pool.spec
    problems = [observed.problem] if observed.problem else []
    if spec is not None:
        errors = (*validate_pool_name(observed.name), *validate_pool_spec(spec).errors)
        problems = [str(error) for error in errors]
    if spec is None or problems:
        status = build_invalid_status(observed, "; ".join(problems), facts.now)
        return PoolPlan(None, (), (), {}, _if_changed(observed, status))
    matching = [node for node in facts.nodes if node_matches(node, spec.node_selector)]
    names = {node.name for node in matching}
    may_create = spec.mode is not Mode.OBSERVE
    node_plans = tuple(
        plan_node(_node_facts(facts, spec, node), pool=observed.name, pool_uid=observed.uid, may_create=may_create)
        for node in matching
    )
    capacity_bytes = _pod_capacity(spec.capacity, facts)
    daemonset = build_daemonset(observed.name, spec, capacity_bytes=capacity_bytes, options=options)
    current = facts.daemonset
    unchanged = current is not None and current.spec_hash == daemonset["metadata"]["annotations"][SPEC_HASH_ANNOTATION]
    degradations = [
        violation
        for violation in (
            crd_is_outdated(observed),
            crd_is_newer(observed),
            overlaps_another(observed, facts.pools, matching),
        )
        if violation is not None
    ]
    status = build_pool_status(
        observed,
        spec,
        nodes=node_plans,
        regions=facts.regions,
        no_match=matches_no_node(spec, matching, len(facts.nodes)),
        name_taken=daemonset_name_is_taken(daemonset["metadata"]["name"], options.namespace, facts.name_conflict),
        shortage=exceeds_every_node(spec, matching),
        degradations=degradations + _fallback_in_use(spec.fallback),
        injection=facts.injection,
        rollout_message=_rollout_message(current, capacity_bytes, spec.capacity),
        now=facts.now,
    )
    unsettled = any(plan.state in (NodeState.PENDING, NodeState.NOT_REPORTING) for plan in node_plans)
    return PoolPlan(
        daemonset=daemonset if may_create and not unchanged and not facts.name_conflict else None,
        nodes=node_plans,
        regions_to_delete=tuple(
            (region.name, region.uid)
            for node, region in facts.regions.items()
            if node not in names and not region.deleting
        ),
        labels_to_remove=_stale_labels(observed.name, (node for node in facts.nodes if node.name not in names)),
        status=_if_changed(observed, status),
        requeue_seconds=REQUEUE_PENDING_SECONDS if (unsettled and may_create) or facts.name_conflict else None,
    )


def all_daemons_available(daemonset: ObservedDaemonSet | None, nodes: Iterable[ObservedNode]) -> bool:
    """Whether the DaemonSet's counts say it all: a pod for each labelled node, of the newest template, available.

    Its controller may not have seen the labels yet: a DaemonSet that wants nothing is content with nothing.
    """
    if daemonset is None or not daemonset.is_settled:
        return False
    return daemonset.num_desired == sum(daemon_node_label(daemonset.pool) in node.labels for node in nodes)


def _fallback_in_use(fallback: Fallback) -> list[PoolViolation]:
    if fallback is Fallback.NONE:
        return []
    message = "fallback is SharedMemory: 4 KiB pages on tmpfs instead of huge pages, slower to map and to register"
    return [PoolViolation(PoolReason.FALLBACK_IN_USE, message)]


def _if_changed(pool: ObservedPool, status: KVOffloadPoolStatus) -> KVOffloadPoolStatus | None:
    return None if pool.status == status else status


def _pod_capacity(capacity_bytes: int, facts: PoolFacts) -> int:
    """A shrinking region keeps its pages until its leases are gone: the pods' limits follow after the last one."""
    held = [
        region.status.capacity_bytes
        for region in facts.regions.values()
        if not region.deleting and region.status.capacity_bytes > capacity_bytes
    ]
    return max([capacity_bytes, *held])


def _rollout_message(current: ObservedDaemonSet | None, pod_capacity: int, capacity: int) -> str:
    if pod_capacity > capacity:
        return f"shrinking from {pod_capacity} to {capacity} bytes waits for leased blocks: see the regions' messages"
    if current is not None and current.observed_current and current.num_updated < current.num_desired:
        return f"{current.num_updated} of {current.num_desired} daemons run the newest template"
    return ""


def _node_facts(facts: PoolFacts, spec: KVOffloadPoolSpec, node: ObservedNode) -> NodeFacts:
    others = sum(
        other.spec.capacity
        for other in facts.pools.values()
        if other.name != facts.pool.name
        and other.spec is not None
        and other.spec.page_size is spec.page_size
        and other.spec.fallback is Fallback.NONE
        and daemon_node_label(other.name) in node.labels
    )
    return NodeFacts(
        node=node,
        spec=spec,
        region=facts.regions.get(node.name),
        daemon_pod=facts.daemon_pods.get(node.name) if facts.daemon_pods is not None else None,
        all_available=facts.daemon_pods is None,
        labelled=daemon_node_label(facts.pool.name) in node.labels,
        bytes_of_other_pools=others,
        now=facts.now,
        silence_seconds=facts.silence_seconds,
    )


def _stale_labels(pool: str, nodes: Iterable[ObservedNode]) -> dict[str, tuple[str, ...]]:
    """The pool's labels on these nodes, by node: what is to be taken off them."""
    ours = (ready_node_label(pool), daemon_node_label(pool))
    stale = {node.name: tuple(label for label in ours if label in node.labels) for node in nodes}
    return {name: labels for name, labels in stale.items() if labels}


class PoolReconciler:
    """Runs the passes; holds what all of them share."""

    def __init__(
        self,
        kube: KubeClient,
        view: ClusterView,
        *,
        options: DaemonSetOptions,
        recorder: EventRecorder,
        silence_seconds: float,
        write_parallelism: int,
    ) -> None:
        self._kube, self._view, self._options, self._recorder = kube, view, options, recorder
        self._silence_seconds = silence_seconds
        self._slots = asyncio.Semaphore(write_parallelism)
        self.injection = InjectionHealth(PoolReason.WEBHOOK_UNAVAILABLE, "the webhook has not been looked at yet")

    async def reconcile(self, name: str, now: datetime) -> float | None:
        """One pass over one pool; returns seconds after which to come back although nothing changed, or None.

        What nobody expected, and what the API server finds invalid, is said in the pool's condition Ready, and raised.
        """
        observed = self._view.pools.get(name)
        if observed is None or observed.deleting:
            await self._reconcile_absent(name)
            return None
        try:
            return await self._reconcile_present(observed, now)
        except Exception as error:
            passes = isinstance(error, KVOffloadError | TimeoutError)
            if passes and not (isinstance(error, ApiServerError) and error.is_invalid):
                raise
            await self._say_failed(self._view.pools.get(name, observed), error, now)
            raise

    async def _say_failed(self, observed: ObservedPool, error: Exception, now: datetime) -> None:
        """In the status as it is now. Where that fails too, what the pass met stays what is raised."""
        try:
            await self._write_status(observed, _if_changed(observed, build_failed_status(observed, error, now)))
        except (ApiServerError, TimeoutError) as unsaid:
            logger.warning("pool %s: its status was not written: %s", observed.name, unsaid)

    async def _reconcile_present(self, observed: ObservedPool, now: datetime) -> float | None:
        facts = await self._observe(observed, now)
        plan = plan_pool(facts, self._options)
        if plan.daemonset is not None:
            conflict = await self._apply_daemonset(plan.daemonset, is_new=facts.daemonset is None)
            if conflict:
                plan = plan_pool(replace(facts, name_conflict=conflict), self._options)
        await self._apply(observed, plan)
        return plan.requeue_seconds

    async def _observe(self, observed: ObservedPool, now: datetime) -> PoolFacts:
        daemonset = self._view.daemonset_of(observed.name)
        daemon_pods = None
        if not all_daemons_available(daemonset, self._view.nodes.values()):
            daemon_pods = await self._list_daemon_pods(observed.name) if daemonset is not None else {}
        return PoolFacts(
            pool=observed,
            pools=dict(self._view.pools),
            nodes=tuple(sorted(self._view.nodes.values(), key=lambda node: node.name)),
            regions=self._view.regions_of(observed.name),
            daemonset=daemonset,
            daemon_pods=daemon_pods,
            injection=self.injection,
            now=now,
            silence_seconds=self._silence_seconds,
        )

    async def _list_daemon_pods(self, pool: str) -> dict[str, ObservedDaemonPod]:
        manifests = await self._kube.list_all(
            PODS, namespace=self._options.namespace, label_selector=f"{DAEMON_OF_LABEL}={pool}"
        )
        pods = sorted((observe_daemon_pod(manifest) for manifest in manifests), key=lambda pod: pod.is_running)
        return {pod.node: pod for pod in pods}  # beside one that is ending, the running one counts

    async def _apply_daemonset(self, manifest: Mapping[str, Any], *, is_new: bool) -> str:
        """Returns the API server's words where another one has the name.

        Only what was seen to be ours is applied by force. The first apply is not: of a DaemonSet that somebody else
        made, selector and template have another owner, so that the API server refuses it.
        """
        try:
            written = await self._kube.apply(
                DAEMONSETS, manifest, field_manager=OPERATOR_FIELD_MANAGER, force=not is_new
            )
        except ApiServerError as error:
            if is_new and error.is_conflict:
                return str(error)[:MAX_CONFLICT_MESSAGE]
            raise
        self._view.update_daemonset(written)
        return ""

    async def _apply(self, observed: ObservedPool, plan: PoolPlan) -> None:
        for name, uid in plan.regions_to_delete:
            await self._kube.delete(REGIONS, name, uid=uid)
        for node, labels in plan.labels_to_remove.items():
            await label_node(self._kube, self._view, node, dict.fromkeys(labels))
        await self._apply_nodes(plan.nodes)
        await self._write_status(observed, plan.status)

    async def _write_status(self, observed: ObservedPool, status: KVOffloadPoolStatus | None) -> None:
        """One write, then its events; None: nothing has changed."""
        if status is None:
            return
        try:
            written = await self._kube.apply(
                POOLS,
                {"metadata": {"name": observed.name}, "status": status.to_manifest()},
                field_manager=OPERATOR_FIELD_MANAGER,
                subresource="status",
            )
        except ApiServerError as error:
            if error.is_not_found:  # deleted meanwhile: its own event follows
                return
            raise
        self._view.update_pool(written)
        for transition in find_transitions(observed.status, status):
            await self._recorder.record_condition(
                Regarding.pool(observed.name, observed.uid), transition.condition, warning=transition.is_warning
            )

    async def _apply_nodes(self, plans: tuple[NodePlan, ...]) -> None:
        async def one(plan: NodePlan) -> None:
            async with self._slots:
                await apply_node(self._kube, self._view, plan)

        outcomes = await asyncio.gather(*(one(plan) for plan in plans if plan.num_writes), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise failures[0]  # the others are written; the next pass sees what is left

    async def _reconcile_absent(self, name: str) -> None:
        """The pool is gone: the API server collects its regions, this takes the DaemonSet and the labels away."""
        for region in self._view.regions_of(name).values():
            if not region.deleting:
                await self._kube.delete(REGIONS, region.name, uid=region.uid)
        daemonset = self._view.daemonset_of(name)
        if daemonset is not None:
            await self._kube.delete(DAEMONSETS, daemonset.name, namespace=self._options.namespace, uid=daemonset.uid)
        for node, labels in _stale_labels(name, self._view.nodes.values()).items():
            await label_node(self._kube, self._view, node, dict.fromkeys(labels))
