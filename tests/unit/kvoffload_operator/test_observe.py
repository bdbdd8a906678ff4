"""From manifests to facts, and which changes of them wake whom."""

from typing import Any

import pytest

from kvoffload.errors import InvalidSpec
from kvoffload_operator.observe import node_matches, observe_daemon_pod, observe_node
from kvoffload_operator.view import ClusterView, Dirty
from operator_builders import node_manifest, pool_manifest


def test_a_pending_daemon_s_node_is_read_from_its_affinity() -> None:
    manifest = {
        "metadata": {"name": "d"},
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "values": ["n7"]}]}]
                    }
                }
            }
        },
        "status": {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
            ],
        },
    }
    pod = observe_daemon_pod(manifest)
    assert (pod.node, pod.is_running, pod.problem) == ("n7", False, "Unschedulable: 0/1 nodes")


def test_a_node_matches_where_it_has_all_labels() -> None:
    node = observe_node(node_manifest("a", labels={"x": "1", "y": "2"}))
    assert node_matches(node, {})
    assert node_matches(node, {"x": "1", "y": "2"})
    assert not node_matches(node, {"x": "1", "z": ""})


def test_a_view_takes_no_older_state_for_a_newer_one() -> None:
    view = ClusterView()
    old = node_manifest("a", labels={"x": "1"})
    new = {**node_manifest("a", labels={"x": "2"}), "status": old["status"]}
    new["metadata"]["resourceVersion"] = "7"
    view.update_node(new)
    assert view.update_node(old) == Dirty()
    assert view.nodes["a"].labels == {"x": "2"}
    view.forget("nodes", "a")
    view.update_node(old)
    assert view.nodes["a"].labels == {"x": "1"}, "another object of that name may begin anew"


def test_what_was_deleted_is_not_brought_back_by_what_was_read_before() -> None:
    """By a listing under way, or by the answer to a write of our own."""
    view = ClusterView()
    view.update_pool(pool_manifest())
    view.begin_listing()
    view.forget("kvoffloadpools", "main", version="9")
    assert view.update_pool(pool_manifest()) == Dirty()
    assert not view.pools
    anew = pool_manifest()
    anew["metadata"]["resourceVersion"] = "10"
    assert view.update_pool(anew).pools == {"main"}


def test_a_deletion_that_is_heard_of_late_takes_nothing_that_was_made_since() -> None:
    view, anew = ClusterView(), pool_manifest()
    anew["metadata"]["resourceVersion"] = "20"
    view.update_pool(anew)
    assert view.forget("kvoffloadpools", "main", version="15") == Dirty()
    assert set(view.pools) == {"main"}


def test_deletions_are_remembered_no_longer_than_a_listing_may_be_under_way() -> None:
    view = ClusterView()
    for number in range(3):
        view.forget("pods", f"team/p{number}", version="7")
    view.begin_listing()
    assert not view._versions


@pytest.mark.parametrize("taint", [{}, [], None])
def test_an_object_that_is_not_as_anybody_expected_is_refused_as_one(taint: Any) -> None:
    node = node_manifest("a") | {"spec": {"taints": [taint]}}
    with pytest.raises(InvalidSpec, match=r"not read: (KeyError|TypeError): "):
        ClusterView().update_node(node)


def test_a_heartbeat_wakes_nobody_and_a_label_wakes_the_pools_that_it_concerns() -> None:
    view = ClusterView()
    view.update_pool(pool_manifest("main", nodeSelector={"gpu": "yes"}))
    view.update_pool(pool_manifest("other", nodeSelector={"gpu": "no"}))
    node = node_manifest("a", labels={"gpu": "yes"})
    assert view.update_node(node).pools == {"main"}
    heartbeat = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}}
    assert view.update_node(heartbeat) == Dirty()
    moved = node_manifest("a", labels={"gpu": "no"})
    moved["metadata"]["resourceVersion"] = "3"
    assert view.update_node(moved).pools == {"main", "other"}
    assert view.forget("nodes", "a").pools == {"other"}
