"""What one pass over a pool writes: DaemonSet, regions and labels, and nothing where all is as it should be."""

from datetime import timedelta

import pytest

from kvoffload_operator.observe import ObservedDaemonSet, observe_node
from kvoffload_operator.reconcilers.pool import all_daemons_available, plan_pool
from operator_builders import NOW, node_manifest, pool_manifest, spec_of
from pool_pass import OPTIONS, READY, RUN, daemonset, facts, serving, status_condition, with_status


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
