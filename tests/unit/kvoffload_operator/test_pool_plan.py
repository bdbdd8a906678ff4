"""What one pass over a pool writes: node truth, conditions, and nothing where all is as it should be."""

from datetime import timedelta
from typing import Any

import pytest

from kvoffload.api.conditions import Condition, PoolReason, find
from kvoffload.api.pool import KVOffloadPoolStatus
from kvoffload.api.region import KVOffloadRegion
from kvoffload_operator.observe import ObservedDaemonPod, ObservedDaemonSet, observe_node, observe_pool
from kvoffload_operator.reconcilers.pool import PoolFacts, PoolPlan, all_daemons_available, plan_pool
from kvoffload_operator.resources.daemonset import SPEC_HASH_ANNOTATION, build_daemonset
from kvoffload_operator.resources.region import build_region, build_region_spec
from kvoffload_operator.status import MAX_PROBLEM_MESSAGE, InjectionHealth, find_transitions
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


def test_a_new_pool_gets_a_daemonset_a_region_for_each_node_and_labels() -> None:
    plan = plan_pool(
        facts(
            nodes=tuple(observe_node(node_manifest(name)) for name in ("a", "b")),
            regions={},
            daemonset=None,
            daemon_pods={},
        ),
        OPTIONS,
    )
    assert plan.daemonset is not None
    assert [node.region["metadata"]["name"] for node in plan.nodes if node.region] == ["main.a", "main.b"]
    assert [dict(node.labels) for node in plan.nodes] == [RUN, RUN]
    assert status_condition(plan, "Ready").reason == "NoNodeReady"
    assert plan.requeue_seconds is not None


def test_a_second_pass_writes_nothing() -> None:
    first = plan_pool(facts(), OPTIONS)
    assert first.status is not None
    assert status_condition(first, "Ready").status == "True"
    second = plan_pool(facts(with_status(pool_manifest(), first), now=NOW + timedelta(minutes=5)), OPTIONS)
    assert second.status is None
    assert second.daemonset is None
    assert [node.num_writes for node in second.nodes] == [0, 0]
    assert second.regions_to_delete == ()
    assert not second.labels_to_remove
    assert second.requeue_seconds is None


def test_sums_are_of_the_regions_that_serve() -> None:
    regions = {
        "a": serving("a", usedBytes=5, savedBytes=7, enginesAttached=3, enginesReplicated=2),
        "b": region("b", condition("Ready", "False", "PagesUnavailable"), capacityBytes=99),
    }
    plan = plan_pool(facts(regions=regions), OPTIONS)
    assert plan.status is not None
    assert (plan.status.capacity_bytes, plan.status.used_bytes, plan.status.saved_bytes) == (1 << 30, 5, 7)
    assert (plan.status.engines.attached, plan.status.engines.replicated) == (3, 2)


def test_a_node_short_of_pages_is_left_out_and_told_what_to_run() -> None:
    nodes = (
        observe_node(node_manifest("a", labels=READY)),
        observe_node(node_manifest("b", pages="512Mi", labels=RUN)),
    )
    pods = {"a": ObservedDaemonPod("d", "a", True, "")}
    plan = plan_pool(facts(nodes=nodes, regions={"a": serving("a")}, daemon_pods=pods), OPTIONS)
    (short,) = [node for node in plan.nodes if node.node == "b"]
    assert short.labels == {"daemon.kvoffload.io/main": None}
    assert short.node_ready is not None
    assert short.node_ready.status == "False"
    assert (
        "n=$(cat /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages); [ $n -ge 512 ] || n=512"
        in short.node_ready.message
    )
    assert len(short.node_ready.message) < MAX_PROBLEM_MESSAGE
    assert "512Mi" in short.node_ready.message
    assert "1Gi" in short.node_ready.message
    assert status_condition(plan, "HugepagesAvailable").reason == "NodesShortOfPages"
    assert status_condition(plan, "Ready").reason == "SomeNodesNotReady"
    assert plan.status is not None
    assert plan.status.nodes.short_of_pages == 1
    assert [problem.node for problem in plan.status.problems] == ["b"]


