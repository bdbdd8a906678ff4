"""The operator as a process with the chart's permissions, on a real API server whose nodes are written by the tests."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.control_plane import (
    NAMESPACE,
    ControlPlane,
    OperatorProcess,
    report_regions,
    run_daemon_pods,
    running_operator,
    start_operator,
    wait_until,
)

pytestmark = pytest.mark.e2e

QUICK = {"resync_seconds": "3", "unattached_seconds": "2", "daemon_silence_seconds": "20"}


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, **QUICK) as running:
        yield running


@pytest.fixture
def make_pool(control_plane: ControlPlane) -> Iterator[Callable[..., str]]:
    """Makes pools; afterwards they are deleted and everything of theirs must be gone."""
    made: list[str] = []

    def make(name: str, **spec: Any) -> str:
        manifest = {
            "apiVersion": "kvoffload.io/v1alpha1",
            "kind": "KVOffloadPool",
            "metadata": {"name": name},
            "spec": {"capacity": "64Mi", **spec},
        }
        control_plane.apply(manifest)
        made.append(name)
        return name

    yield make
    for name in made:
        control_plane.kubectl("delete", "kvpool", name, "--ignore-not-found")
    wait_until(lambda: not leftovers(control_plane, made), f"everything of {made} to be gone")


def leftovers(plane: ControlPlane, pools: list[str]) -> list[str]:
    """What is still there of pools: regions, DaemonSets, pods, node labels."""
    run_daemon_pods(plane)
    found = [
        f"{kind}/{one['metadata']['name']}"
        for kind, arguments in (("kvregion", []), ("daemonset", ["-n", NAMESPACE]), ("pod", ["-n", NAMESPACE]))
        for one in plane.get(kind, *arguments)["items"]
        if (one["metadata"].get("labels") or {}).get("kvoffload.io/daemon-of") in pools
    ]
    for node in plane.get("nodes")["items"]:
        labels = node["metadata"].get("labels", {})
        found += [f"{node['metadata']['name']}: {label}" for label in labels if label.rpartition("/")[2] in pools]
    return found


def condition(plane: ControlPlane, pool: str, type: str) -> dict[str, Any]:
    status = plane.get("kvpool", pool).get("status", {})
    return next((one for one in status.get("conditions", []) if one["type"] == type), {"status": "", "reason": ""})


def make_ready(plane: ControlPlane, pool: str) -> float:
    """Be the kubelets and daemons until the pool is Ready."""

    def is_ready() -> bool:
        run_daemon_pods(plane)
        report_regions(plane)
        return condition(plane, pool, "Ready")["status"] == "True"

    return wait_until(is_ready, f"pool {pool} to be Ready")


def node_labels(plane: ControlPlane, node: str) -> dict[str, str]:
    labels: dict[str, str] = plane.get("node", node)["metadata"].get("labels", {})
    return labels


def events_of(plane: ControlPlane, name: str, namespace: str = "default") -> list[dict[str, Any]]:
    listed = plane.get("events", "-n", namespace, f"--field-selector=involvedObject.name={name}")["items"]
    return [one for one in listed if one.get("reportingComponent") == "kvoffload.io/operator"]


def test_a_pool_becomes_ready_and_says_so_on_pool_region_and_node(
    control_plane: ControlPlane, operator: OperatorProcess, make_pool: Callable[..., str]
) -> None:
    pool = make_pool("ready")
    make_ready(control_plane, pool)
    status = control_plane.get("kvpool", pool)["status"]
    assert status["capacityBytes"] == 2 * (64 << 20)
    assert (status["nodes"]["ready"], status["nodes"]["matching"]) == (2, 2)
    for node in ("n1", "n2"):
        wait_until(
            lambda node=node: node_labels(control_plane, node).get("pool.kvoffload.io/ready") == "ready",  # type: ignore[misc]
            f"the ready label on {node}",
        )
        region = control_plane.get("kvregion", f"{pool}.{node}")
        owners = {one["type"]: one["status"] for one in region["status"]["conditions"]}
        assert owners == {"NodeReady": "True", "Ready": "True"}
    assert not control_plane.get("kvpool", pool)["metadata"].get("finalizers")
    assert not control_plane.get("kvpool", pool)["metadata"].get("annotations", {}).get("kopf.zalando.org/last-handled")
    assert {one["reason"] for one in events_of(control_plane, pool)} >= {"AllNodesReady"}


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
    started = time.time()
    wait_until(lambda: time.time() - started > 8, "two full listings and their passes", seconds=20)
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
        assert "echo 32 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" in found["message"]
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
    assert limit() == str(64 << 20) or limit() == "64Mi"
    report_regions(control_plane)  # the daemons have given pages back
    wait_until(lambda: limit() in (str(32 << 20), "32Mi"), "the pods' limit to follow")


def test_what_happened_while_it_was_away_is_made_good(
    control_plane: ControlPlane, make_pool: Callable[..., str], operator: OperatorProcess
) -> None:
    """Killed in the middle of making a pool, and away while another is deleted: the next one converges."""
    gone = make_pool("gone")
    make_ready(control_plane, gone)
    operator.process.send_signal(signal.SIGSTOP)
    try:
        control_plane.kubectl("delete", "kvpool", gone)
        half = make_pool("half")
        successor = start_operator(control_plane, "operator-b", **QUICK)
        wait_until(lambda: successor.is_leader, "the successor to lead", seconds=20)
        wait_until(lambda: control_plane.find("kvregion", f"{half}.n1") is not None, "the first region")
        successor.process.kill()
        successor.process.wait()
        with running_operator(control_plane, "operator-c", **QUICK):
            make_ready(control_plane, half)
            wait_until(lambda: not leftovers(control_plane, [gone]), "what was left of the deleted pool to go")
            control_plane.kubectl("delete", "kvpool", half)
            wait_until(lambda: not leftovers(control_plane, [half]), "the other pool's to go while somebody works")
    finally:
        operator.process.send_signal(signal.SIGCONT)
        operator.stop(signal.SIGKILL)


# --- opted-in pods --------------------------------------------------------------------------------------------------


@pytest.fixture
def make_pod(control_plane: ControlPlane) -> Iterator[Callable[..., dict[str, Any]]]:
    names: list[str] = []

    def make(name: str, *, pool: str, node: str = "n1", **annotations: str) -> dict[str, Any]:
        control_plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": "default",
                    "labels": {"kvoffload.io/pool": pool},
                    "annotations": {
                        f"kvoffload.io/{key.replace('_', '-')}": value for key, value in annotations.items()
                    },
                },
                "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}]},
            }
        )
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        patch = json.dumps({"status": {"phase": "Running", "startTime": started}})
        control_plane.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)
        names.append(name)
        pod: dict[str, Any] = control_plane.get("pod", name)
        return pod

    yield make
    for name in names:
        control_plane.kubectl("delete", "pod", name, "--force", "--grace-period=0")


@pytest.fixture
def second_operator(control_plane: ControlPlane) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, "operator-d", **QUICK) as running:
        yield running


def reasons(plane: ControlPlane, pod: str) -> list[str]:
    return sorted(one["reason"] for one in events_of(plane, pod))


def test_case_26_pods_that_the_webhook_missed_are_named_by_one_event_also_after_a_restart(
    control_plane: ControlPlane, make_pod: Callable[..., Any]
) -> None:
    pod = make_pod("missed", pool="nowhere")
    for name in ("operator-e", "operator-f"):
        with running_operator(control_plane, name, **QUICK):
            wait_until(lambda: reasons(control_plane, "missed") == ["MissedByWebhook"], "the event")
    (event,) = events_of(control_plane, "missed")
    assert "delete and create it again" in event["message"]
    assert event["involvedObject"]["uid"] == pod["metadata"]["uid"]


def test_what_the_webhook_decided_is_one_event(
    control_plane: ControlPlane, second_operator: OperatorProcess, make_pod: Callable[..., Any]
) -> None:
    make_pod("skipped", pool="nowhere", skip_reason="UserConnector")
    wait_until(lambda: reasons(control_plane, "skipped") == ["NotInjected"], "the event")
    assert "UserConnector" in events_of(control_plane, "skipped")[0]["message"]


def test_an_injected_pod_without_an_engine_is_called_unattached_and_one_with_an_engine_is_not(
    control_plane: ControlPlane,
    second_operator: OperatorProcess,
    make_pool: Callable[..., str],
    make_pod: Callable[..., Any],
) -> None:
    pool = make_pool("attach")
    make_ready(control_plane, pool)
    attached = make_pod("attached", pool=pool, injected="0.1.0", replicated_layout="replicated (Replicated: x)")
    engine = {
        "podNamespace": "default",
        "podName": "attached",
        "podUID": attached["metadata"]["uid"],
        "engineID": "e",
        "predictedLayout": "replicated",
        "confirmedLayout": "per-rank",
        "reason": "LayerNotReplicated",
        "message": "layer 3 is a FullAttentionSpec",
    }
    report_regions(control_plane, engines=[engine], enginesAttached=1)
    make_pod("alone", pool=pool, injected="0.1.0", replicated_layout="auto (UnknownModel: x)")
    wait_until(lambda: reasons(control_plane, "alone") == ["Injected", "Unattached"], "the sweep to name it")
    wait_until(
        lambda: reasons(control_plane, "attached") == ["Injected", "LayoutNotConfirmed"], "the disagreement to be told"
    )
    told = next(one for one in events_of(control_plane, "attached") if one["reason"] == "LayoutNotConfirmed")
    assert "LayerNotReplicated" in told["message"]
