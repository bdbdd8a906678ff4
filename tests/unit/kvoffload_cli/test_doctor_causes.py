"""`kubectl kvoffload doctor`: one finding for one cause, and nothing about what it could not read."""

from typing import Any

import pytest

from fixtures.cli.cluster import (
    NOW,
    SERVING,
    SYSTEM,
    FixtureReader,
    Object,
    condition,
    daemon,
    daemonset,
    deployment,
    healthy,
    node,
    pod,
    pool,
    region,
)
from kvoffload.api import keys
from kvoffload_cli import doctor
from kvoffload_cli.checks import Finding, Severity, run_checks
from kvoffload_cli.observe import ADMISSION, CRDS, POOLS, REGIONS, observe_cluster

UNREADY = {"conditions": [condition("Ready", "False", "NoNodeReady", "0 of 1 nodes ready")], "nodes": {"matching": 1}}


def findings_of(objects: dict[str, Any], **rights: tuple[str, ...]) -> list[Finding]:
    return run_checks(observe_cluster(FixtureReader(objects, **rights), now=NOW))


def one_node(region_status: Object, *daemons: Object, updated: int = 1, pages: str = "64Gi") -> dict[str, Any]:
    """A pool on one node that is not ready, with this region and these pods of its daemon."""
    return healthy() | {
        POOLS: [pool("llm", status=UNREADY)],
        REGIONS: [region("llm", "gpu-1", status=region_status)],
        "/api/v1/nodes": [node("gpu-1", pages=pages)],
        "/api/v1/pods": list(daemons),
        "/apis/apps/v1/daemonsets": [daemonset("llm", updated=updated, desired=1)],
    }


def says(kind: str, reason: str) -> Object:
    """A region's status of which the daemon, or the operator, says so."""
    node_ready = [condition("NodeReady", "True", "DaemonRunning")] if kind != "NodeReady" else []
    return {"conditions": [*node_ready, condition(kind, "False", reason, "words")]}


def draining() -> Object:
    one = daemon("llm", "gpu-1", ready=False)
    one["metadata"]["deletionTimestamp"] = "2026-11-29T18:00:30Z"
    return one


def young(one: Object, **status: Any) -> Object:
    one["metadata"]["creationTimestamp"] = "2026-11-29T17:59:30Z"
    one["status"] |= status
    return one


def test_a_rollout_is_one_warning() -> None:
    (found,) = findings_of(one_node(says("Ready", "Draining"), draining(), updated=0))
    assert (found.severity, found.check) == (Severity.WARNING, "daemons_are_replaced")
    assert "a rollout is under way: 0 of 1 daemons replaced" in found.message
    assert found.remedy == f"kubectl -n {SYSTEM} rollout status daemonset kvoffload-llm"


def test_the_last_daemon_of_a_rollout_may_take_a_moment_to_start() -> None:
    starting = young(daemon("llm", "gpu-1", ready=False, waiting="ContainerCreating"))
    (found,) = findings_of(one_node(says("Ready", "Starting"), starting))
    assert (found.severity, found.check) == (Severity.WARNING, "daemons_are_replaced")
    assert "is being started" in found.message


@pytest.mark.parametrize("updated", [0, 1])
def test_a_rollout_that_fails_is_an_error(updated: int) -> None:
    failing = young(daemon("llm", "gpu-1", ready=False, waiting="ImagePullBackOff"))
    found = findings_of(one_node(says("Ready", "Draining"), failing, updated=updated))
    errors = [one for one in found if one.severity is Severity.ERROR]
    assert [one.check for one in errors] == ["daemon_does_not_run"]
    assert "ImagePullBackOff" in errors[0].message


def test_what_works_worse_is_said_beside_what_is_explained() -> None:
    status = says("Ready", "Draining")
    status["conditions"].append(condition("Degraded", "True", "AttacherMissing", "words"))
    found = findings_of(one_node(status, draining(), updated=0))
    assert [(one.check, one.message) for one in found[1:]] == [("region_does_not_serve", "AttacherMissing: words")]


def test_a_daemon_that_is_not_ready_for_long_is_an_error_once() -> None:
    (found,) = findings_of(one_node(says("Ready", "Starting"), daemon("llm", "gpu-1", ready=False)))
    assert (found.severity, found.check) == (Severity.ERROR, "daemon_does_not_run")


def test_the_words_of_a_daemon_are_given_once() -> None:
    (found,) = findings_of(one_node(says("Ready", "NoHugetlbfs"), daemon("llm", "gpu-1", ready=False)))
    assert (found.severity, found.check, found.message) == (
        Severity.ERROR,
        "region_does_not_serve",
        "NoHugetlbfs: words",
    )


@pytest.mark.parametrize("updated", [0, 1])
def test_a_taint_is_said_once_also_during_a_rollout(updated: int) -> None:
    found = findings_of(one_node(says("NodeReady", "TaintNotTolerated"), updated=updated))
    errors = [one for one in found if one.severity is Severity.ERROR]
    assert [(one.check, one.message) for one in errors] == [("region_does_not_serve", "TaintNotTolerated: words")]


