"""What one pass over a pool says of each node: its pages, its taints, its daemon's pod and what that reports."""

from datetime import timedelta

import pytest

from kvoffload.api.conditions import Condition
from kvoffload_operator.observe import ObservedDaemonPod, observe_node, observe_pool
from kvoffload_operator.reconcilers.pool import plan_pool
from kvoffload_operator.status import MAX_PROBLEM_MESSAGE
from operator_builders import NOW, node_manifest, pool_manifest
from pool_pass import OPTIONS, READY, RUN, condition, facts, region, serving, status_condition


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
