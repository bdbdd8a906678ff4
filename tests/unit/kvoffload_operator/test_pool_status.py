"""What a pool's status says of all nodes together: sums and conditions, and which of their changes are events."""

from kvoffload.api.conditions import PoolReason
from kvoffload.api.pool import KVOffloadPoolStatus
from kvoffload_operator.reconcilers.pool import plan_pool
from kvoffload_operator.status import InjectionHealth, find_transitions
from operator_builders import pool_manifest
from pool_pass import OPTIONS, condition, facts, region, serving, status_condition, with_status


def test_sums_are_of_the_regions_that_serve() -> None:
    regions = {
        "a": serving("a", usedBytes=5, savedBytes=7, enginesAttached=3, enginesReplicated=2),
        "b": region("b", condition("Ready", "False", "PagesUnavailable"), capacityBytes=99),
    }
    plan = plan_pool(facts(regions=regions), OPTIONS)
    assert plan.status is not None
    assert (plan.status.capacity_bytes, plan.status.used_bytes, plan.status.saved_bytes) == (1 << 30, 5, 7)
    assert (plan.status.engines.attached, plan.status.engines.replicated) == (3, 2)


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


def test_pages_that_the_kubelet_counts_and_the_daemon_cannot_have_are_not_available() -> None:
    gone = condition("Ready", "False", "PagesUnavailable", "64Mi of 2Mi pages are free, needed 1Gi: 480 pages too few")
    runs = condition("NodeReady", reason="DaemonRunning")
    plan = plan_pool(facts(regions={"a": region("a", runs, gone), "b": serving("b")}), OPTIONS)
    found = status_condition(plan, "HugepagesAvailable")
    assert (found.status, found.reason) == ("False", "NodesShortOfPages")
    assert "1 of 2 nodes" in found.message
    assert "480 pages too few" in found.message


def test_sums_beyond_what_a_status_takes_stop_there() -> None:
    most = {"capacityBytes": 2**60, "savedBytes": 2**60, "enginesAttached": 10**6}
    plan = plan_pool(facts(regions={"a": serving("a", **most), "b": serving("b", **most)}), OPTIONS)
    assert plan.status is not None
    assert (plan.status.capacity_bytes, plan.status.saved_bytes, plan.status.engines.attached) == (
        2**60,
        2**60,
        10**6,
    )


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