def test_a_node_short_of_pages_is_one_error() -> None:
    short = {"conditions": [condition("NodeReady", "False", "NodeShortOfPages", "words")]}
    (found,) = findings_of(one_node(short, pages="32Gi", updated=1))
    assert found.check == "node_is_short_of_pages"
    assert "[ $n -ge 32768 ] || n=32768" in found.remedy


def test_pages_of_other_pools_and_pods_are_added_to_what_the_node_needs() -> None:
    objects = one_node({}, pages="70Gi")
    objects["/api/v1/pods"] = [
        daemon("second", "gpu-1"),
        pod("dpdk", namespace="network", labels={}, pages="2Gi", injected=False),
    ]
    (found,) = [one for one in findings_of(objects) if one.check == "node_is_short_of_pages"]
    assert f"[ $n -ge {(64 + 64 + 2) * 512} ]" in found.remedy


def test_a_pool_that_matches_no_node_is_one_error() -> None:
    nowhere = condition("Ready", "False", "NoMatchingNodes", "no node")
    objects = healthy() | {REGIONS: [], "/api/v1/pods": [], "/apis/apps/v1/daemonsets": []}
    objects[POOLS] = [pool("lost", nodeSelector={"zone": "nowhere"}, status={"conditions": [nowhere]})]
    assert [one.check for one in findings_of(objects)] == ["pool_matches_no_node"]


def test_an_unready_pool_that_nothing_else_explains_is_an_error() -> None:
    (found,) = findings_of(one_node(SERVING, daemon("llm", "gpu-1")))
    assert (found.severity, found.check) == (Severity.ERROR, "pool_is_not_ready")


def test_a_pod_of_a_deleted_pool_is_one_finding() -> None:
    objects = healthy() | {POOLS: [], REGIONS: [], "/api/v1/pods": [pod("vllm-a")]}
    (found,) = findings_of(objects)
    assert (found.check, found.severity) == ("pod_is_not_injected", Severity.ERROR)
    assert "asks for pool 'llm', which does not exist" in found.message


def test_who_may_read_nothing_gets_one_finding_and_status_2() -> None:
    denied = (
        *(POOLS, REGIONS, "/api/v1/nodes", "/api/v1/pods", "/apis/apps/v1/deployments", "/apis/apps/v1/daemonsets"),
        *(f"{ADMISSION}/{kind}webhookconfigurations" for kind in ("mutating", "validating")),
        *(path for path in healthy() if path.startswith(CRDS)),
    )
    facts = observe_cluster(FixtureReader(healthy(), denied=denied), now=NOW)
    (found,) = run_checks(facts)
    assert (found.check, found.severity) == ("something_is_not_readable", Severity.WARNING)
    assert found.message.startswith(
        "not checked: pools, regions, pods, nodes, Deployments, DaemonSets, webhook configurations, CRDs "
        f"(reading {POOLS} is not allowed (403)"
    )
    for role in ("RELEASE-viewer", "view, bound for the whole cluster", "cluster-admin"):
        assert role in found.remedy
    assert doctor.exit_status(facts, [found]) == 2


@pytest.mark.parametrize("path", [*healthy(), f"{ADMISSION}/validatingwebhookconfigurations"])
@pytest.mark.parametrize("how", ["denied", "failing"])
def test_no_single_thing_that_is_not_read_is_taken_for_a_fault(path: str, how: str) -> None:
    if path in ("answers", "/apis/kvoffload.io/v1alpha1"):
        return
    (found,) = findings_of(healthy(), **{how: (path,)})
    assert (found.check, found.severity) == ("something_is_not_readable", Severity.WARNING)
    assert ("403" if how == "denied" else "500") in found.message


def test_a_pool_that_this_version_cannot_read_is_not_said_to_be_absent() -> None:
    objects = healthy()
    objects[POOLS].append(pool("future", sharing="Galaxy"))
    objects["/api/v1/pods"].append(pod("later", labels={keys.POOL_LABEL: "future"}))
    assert [one.check for one in findings_of(objects)] == ["object_is_unreadable"]


def test_two_releases_are_named() -> None:
    objects = healthy()
    objects["/apis/apps/v1/deployments"].append(deployment("operator", release="kv", namespace="other"))
    (found,) = findings_of(objects)
    assert found.check == "several_releases_are_installed"
    assert "kv in namespace other, kvoffload in namespace kvoffload-system" in found.message


def test_what_helm_must_install_has_its_namespace() -> None:
    found = findings_of(healthy() | {"/apis/apps/v1/deployments": []})
    remedies = {one.remedy for one in found if one.check == "release_is_incomplete"}
    assert remedies == {"helm install kvoffload charts/kvoffload -n kvoffload-system --create-namespace"}
    half = [deployment("webhook", release="kv", namespace="serving")]
    (found_half, *_) = findings_of(healthy() | {"/apis/apps/v1/deployments": half})
    assert found_half.remedy == "helm upgrade kv charts/kvoffload -n serving"