def test_pages_of_another_pool_on_the_node_are_not_counted_twice() -> None:
    other = observe_pool(pool_manifest("other", capacity="512Mi"))
    mine = observe_pool(pool_manifest())
    nodes = (observe_node(node_manifest("a", labels={**RUN, "daemon.kvoffload.io/other": "run"})),)
    plan = plan_pool(facts(nodes=nodes, regions={}, pools={"main": mine, "other": other}, daemon_pods={}), OPTIONS)
    assert plan.nodes[0].violation is not None
    assert "512Mi of them used by other pools" in plan.nodes[0].violation.message
    assert status_condition(plan, "Degraded").reason == "OverlapsAnotherPool"
    assert "other on 1 nodes" in status_condition(plan, "Degraded").message


@pytest.mark.parametrize("observes", ["main", "other"])
def test_a_pool_that_only_observes_overlaps_none_and_none_overlaps_it(observes: str) -> None:
    manifests = {
        name: pool_manifest(name, mode="Observe" if name == observes else "Active") for name in ("main", "other")
    }
    pools = {name: observe_pool(manifest) for name, manifest in manifests.items()}
    plan = plan_pool(facts(manifests["main"], pools=pools), OPTIONS)
    assert status_condition(plan, "Degraded").reason == "AsAsked"


def test_a_pool_that_asks_more_than_any_node_has_says_so() -> None:
    plan = plan_pool(facts(pool_manifest(capacity="2Gi"), regions={}, daemonset=None, daemon_pods={}), OPTIONS)
    found = status_condition(plan, "HugepagesAvailable")
    assert (found.status, found.reason) == ("False", "ExceedsEveryNode")
    assert "the most is 1Gi" in found.message
    provisioned = status_condition(plan, "RegionsProvisioned")
    assert (provisioned.status, provisioned.reason) == ("False", "NodesShortOfPages")
    assert "none of 2 nodes has the pages" in provisioned.message
    assert plan.status is not None
    changed = find_transitions(KVOffloadPoolStatus(), plan.status)
    assert [one.condition.reason for one in changed if not one.is_warning] == ["NoNodeReady"]


def test_a_pool_that_matches_no_node_says_with_which_label() -> None:
    plan = plan_pool(facts(pool_manifest(nodeSelector={"gpu": "yes"}), regions={}), OPTIONS)
    found = status_condition(plan, "Ready")
    assert found.reason == "NoMatchingNodes"
    assert "kubectl label node <name> gpu=yes" in found.message


def test_regions_and_labels_of_nodes_that_no_longer_match_go() -> None:
    nodes = (
        observe_node(node_manifest("a", labels={**READY, "gpu": "yes"})),
        observe_node(node_manifest("b", labels=READY)),
    )
    plan = plan_pool(
        facts(pool_manifest(nodeSelector={"gpu": "yes"}), nodes=nodes, regions={n: serving(n) for n in "abc"}), OPTIONS
    )
    assert {name for name, _ in plan.regions_to_delete} == {"main.b", "main.c"}
    assert plan.labels_to_remove == {"b": ("pool.kvoffload.io/main", "daemon.kvoffload.io/main")}


@pytest.mark.parametrize(
    ("pod", "state", "reason"),
    [
        (None, "pending", "DaemonPending"),
        (ObservedDaemonPod("d", "a", False, "Unschedulable: 0/1 nodes"), "pending", "DaemonPending"),
        (ObservedDaemonPod("d", "a", True, "container daemon: CrashLoopBackOff: x"), "failing", "DaemonFailing"),
        (ObservedDaemonPod("d", "a", True, ""), "ready", None),
    ],
)
def test_the_daemon_s_pod_decides_where_not_all_are_available(
    pod: ObservedDaemonPod | None, state: str, reason: str | None
) -> None:
    node = observe_node(node_manifest("a", labels=RUN))
    plan = plan_pool(facts(nodes=(node,), regions={"a": serving("a")}, daemon_pods={"a": pod} if pod else {}), OPTIONS)
    assert plan.nodes[0].state == state
    violation = plan.nodes[0].violation
    assert (violation.reason if violation else None) == reason


def test_a_daemon_that_is_being_started_points_to_what_knows_why_it_lasts() -> None:
    node = observe_node(node_manifest("a", labels=RUN))
    pods = {"a": ObservedDaemonPod("d", "a", False, "")}
    plan = plan_pool(facts(nodes=(node,), regions={}, daemon_pods=pods), OPTIONS)
    assert "`kubectl kvoffload doctor` says why" in status_condition(plan, "RegionsProvisioned").message


