"""A pool that only observes makes nothing, and a paused one keeps what it has; neither warns of what was asked."""

import pytest

from kvoffload.api.pool import KVOffloadPoolStatus
from kvoffload_operator.observe import observe_node, observe_pool
from kvoffload_operator.reconcilers.pool import plan_pool
from kvoffload_operator.status import find_transitions
from operator_builders import node_manifest, pool_manifest
from pool_pass import OPTIONS, condition, facts, region, status_condition


@pytest.mark.parametrize("observes", ["main", "other"])
def test_a_pool_that_only_observes_overlaps_none_and_none_overlaps_it(observes: str) -> None:
    manifests = {
        name: pool_manifest(name, mode="Observe" if name == observes else "Active") for name in ("main", "other")
    }
    pools = {name: observe_pool(manifest) for name, manifest in manifests.items()}
    plan = plan_pool(facts(manifests["main"], pools=pools), OPTIONS)
    assert status_condition(plan, "Degraded").reason == "AsAsked"


def test_mode_observe_makes_nothing_and_counts_what_nodes_would_give() -> None:
    nodes = (observe_node(node_manifest("a")), observe_node(node_manifest("b", pages="0")))
    plan = plan_pool(
        facts(pool_manifest(mode="Observe"), nodes=nodes, regions={}, daemonset=None, daemon_pods={}), OPTIONS
    )
    assert plan.daemonset is None
    assert [node.num_writes for node in plan.nodes] == [0, 0]
    found = status_condition(plan, "Ready")
    assert found.reason == "Observing"
    assert "1 of 2 nodes could give 1Gi" in found.message
    assert plan.status is not None
    assert [one.node for one in plan.status.problems] == ["b"], "that nothing runs on a is no problem"
    assert plan.requeue_seconds is None


def test_mode_paused_keeps_daemons_and_regions_and_takes_the_ready_label_away() -> None:
    plan = plan_pool(facts(pool_manifest(mode="Paused")), OPTIONS)
    assert plan.daemonset is None
    assert plan.regions_to_delete == ()
    assert all(node.region is not None and node.region["spec"]["mode"] == "Paused" for node in plan.nodes)
    assert [dict(node.labels) for node in plan.nodes] == [{"pool.kvoffload.io/main": None}] * 2
    assert status_condition(plan, "Ready").reason == "Paused"


def test_nodes_of_a_paused_pool_are_no_problem() -> None:
    runs = condition("NodeReady", reason="DaemonRunning")
    paused = {node: region(node, runs, condition("Ready", "False", "Paused")) for node in "ab"}
    status = plan_pool(facts(pool_manifest(mode="Paused"), regions=paused), OPTIONS).status
    assert status is not None
    assert status.problems == []


@pytest.mark.parametrize("mode", ["Observe", "Paused"])
def test_a_pool_that_does_as_told_warns_of_nothing_but_what_is_wrong(mode: str) -> None:
    active = plan_pool(facts(), OPTIONS).status
    told = plan_pool(facts(pool_manifest(mode=mode)), OPTIONS).status
    assert active is not None
    assert told is not None
    changed = {one.condition.type: one.is_warning for one in find_transitions(active, told)}
    assert changed["Ready"] is False
    assert not any(changed.values())
    short = (observe_node(node_manifest("a", pages="0")),)
    lacking = plan_pool(facts(pool_manifest(mode="Observe"), nodes=short, regions={}), OPTIONS).status
    assert lacking is not None
    assert [one.condition.type for one in find_transitions(KVOffloadPoolStatus(), lacking) if one.is_warning] == [
        "HugepagesAvailable"
    ]


def test_a_paused_pool_still_counts_the_pages_that_it_keeps() -> None:
    paused = condition("Ready", "False", "Paused", "the pool's mode is Paused")
    runs = condition("NodeReady", reason="DaemonRunning")
    kept = {name: region(name, runs, paused, capacityBytes=1 << 30, usedBytes=5 << 20) for name in "ab"}
    status = plan_pool(facts(pool_manifest(mode="Paused"), regions=kept), OPTIONS).status
    assert status is not None
    assert (status.capacity_bytes, status.used_bytes) == (2 << 30, 10 << 20)
