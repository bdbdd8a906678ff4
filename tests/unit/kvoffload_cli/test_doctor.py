"""`kubectl kvoffload doctor`: one finding for each ailment, none for a healthy cluster."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rich.console import Console

from fixtures.cli.cluster import ailing, healthy
from fixtures.cli.pods import daemon, mount_failure, node, pod
from fixtures.cli.pools import pool
from fixtures.cli.reader import FixtureReader
from fixtures.cli.release import CERTIFICATE, WEBHOOK_POD, Authority, deployment, webhook_pod
from fixtures.cli.release import webhook_configuration as configuration
from fixtures.cli.scene import NOW, SYSTEM, Object
from kvoffload.api.pool import KVOffloadPoolSpec
from kvoffload_cli import doctor
from kvoffload_cli.checks import CHECKS, Finding, Severity, run_checks
from kvoffload_cli.checks.nodes import KUBELET_PODS_VOLUME
from kvoffload_cli.facts import ClusterFacts
from kvoffload_cli.observation import POOLS, REGIONS
from kvoffload_cli.observe import ADMISSION, PROBE_PATH, observe_cluster
from kvoffload_cli.output import print_json
from kvoffload_operator.resources.daemonset import build_daemonset
from operator_builders import daemonset_options

Objects = dict[str, Any]
OPTIONS = daemonset_options()


def findings_of(objects: Objects) -> list[Finding]:
    return run_checks(observe_cluster(FixtureReader(objects), now=NOW))


def rendered(facts: ClusterFacts) -> str:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        doctor.render(console, facts, run_checks(facts))
    return capture.get()


def printed(facts: ClusterFacts) -> str:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        print_json(console, doctor.as_document(facts, run_checks(facts)))
    return capture.get()


def test_healthy_cluster_has_no_finding(golden: Callable[[str, str], None]) -> None:
    facts = observe_cluster(FixtureReader(healthy()), now=NOW)
    assert run_checks(facts) == []
    golden("doctor-healthy.txt", rendered(facts))
    golden("doctor-healthy.json", printed(facts))


def test_every_ailment_is_found_with_its_remedy(golden: Callable[[str, str], None]) -> None:
    facts = observe_cluster(FixtureReader(ailing()), now=NOW)
    golden("doctor-ailing.txt", rendered(facts))
    golden("doctor-ailing.json", printed(facts))
    findings = run_checks(facts)
    elsewhere = {  # tests of their own
        *("something_is_not_readable", "daemons_are_replaced", "daemon_pods_are_refused", "rollout_is_unfinished"),
    }
    assert {finding.check for finding in findings} == {check.__name__ for check in CHECKS} - elsewhere
    assert all(finding.remedy for finding in findings)


def test_status_is_1_only_for_errors() -> None:
    warning = Finding(Severity.WARNING, "a", "b", "c", "d")
    error = Finding(Severity.ERROR, "a", "b", "c", "d")
    facts = ClusterFacts(now=NOW, server_version=(1, 37))
    assert [doctor.exit_status(facts, found) for found in ([], [warning], [warning, error])] == [0, 0, 1]


def test_an_empty_cluster_is_told_to_install() -> None:
    found = findings_of({"/version": {"major": "1", "minor": "37"}})
    assert {finding.check for finding in found} == {"crd_is_missing_or_outdated", "release_is_incomplete"}


def test_what_rbac_forbids_is_said_and_not_taken_for_a_fault(golden: Callable[[str, str], None]) -> None:
    denied = (CERTIFICATE, "/api/v1/nodes")
    facts = observe_cluster(FixtureReader(healthy(), denied=denied), now=NOW)
    (found,) = run_checks(facts)
    assert (found.check, found.severity) == ("something_is_not_readable", Severity.WARNING)
    assert len(facts.unreadable) == 2
    golden("doctor-denied.txt", rendered(facts))
    golden("doctor-denied.json", printed(facts))


@pytest.mark.parametrize(
    ("days", "age_days", "severity", "word"),
    [
        (-1, 300, Severity.ERROR, "expired"),
        (13, 300, Severity.WARNING, "expires"),
        (15, 300, None, ""),
        (2.1, 3.9, None, ""),
        (1.4, 4.6, Severity.WARNING, "expires"),
    ],
)
def test_certificate_is_reported_two_weeks_ahead_and_a_short_one_in_its_last_quarter(
    days: float, age_days: float, severity: Severity | None, word: str
) -> None:
    objects, authority = healthy(), Authority()
    objects[CERTIFICATE] = authority.serving(days=days, age_days=age_days)
    objects[f"{ADMISSION}/mutatingwebhookconfigurations"] = [configuration(authority.bundle)]
    found = findings_of(objects)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert all(word in finding.message for finding in found)


def with_second_replica(certificate: str) -> Objects:
    """The healthy cluster, and another replica of the webhook, which serves this."""
    objects = healthy()
    objects["/api/v1/pods"].append(webhook_pod("another"))
    objects[CERTIFICATE.replace(WEBHOOK_POD, "another")] = certificate
    return objects


def test_one_replica_whose_certificate_is_not_trusted_is_an_error() -> None:
    (found,) = findings_of(with_second_replica(Authority("another").serving()))
    assert (found.check, found.severity) == ("webhook_is_not_trusted", Severity.ERROR)
    assert f"(webhook/{SYSTEM}/kvoffload)" in found.message


def test_of_replicas_the_certificate_that_ends_first_is_reported() -> None:
    authority = Authority()
    objects = with_second_replica(authority.serving(days=1))
    objects[CERTIFICATE] = authority.serving(days=80)
    objects[f"{ADMISSION}/mutatingwebhookconfigurations"] = [configuration(authority.bundle)]
    (found,) = findings_of(objects)
    assert (found.check, found.message) == ("certificate_expires", "expires 2026-11-30 18:00 UTC")


@pytest.mark.parametrize("certificate", ["", "no certificate", Authority().pem])
def test_what_is_no_serving_certificate_is_left_out(certificate: str) -> None:
    assert findings_of(healthy() | {CERTIFICATE: certificate}) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: pod["metadata"].update(namespace="team-a"),
        lambda pod: pod["metadata"].update(deletionTimestamp="2026-11-29T18:00:00Z"),
        lambda pod: pod["metadata"]["labels"].update({"app.kubernetes.io/instance": "of-another"}),
        lambda pod: pod["status"].update(phase="Pending"),
        lambda pod: pod["status"].update(
            containerStatuses=[{"name": "webhook", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
        ),
    ],
)
def test_only_running_pods_of_the_release_s_webhook_are_asked(change: Callable[[Object], None]) -> None:
    objects = healthy()
    change(next(one for one in objects["/api/v1/pods"] if one["metadata"]["name"] == WEBHOOK_POD))
    asked: list[str] = []

    class Asked(FixtureReader):
        def text(self, path: str, *, query: Mapping[str, str] | None = None) -> str:
            asked.append(path)
            return super().text(path, query=query)

    observe_cluster(Asked(objects), now=NOW)
    assert asked == []


def test_a_webhook_that_is_not_asked_is_an_error_although_all_its_parts_are_well() -> None:
    (found,) = findings_of(healthy() | {"answers": False})
    assert (found.check, found.severity) == ("webhook_is_not_asked", Severity.ERROR)
    assert "9443" in found.remedy


def test_who_may_create_no_pod_is_told_that_the_webhook_was_not_tried() -> None:
    facts = observe_cluster(FixtureReader(healthy() | {"answers": False}, denied=(PROBE_PATH,)), now=NOW)
    assert [found.check for found in run_checks(facts)] == ["something_is_not_readable"]
    assert [PROBE_PATH in sentence for sentence in facts.unreadable] == [True]


@pytest.mark.parametrize("bundle", ["", "bm8gY2VydGlmaWNhdGU="])
def test_bundle_without_a_certificate_is_an_error(bundle: str) -> None:
    objects = healthy()
    objects[f"{ADMISSION}/mutatingwebhookconfigurations"] = [configuration(bundle)]
    (found,) = findings_of(objects)
    assert found.check == "webhook_is_not_trusted"
    assert "empty" in found.message


def test_pages_requested_by_others_count_only_before_our_daemon_has_them() -> None:
    objects = healthy()
    objects["/api/v1/nodes"] = [node("gpu-1", pages="72Gi"), node("gpu-2")]
    other = pod("dpdk", namespace="network", labels={}, pages="16Gi", injected=False)
    objects["/api/v1/pods"] = [*objects["/api/v1/pods"], other]  # type: ignore[misc]
    assert findings_of(objects) == [], "the daemon on gpu-1 has its pages already"
    objects["/api/v1/pods"] = [other]
    (found,) = findings_of(objects)[:1]
    assert found.check == "node_is_short_of_pages"
    assert "16Gi of 72Gi hugepages-2Mi are requested by other pods" in found.message


@pytest.mark.parametrize("confirmed", ["per-rank", "shared"])
def test_any_layout_but_the_predicted_one_is_told(confirmed: str) -> None:
    """As the metric kvoffload_engines_mispredicted counts them, whose alert sends people here."""
    objects = healthy()
    for region in objects[REGIONS]:  # type: ignore[attr-defined]
        for engine in region["status"].get("engines", [])[:1]:
            engine |= {"confirmedLayout": confirmed, "reason": "LayerNotReplicated"}
    (found,) = findings_of(objects)
    assert found.check == "layout_differs_from_prediction"
    assert f"confirmed {confirmed}" in found.message


def test_a_volume_other_than_the_kubelet_s_folder_is_said_with_the_pod() -> None:
    objects = healthy()
    message = 'MountVolume.SetUp failed for volume "hugepages" : hostPath type check failed: /dev/hugepages is not'
    objects["/api/v1/pods"] = [daemon("llm", "gpu-1", ready=False, waiting="ContainerCreating")]
    objects[f"/api/v1/namespaces/{SYSTEM}/events"] = [mount_failure("kvoffload-llm-gpu-1", message)]
    (found,) = findings_of(objects)
    assert found.check == "daemon_does_not_run"
    assert message in found.message


def test_the_kubelet_s_folder_is_the_daemons_volume_of_that_name() -> None:
    spec = KVOffloadPoolSpec.model_validate({"capacity": "64Mi"})
    template = build_daemonset("llm", spec, capacity_bytes=spec.capacity, options=OPTIONS)["spec"]["template"]
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    assert volumes[KUBELET_PODS_VOLUME]["hostPath"]["path"] == f"{OPTIONS.kubelet_root_dir}/pods"


def test_a_node_that_no_pool_matches_may_be_away() -> None:
    objects = healthy()
    objects["/api/v1/nodes"] = [node("gpu-1"), node("gpu-2"), node("cpu", labels={}, status="False", message="why")]
    assert findings_of(objects) == []


def test_two_pools_that_fit_together_are_fine() -> None:
    objects = healthy()
    status = objects[POOLS][0]["status"]  # type: ignore[index]
    objects[POOLS] = [pool("llm", capacity="32Gi", status=status), pool("second", capacity="32Gi", status=status)]
    assert "pools_overlap" not in {finding.check for finding in findings_of(objects)}


@pytest.mark.parametrize("without", [{"mode": "Observe"}, {"fallback": "SharedMemory"}])
def test_a_pool_that_takes_no_huge_pages_overlaps_none(without: dict[str, str]) -> None:
    objects = healthy()
    status = objects[POOLS][0]["status"]  # type: ignore[index]
    first = pool("llm", capacity="64Gi", status=status)
    objects[POOLS] = [first, pool("second", capacity="32Gi", status=status)]
    assert "pools_overlap" in {finding.check for finding in findings_of(objects)}
    objects[POOLS] = [first, pool("second", capacity="32Gi", status=status, **without)]
    assert "pools_overlap" not in {finding.check for finding in findings_of(objects)}


def test_a_deployment_scaled_to_nothing_is_an_error_with_the_scale_command() -> None:
    objects = healthy()
    nothing = deployment("webhook", ready=0)
    nothing["spec"]["replicas"] = 0
    objects["/apis/apps/v1/deployments"] = [deployment("operator"), nothing]
    (found,) = findings_of(objects)
    assert found.severity is Severity.ERROR
    assert "labelled pods start, and are not injected" in found.message
    assert "scale deployment kvoffload-webhook-0" in found.remedy


def test_one_of_two_webhook_replicas_away_is_a_warning() -> None:
    objects = healthy()
    away = deployment("webhook", ready=0)
    away["metadata"]["name"] = "kvoffload-webhook-1"
    objects["/apis/apps/v1/deployments"] = [deployment("operator"), deployment("webhook"), away]
    (found,) = findings_of(objects)
    assert (found.severity, found.message) == (Severity.WARNING, "0 of 1 replicas are ready")
