"""From manifests to facts, and which changes of them wake whom."""

from kvoffload_operator.observe import ClusterView, Dirty, node_matches, observe_daemon_pod, observe_node
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