TAINT = {"key": "dedicated", "value": "training", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "tolerations", "reason"),
    [
        (TAINT, [], "TaintNotTolerated"),
        (TAINT, [{"key": "other", "operator": "Exists"}], "TaintNotTolerated"),
        (TAINT, [{"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}], "TaintNotTolerated"),
        (TAINT, [{"key": "dedicated", "value": "serving"}], "TaintNotTolerated"),
        (TAINT, [{"key": "dedicated", "value": "training"}], "DaemonPending"),
        (TAINT, [{"operator": "Exists"}], "DaemonPending"),
        ({**TAINT, "effect": "PreferNoSchedule"}, [], "DaemonPending"),
        ({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}, [], "DaemonPending"),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, None, "DaemonPending"),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, [], "TaintNotTolerated"),
    ],
)
def test_a_taint_that_keeps_the_daemon_away_is_named_with_its_toleration(
    taint: dict[str, str], tolerations: list[dict[str, str]] | None, reason: str
) -> None:
    node = observe_node({**node_manifest("a", labels=RUN), "spec": {"taints": [taint]}})
    given = {} if tolerations is None else {"tolerations": tolerations}
    plan = plan_pool(facts(pool_manifest(**given), nodes=(node,), regions={}, daemon_pods={}), OPTIONS)
    violation = plan.nodes[0].violation
    assert violation is not None
    assert violation.reason == reason
    if reason == "TaintNotTolerated":
        shown = f"{taint['key']}={taint['value']}:{taint['effect']}"
        assert shown in violation.message
        assert f"{{key: {taint['key']}, operator: Exists, effect: {taint['effect']}}}" in violation.message


@pytest.mark.parametrize(
    ("before", "pod", "written"),
    [
        ([], None, None),
        ([], ObservedDaemonPod("d", "a", False, ""), None),
        ([], ObservedDaemonPod("d", "a", False, "Unschedulable: 0/1 nodes"), "False"),
        ([], ObservedDaemonPod("d", "a", True, ""), "True"),
        ([condition("NodeReady", reason="DaemonRunning")], None, "False"),
    ],
    ids=["no pod yet", "being started", "cannot start", "runs", "no longer there"],
)
def test_a_new_region_is_told_of_its_daemon_when_it_runs_or_cannot(
    before: list[Condition], pod: ObservedDaemonPod | None, written: str | None
) -> None:
    """One write a node less while a thousand daemons start: the pool's status counts those as pending."""
    node = observe_node(node_manifest("a", labels=RUN))
    regions = {"a": region("a", *before)}
    plan = plan_pool(facts(nodes=(node,), regions=regions, daemon_pods={"a": pod} if pod else {}), OPTIONS)
    node_ready = plan.nodes[0].node_ready
    assert (node_ready.status if node_ready else None) == written
    assert plan.status is not None
    assert plan.status.nodes.pending == 1


def test_a_daemon_that_does_not_report_is_named_after_a_while_only() -> None:
    silent = region("a", condition("NodeReady", reason="DaemonRunning", age=89))
    node = observe_node(node_manifest("a", labels=RUN))
    early = plan_pool(facts(nodes=(node,), regions={"a": silent}), OPTIONS)
    late = plan_pool(facts(nodes=(node,), regions={"a": silent}, now=NOW + timedelta(seconds=2)), OPTIONS)
    assert [early.nodes[0].state, late.nodes[0].state] == ["pending", "not_reporting"]
    assert early.requeue_seconds is not None, "nobody else would wake it"


def test_what_the_daemon_says_is_passed_on() -> None:
    wrong = region("a", condition("NodeReady"), condition("Ready", "False", "CgroupLimit", "limit 3 of 5"))
    plan = plan_pool(facts(nodes=(observe_node(node_manifest("a", labels=READY)),), regions={"a": wrong}), OPTIONS)
    assert plan.nodes[0].state == "failing"
    assert "limit 3 of 5" in status_condition(plan, "Ready").message
    assert plan.nodes[0].labels == {"pool.kvoffload.io/main": None}


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


