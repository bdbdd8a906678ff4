"""Reconciles one node's part of a pool: its KVOffloadRegion, the condition NodeReady, and the node's labels.

`plan_node` is pure; `apply_node` writes what the plan says and no more. The pool's reconciler calls both for every
node.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload.api.conditions import Condition, RegionCondition, RegionReason, find, transition
from kvoffload.api.keys import (
    DAEMON_NODE_LABEL_VALUE,
    OPERATOR_FIELD_MANAGER,
    READY_NODE_LABEL_VALUE,
    daemon_node_label,
    ready_node_label,
)
from kvoffload.api.pool import Mode
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload_operator.kube import NODES, REGIONS, ApiServerError, KubeClient
from kvoffload_operator.policies.node import (
    NODE_CHECKS,
    REPORT_CHECKS,
    NodeFacts,
    NodeState,
    NodeVerdict,
    NodeViolation,
    first_violation,
)
from kvoffload_operator.resources.region import build_region, build_region_spec
from kvoffload_operator.view import ClusterView


@dataclass(frozen=True, slots=True)
class NodePlan(NodeVerdict):
    """A node's verdict, and what to write for it; None and empty mean that nothing is to be written."""

    region: Mapping[str, Any] | None
    """Region to apply."""
    node_ready: Condition | None
    """Condition to apply to the region's status."""
    region_name: str
    labels: Mapping[str, str | None]
    """Node labels to set, or with None to remove."""

    @property
    def num_writes(self) -> int:
        """Requests that applying it takes."""
        return sum((self.region is not None, self.node_ready is not None, bool(self.labels)))


def plan_node(facts: NodeFacts, *, pool: str, pool_uid: str, may_create: bool) -> NodePlan:
    """Decide for one matching node. `may_create` is False in mode Observe: then nothing is made, only counted."""
    unfit = first_violation(facts, NODE_CHECKS)
    short = unfit is not None and unfit.state is NodeState.SHORT_OF_PAGES
    violation = unfit or first_violation(facts, REPORT_CHECKS)
    desired = build_region_spec(pool, facts.node.name, facts.spec)
    manifest = build_region(pool, pool_uid, desired)
    name = str(manifest["metadata"]["name"])
    exists = facts.region is not None
    wanted = exists or may_create
    return NodePlan(
        node=facts.node.name,
        violation=violation,
        region=manifest if wanted and _differs(facts, desired) else None,
        node_ready=_node_ready(facts, unfit) if wanted else None,
        region_name=name,
        labels=_labels(facts, pool, ready=violation is None, runs=not short, may_create=may_create),
    )


def _differs(facts: NodeFacts, desired: KVOffloadRegionSpec) -> bool:
    return facts.region is None or facts.region.spec != desired


def _node_ready(facts: NodeFacts, unfit: NodeViolation | None) -> Condition | None:
    previous = facts.region.status.conditions if facts.region else ()
    if find(list(previous), RegionCondition.NODE_READY) is None and _is_starting(facts, unfit):
        return None  # said now, it would be outdated before it is read; the pool's status has it
    condition = transition(
        previous,
        type=RegionCondition.NODE_READY,
        status="True" if unfit is None else "False",
        reason=RegionReason.DAEMON_RUNNING if unfit is None else unfit.reason,
        message="the daemon runs and its pages are allocatable" if unfit is None else unfit.message,
        generation=facts.region.generation if facts.region else 1,
        now=facts.now,
    )
    return None if find(list(previous), RegionCondition.NODE_READY) == condition else condition


def _is_starting(facts: NodeFacts, unfit: NodeViolation | None) -> bool:
    """Whether the daemon's pod is on its way, and nobody says that anything is wrong with it."""
    if unfit is None or unfit.state is not NodeState.PENDING:
        return False
    return facts.daemon_pod is None or not facts.daemon_pod.problem


def _labels(facts: NodeFacts, pool: str, *, ready: bool, runs: bool, may_create: bool) -> dict[str, str | None]:
    """Changes to the node's labels; a daemon that runs is not taken away while it runs."""
    have = facts.node.labels
    changes: dict[str, str | None] = {}
    daemon, usable = daemon_node_label(pool), ready_node_label(pool)
    if may_create and runs and have.get(daemon) != DAEMON_NODE_LABEL_VALUE:
        changes[daemon] = DAEMON_NODE_LABEL_VALUE
    elif may_create and not runs and daemon in have and not facts.daemon_runs:
        changes[daemon] = None
    active = facts.spec.mode is Mode.ACTIVE
    if ready and active and have.get(usable) != READY_NODE_LABEL_VALUE:
        changes[usable] = READY_NODE_LABEL_VALUE
    elif not (ready and active) and usable in have:
        changes[usable] = None
    return changes


async def apply_node(kube: KubeClient, view: ClusterView, plan: NodePlan) -> None:
    """Write region, condition and labels, in this order; the view learns what became of them at once."""
    if plan.region is not None:
        view.update_region(await kube.apply(REGIONS, plan.region, field_manager=OPERATOR_FIELD_MANAGER))
    if plan.node_ready is not None:
        # never forced: the daemon owns the other conditions
        written = await kube.apply(
            REGIONS,
            {
                "metadata": {"name": plan.region_name},
                "status": {"conditions": [plan.node_ready.to_manifest()]},
            },
            field_manager=OPERATOR_FIELD_MANAGER,
            force=False,
            subresource="status",
        )
        view.update_region(written)
    if plan.labels:
        await label_node(kube, view, plan.node, plan.labels)


async def label_node(kube: KubeClient, view: ClusterView, node: str, labels: Mapping[str, str | None]) -> None:
    """Set or remove labels; a node that is gone needs none."""
    try:
        view.update_node(await kube.merge_patch(NODES, node, {"metadata": {"labels": dict(labels)}}))
    except ApiServerError as error:
        if not error.is_not_found:
            raise
