"""The operator as a process with the chart's permissions, on a real API server whose nodes are written by the tests."""

import time
from collections.abc import Callable, Iterator

import pytest

from e2e.control_plane import NAMESPACE, ControlPlane, report_regions, run_daemon_pods, wait_until
from e2e.operator_pools import QUICK, condition, events_of, leftovers, make_pool, make_ready, node_labels
from e2e.operator_process import OperatorProcess, running_operator

pytestmark = pytest.mark.e2e
__all__ = ["make_pool"]


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, **QUICK) as running:
        yield running


def test_a_pool_becomes_ready_and_says_so_on_pool_region_and_node(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("ready")
    make_ready(control_plane, pool)
    status = control_plane.get("kvpool", pool)["status"]
    assert status["capacityBytes"] == 2 * (64 << 20)
    header, row = control_plane.kubectl("get", "kvpool", pool, "-o", "wide").splitlines()
    columns = dict(zip(header.split(), row.split(), strict=True))
    assert [columns[name] for name in ("PERNODE", "CAPACITY", "USED", "FREE", "SAVED")] == [
        "64Mi", "128Mi", "0", "128Mi", "0",
    ]  # fmt: skip
    assert (status["nodes"]["ready"], status["nodes"]["matching"]) == (2, 2)
    for node in ("n1", "n2"):
        wait_until(
            lambda node=node: node_labels(control_plane, node).get("pool.kvoffload.io/ready") == "ready",  # type: ignore[misc]
            f"the ready label on {node}",
        )
        region = control_plane.get("kvregion", f"{pool}.{node}")
        owners = {one["type"]: one["status"] for one in region["status"]["conditions"]}
        assert owners == {"NodeReady": "True", "Ready": "True"}
    metadata = control_plane.get("kvpool", pool)["metadata"]
    assert not metadata.get("finalizers")
    assert [name for name in metadata.get("annotations", {}) if "kopf" in name] == []
    wait_until(
        lambda: "AllNodesReady" in {one["reason"] for one in events_of(control_plane, pool)},
        "the event, after the status",
    )


def test_a_second_pass_writes_nothing(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("idle")
    make_ready(control_plane, pool)
    kinds = ("kvpool", "kvregion", "nodes", f"daemonsets -n {NAMESPACE}", "events -n default")

    def versions() -> dict[str, str]:
        return {
            f"{kind}/{one['metadata']['name']}": one["metadata"]["resourceVersion"]
            for kind in kinds
            for one in control_plane.get(*kind.split())["items"]
        }

    seen = [versions()]

    def is_settled() -> bool:
        seen.append(versions())
        return len(seen) > 2 and seen[-1] == seen[-2] == seen[-3]

    wait_until(is_settled, "the last pass to land")
    started, passes = time.time(), operator.num_passes()
    wait_until(lambda: operator.num_passes() >= passes + 2, "the passes of two full listings")
    assert versions() == seen[-1]
    writes = [
        f"{event['verb']} {event['requestURI']}"
        for event in control_plane.audit(user="kvoffload-operator", since=started)
        if "/leases/" not in event["requestURI"]
    ]
    assert writes == []


def test_a_node_short_of_pages_is_named_with_its_remedy_and_does_not_stop_the_others(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    control_plane.add_node("small", pages="32Mi")
    try:
        pool = make_pool("short")
        wait_until(
            lambda: (
                (run_daemon_pods(control_plane), report_regions(control_plane))
                and control_plane.get("kvpool", pool).get("status", {}).get("nodes", {}).get("ready") == 2
            ),
            "the two others to serve",
        )
        found = condition(control_plane, pool, "HugepagesAvailable")
        assert (found["status"], found["reason"]) == ("False", "NodesShortOfPages")
        assert (
            "n=$(cat /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages); [ $n -ge 32 ] || n=32;"
            in found["message"]
        )
        assert condition(control_plane, pool, "Ready")["reason"] == "SomeNodesNotReady"
        assert [one["node"] for one in control_plane.get("kvpool", pool)["status"]["problems"]] == ["small"]
        daemonset = control_plane.get("daemonset", f"kvoffload-{pool}", "-n", NAMESPACE)
        assert daemonset["status"]["desiredNumberScheduled"] == 2
        control_plane.set_node_pages("small", "2Mi", "64Mi")
        make_ready(control_plane, pool)
        assert control_plane.get("kvpool", pool)["status"]["nodes"]["ready"] == 3
    finally:
        control_plane.kubectl("delete", "node", "small")


def test_a_node_that_no_longer_matches_loses_region_label_and_daemon(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    control_plane.kubectl("label", "node", "n1", "n2", "gpu=yes")
    try:
        pool = make_pool("relabel", nodeSelector={"gpu": "yes"})
        make_ready(control_plane, pool)
        control_plane.kubectl("label", "node", "n2", "gpu-")
        wait_until(lambda: control_plane.find("kvregion", f"{pool}.n2") is None, "the region to go")
        wait_until(
            lambda: not [label for label in node_labels(control_plane, "n2") if label.endswith(f"/{pool}")],
            "the labels to go",
        )
        assert control_plane.find("kvregion", f"{pool}.n1") is not None
        wait_until(
            lambda: (
                run_daemon_pods(control_plane) >= 0
                and control_plane.get("kvpool", pool)["status"]["nodes"]["matching"] == 1
            ),
            "the pool to count one node",
        )
    finally:
        control_plane.kubectl("label", "node", "n1", "n2", "gpu-")


def test_a_region_deleted_by_hand_comes_back(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("again")
    make_ready(control_plane, pool)
    before = control_plane.get("kvregion", f"{pool}.n1")["metadata"]["uid"]
    control_plane.kubectl("delete", "kvregion", f"{pool}.n1")
    wait_until(
        lambda: (
            (control_plane.find("kvregion", f"{pool}.n1") or {}).get("metadata", {}).get("uid") not in (None, before)
        ),
        "a new region",
    )


def test_observe_makes_nothing_and_says_what_nodes_would_give(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("look", mode="Observe")
    wait_until(lambda: condition(control_plane, pool, "Ready")["reason"] == "Observing", "the pool to be looked at")
    assert "2 of 2 nodes could give 128Mi in all" in condition(control_plane, pool, "Ready")["message"]
    assert leftovers(control_plane, [pool]) == []


def test_paused_detaches_and_keeps_the_daemons(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("pause")
    make_ready(control_plane, pool)
    control_plane.kubectl("patch", "kvpool", pool, "--type=merge", "-p", '{"spec":{"mode":"Paused"}}')
    wait_until(lambda: condition(control_plane, pool, "Ready")["reason"] == "Paused", "the pool to be paused")
    assert control_plane.get("kvregion", f"{pool}.n1")["spec"]["mode"] == "Paused"
    assert "pool.kvoffload.io/pause" not in node_labels(control_plane, "n1")
    assert control_plane.get("daemonset", f"kvoffload-{pool}", "-n", NAMESPACE)["status"]["desiredNumberScheduled"] == 2


def test_a_capacity_that_changes_reaches_regions_at_once_and_pods_when_pages_are_given_back(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("resize")
    make_ready(control_plane, pool)

    def limit() -> str:
        daemonset = control_plane.get("daemonset", f"kvoffload-{pool}", "-n", NAMESPACE)
        resources = daemonset["spec"]["template"]["spec"]["containers"][0]["resources"]
        return str(resources["limits"]["hugepages-2Mi"])

    control_plane.kubectl("patch", "kvpool", pool, "--type=merge", "-p", '{"spec":{"capacity":"32Mi"}}')
    wait_until(
        lambda: control_plane.get("kvregion", f"{pool}.n1")["spec"]["capacityBytes"] == 32 << 20, "the region to shrink"
    )
    wait_until(
        lambda: condition(control_plane, pool, "RegionsProvisioned")["reason"] == "RolloutInProgress",
        "the pool to say what it waits for",
    )
    assert limit() in (str(64 << 20), "64Mi")
    report_regions(control_plane)  # the daemons have given pages back
    wait_until(lambda: limit() in (str(32 << 20), "32Mi"), "the pods' limit to follow")


def test_a_daemonset_of_somebody_else_with_the_pool_s_name_is_left_as_it_is(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    theirs = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "kvoffload-taken", "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": "theirs"}},
            "template": {
                "metadata": {"labels": {"app": "theirs"}},
                "spec": {"nodeSelector": {"nowhere": "yes"}, "containers": [{"name": "c", "image": "x"}]},
            },
        },
    }
    control_plane.apply(theirs)
    try:
        before = control_plane.get("daemonset", "kvoffload-taken", "-n", NAMESPACE)
        pool = make_pool("taken")
        wait_until(
            lambda: condition(control_plane, pool, "RegionsProvisioned")["reason"] == "DaemonSetNameTaken",
            "the condition",
        )
        assert condition(control_plane, pool, "RegionsProvisioned")["status"] == "False"
        after = control_plane.get("daemonset", "kvoffload-taken", "-n", NAMESPACE)
        assert (after["spec"], after["metadata"].get("labels")) == (before["spec"], before["metadata"].get("labels"))
    finally:
        control_plane.kubectl("delete", "daemonset", "kvoffload-taken", "-n", NAMESPACE)
    make_ready(control_plane, pool)