def test_pages_that_the_kubelet_counts_and_the_daemon_cannot_have_are_not_available() -> None:
    gone = condition("Ready", "False", "PagesUnavailable", "64Mi of 2Mi pages are free, needed 1Gi: 480 pages too few")
    runs = condition("NodeReady", reason="DaemonRunning")
    plan = plan_pool(facts(regions={"a": region("a", runs, gone), "b": serving("b")}), OPTIONS)
    found = status_condition(plan, "HugepagesAvailable")
    assert (found.status, found.reason) == ("False", "NodesShortOfPages")
    assert "1 of 2 nodes" in found.message
    assert "480 pages too few" in found.message


def test_an_invalid_spec_is_a_condition_and_changes_nothing_else() -> None:
    bad = pool_manifest()
    bad["spec"]["capacity"] = (1 << 30) + 1
    plan = plan_pool(facts(bad), OPTIONS)
    found = status_condition(plan, "Ready")
    assert found.reason == "InvalidSpec"
    assert "nearest multiples are 1Gi and 1026Mi" in found.message
    assert (plan.daemonset, plan.nodes, plan.regions_to_delete) == (None, (), ())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (pool_manifest(capacity="4Ei"), "4611686018427387904 bytes is more than 1152921504606846976 (1Ei)"),
        (pool_manifest("a" * 41), "of at most 40 characters, it has 41: make a pool of another name"),
        (pool_manifest("a.b"), "'a.b' must be a DNS label"),
    ],
    ids=["capacity", "long name", "name with a dot"],
)
def test_what_an_older_crd_lets_in_and_no_region_can_say_is_a_condition(bad: dict[str, Any], message: str) -> None:
    found = status_condition(plan_pool(facts(bad, regions={}), OPTIONS), "Ready")
    assert found.reason == "InvalidSpec"
    assert message in found.message


def test_the_largest_capacity_is_planned() -> None:
    plan = plan_pool(facts(pool_manifest(capacity="1Ei"), regions={}), OPTIONS)
    assert status_condition(plan, "HugepagesAvailable").reason == "ExceedsEveryNode"
    assert plan.nodes[0].region is not None


def test_sums_beyond_what_a_status_takes_stop_there() -> None:
    most = {"capacityBytes": 2**60, "savedBytes": 2**60, "enginesAttached": 10**6}
    plan = plan_pool(facts(regions={"a": serving("a", **most), "b": serving("b", **most)}), OPTIONS)
    assert plan.status is not None
    assert (plan.status.capacity_bytes, plan.status.saved_bytes, plan.status.engines.attached) == (
        2**60,
        2**60,
        10**6,
    )


def test_a_status_of_another_version_is_written_anew() -> None:
    given = pool_manifest() | {"status": {"usedBytes": 2**62, "observedGeneration": 1}}
    plan = plan_pool(facts(given), OPTIONS)
    assert status_condition(plan, "Ready").reason == "AllNodesReady"


def test_a_spec_that_does_not_parse_is_a_condition_too() -> None:
    bad = pool_manifest()
    bad["spec"]["mode"] = "Sideways"
    found = status_condition(plan_pool(facts(bad), OPTIONS), "Ready")
    assert found.reason == "InvalidSpec"
    assert "spec.mode" in found.message


def test_case_29_fields_that_an_older_crd_dropped_are_named_and_no_limit_is_lost() -> None:
    old = pool_manifest(quotas=[{"namespace": "x", "guaranteed": "1Mi"}])
    for field in ("maxEnginesPerNode", "sharing"):
        del old["spec"][field]
    plan = plan_pool(facts(old), OPTIONS)
    found = status_condition(plan, "Degraded")
    assert (found.status, found.reason) == ("True", "CRDOutdated")
    assert "maxEnginesPerNode, sharing" in found.message
    written = plan.nodes[0].region
    assert written is not None
    assert written["spec"]["maxEngines"] == 64
    assert written["spec"]["quotas"] == [{"namespace": "x", "guaranteedBytes": 1 << 20, "limitBytes": 1 << 30}]


def test_fields_of_a_newer_crd_are_named_where_the_operator_ignores_them() -> None:
    found = status_condition(plan_pool(facts(pool_manifest(tier="Fast")), OPTIONS), "Degraded")
    assert (found.status, found.reason) == ("True", "CRDNewer")
    assert "spec fields tier" in found.message


def test_a_pool_whose_fields_are_all_stored_is_not_called_outdated() -> None:
    assert status_condition(plan_pool(facts(), OPTIONS), "Degraded").status == "False"


def test_pods_keep_the_pages_of_a_shrinking_region_until_it_has_given_them_back() -> None:
    shrunk = pool_manifest(capacity="512Mi")
    waiting = plan_pool(facts(shrunk), OPTIONS)
    assert waiting.daemonset is None, "the regions still hold 1Gi: the pods' template stays"
    assert waiting.nodes[0].region is not None
    assert waiting.nodes[0].region["spec"]["capacityBytes"] == 512 << 20
    assert status_condition(waiting, "RegionsProvisioned").reason == "RolloutInProgress"
    small = {"capacity": "512Mi"}
    done = plan_pool(facts(shrunk, regions={name: serving(name, capacityBytes=512 << 20) for name in "ab"}), OPTIONS)
    assert done.daemonset is not None
    limits = done.daemonset["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["hugepages-2Mi"] == str(spec_of(**small).capacity)


def test_a_webhook_that_does_not_answer_is_said_in_the_pool() -> None:
    down = InjectionHealth(PoolReason.WEBHOOK_UNAVAILABLE, "0 of 2 replicas")
    found = status_condition(plan_pool(facts(injection=down), OPTIONS), "InjectionReady")
    assert (found.status, found.reason) == ("False", "WebhookUnavailable")


def test_events_follow_changes_and_nothing_else() -> None:
    plan = plan_pool(facts(), OPTIONS)
    assert plan.status is not None
    first = find_transitions(KVOffloadPoolStatus(), plan.status)
    assert [one.condition.type for one in first] == ["Ready"], "of a new pool only Ready is news"
    assert find_transitions(plan.status, plan.status) == []
    beginning = plan_pool(facts(regions={}, daemonset=None, daemon_pods={}), OPTIONS).status
    assert beginning is not None
    assert [(one.condition.reason, one.is_warning) for one in find_transitions(KVOffloadPoolStatus(), beginning)] == [
        ("NoNodeReady", False)
    ]
    worse = plan_pool(facts(with_status(pool_manifest(), plan), regions={"a": serving("a")}), OPTIONS)
    assert worse.status is not None
    changed = find_transitions(plan.status, worse.status)
    assert {one.condition.type for one in changed if one.is_warning} == {"Ready", "RegionsProvisioned"}


def test_a_daemon_that_holds_its_pages_is_not_called_short_of_them_nor_taken_away() -> None:
    nodes = tuple(observe_node(node_manifest(name, pages="0", labels=READY)) for name in ("a", "b"))
    plan = plan_pool(facts(nodes=nodes), OPTIONS)
    assert [node.state for node in plan.nodes] == ["ready", "ready"]
    assert [dict(node.labels) for node in plan.nodes] == [{}, {}]


def test_a_capacity_that_outgrows_a_node_is_said_and_takes_its_running_daemon_away_only_when_it_ends() -> None:
    grown = pool_manifest(capacity="2Gi")
    running = plan_pool(facts(grown), OPTIONS)
    assert {node.state for node in running.nodes} == {"short_of_pages"}
    assert all("daemon.kvoffload.io/main" not in node.labels for node in running.nodes)
    ended = plan_pool(facts(grown, daemon_pods={}), OPTIONS)
    assert all(node.labels["daemon.kvoffload.io/main"] is None for node in ended.nodes)


@pytest.mark.parametrize(
    ("given", "all_available"),
    [
        (daemonset(), True),
        (daemonset(num_desired=0, num_updated=0, num_available=0), False),
        (daemonset(num_desired=1, num_updated=1, num_available=1), False),
        (daemonset(num_available=1), False),
        (daemonset(num_updated=1), False),
        (daemonset(observed_current=False), False),
        (None, False),
    ],
)
def test_the_daemonset_s_counts_are_believed_only_where_they_cover_every_labelled_node(
    given: ObservedDaemonSet | None, all_available: bool
) -> None:
    nodes = [observe_node(node_manifest(name, labels=RUN)) for name in ("a", "b")]
    assert all_daemons_available(given, [*nodes, observe_node(node_manifest("c"))]) is all_available
