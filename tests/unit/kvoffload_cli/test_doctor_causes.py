"""`kubectl kvoffload doctor`: one finding for one cause, and nothing about what it could not read."""

import re
import subprocess
from typing import Any

import pytest

from fixtures.cli.cluster import SERVING, healthy
from fixtures.cli.pods import creation_failure, daemon, daemonset, mount_failure, node, pod
from fixtures.cli.pools import condition, pool, region
from fixtures.cli.reader import FixtureReader
from fixtures.cli.release import CERTIFICATE, deployment
from fixtures.cli.scene import NOW, SYSTEM, Object
from hack.cache import REPOSITORY
from kvoffload.api import keys
from kvoffload_cli import doctor
from kvoffload_cli.checks import Finding, Severity, run_checks
from kvoffload_cli.observation import API, POOLS, REGIONS
from kvoffload_cli.observe import ADMISSION, CRDS, PROBE_PATH, observe_cluster

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
    assert "imagePullSecrets" in errors[0].remedy


def test_an_operator_whose_image_is_not_pulled_says_so_with_the_registry_s_remedy() -> None:
    objects, operator = healthy(), deployment("operator", ready=0)
    objects["/apis/apps/v1/deployments"] = [operator, deployment("webhook")]
    waiting = {"name": "operator", "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}}
    pod = {
        "metadata": {"name": "operator-1", "namespace": SYSTEM, "labels": operator["metadata"]["labels"]},
        "spec": {"containers": []},
        "status": {"phase": "Pending", "containerStatuses": [waiting]},
    }
    objects["/api/v1/pods"] = [*objects["/api/v1/pods"], pod]
    (found,) = findings_of(objects)
    assert found.check == "release_is_incomplete"
    assert found.message.endswith("pools are not reconciled (pod operator-1: operator ErrImagePull)")
    assert "imagePullSecrets" in found.remedy


def test_what_works_worse_is_said_beside_what_is_explained() -> None:
    status = says("Ready", "Draining")
    status["conditions"].append(condition("Degraded", "True", "AttacherMissing", "words"))
    found = findings_of(one_node(status, draining(), updated=0))
    assert [(one.check, one.message) for one in found[1:]] == [("region_does_not_serve", "AttacherMissing: words")]


POD_SECURITY = (
    'Error creating: pods "kvoffload-llm-abcde" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes '
    '(volumes "hugepages", "state", "kubelet-pods")'
)
QUOTA = 'Error creating: pods "kvoffload-llm-abcde" is forbidden: exceeded quota: pods, used: pods=3, limited: pods=3'


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            POD_SECURITY,
            f"kubectl label namespace {SYSTEM} pod-security.kubernetes.io/enforce=privileged --overwrite; its",
        ),
        (
            QUOTA,
            f"kubectl -n {SYSTEM} describe daemonset kvoffload-llm; let its namespace take this pod; its controller",
        ),
    ],
)
def test_pods_that_the_api_server_refuses_are_one_error_in_its_own_words(words: str, remedy: str) -> None:
    gone = says("NodeReady", "DaemonPending")
    gone["conditions"].append(condition("Degraded", "True", "AttacherMissing", "last words of a daemon that is gone"))
    objects = one_node(gone, updated=0)
    whole = daemonset("other", updated=1, desired=1)
    objects["/apis/apps/v1/daemonsets"] = [daemonset("llm", updated=0, desired=1, scheduled=0), whole]
    objects[f"/api/v1/namespaces/{SYSTEM}/events"] = [
        creation_failure("llm", f"(combined from similar events): {words}", at="2026-11-29T17:59:00Z"),
        creation_failure("llm", "older words", at="2026-11-29T17:58:00Z"),
        creation_failure("other", "of another pool", at="2026-11-29T17:59:30Z"),
    ]
    (found,) = findings_of(objects)
    assert (found.severity, found.check) == (Severity.ERROR, "daemon_pods_are_refused")
    assert found.subject == f"daemonset/{SYSTEM}/kvoffload-llm"
    assert found.message == f"1 of 1 nodes have no daemon of pool llm: {words}"
    assert found.remedy.startswith(remedy)


def test_a_refusal_of_before_is_not_told_where_every_node_has_its_pod() -> None:
    objects = healthy()
    failure = creation_failure("llm", POD_SECURITY, at="2026-11-29T17:30:00Z")
    objects[f"/api/v1/namespaces/{SYSTEM}/events"] = [failure]
    assert findings_of(objects) == []


def test_a_daemon_that_is_not_ready_for_long_is_an_error_once() -> None:
    (found,) = findings_of(one_node(says("Ready", "Starting"), daemon("llm", "gpu-1", ready=False)))
    assert (found.severity, found.check) == (Severity.ERROR, "daemon_does_not_run")


@pytest.mark.parametrize(
    ("created", "severity"), [("2026-11-29T17:59:50Z", Severity.WARNING), ("2026-11-29T17:50:00Z", Severity.ERROR)]
)
def test_what_has_no_status_yet_is_an_error_when_it_is_not_new(created: str, severity: Severity) -> None:
    objects = one_node({})
    objects[POOLS][0]["status"] = {"conditions": [condition("Ready", "False", "Progressing", "no region is ready")]}
    (region,) = objects[REGIONS]
    region["metadata"]["creationTimestamp"] = created
    fresh = pool("fresh", nodeSelector=objects[POOLS][0]["spec"]["nodeSelector"])
    fresh["metadata"]["creationTimestamp"] = created
    objects[POOLS].append(fresh)
    found = [(one.severity, one.check, one.subject) for one in findings_of(objects) if "yet" in one.message]
    assert found == [
        (severity, "region_does_not_serve", f"region/{region['metadata']['name']}"),
        (severity, "pool_is_not_ready", "pool/fresh"),
    ]
    assert not any(one.subject == "pool/llm" for one in findings_of(objects)), "the region explains it"


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


def test_pages_that_are_gone_since_the_kubelet_s_start_are_one_error() -> None:
    (found,) = findings_of(one_node(says("Ready", "PagesUnavailable"), daemon("llm", "gpu-1", ready=False)))
    assert found.check == "kubelet_counts_missing_pages"


def test_a_volume_that_cannot_be_mounted_is_an_error_also_of_a_young_pod() -> None:
    starting = young(daemon("llm", "gpu-1", ready=False, waiting="ContainerCreating"))
    objects = one_node(says("Ready", "Starting"), starting)
    message = 'MountVolume.SetUp failed for volume "kubelet-pods" : hostPath type check failed'
    objects[f"/api/v1/namespaces/{SYSTEM}/events"] = [mount_failure(starting["metadata"]["name"], message)]
    assert [one.check for one in findings_of(objects)] == ["kubelet_root_dir_is_wrong"]


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
    assert "the ClusterRole and the Role RELEASE-doctor" in found.remedy
    assert doctor.exit_status(facts, [found]) == 2


OTHER_PATHS = (
    f"{ADMISSION}/validatingwebhookconfigurations",
    CERTIFICATE,
    PROBE_PATH,
)


def is_read(path: str) -> bool:
    """Whether doctor reads that path of the fixture's as it stands."""
    return path not in ("answers", API) and "/proxy/" not in path


def test_events_that_may_not_be_read_are_unknown() -> None:
    path = f"/api/v1/namespaces/{SYSTEM}/events"
    objects = one_node(says("Ready", "Starting"), daemon("llm", "gpu-1", ready=False))
    found = findings_of(objects, denied=(path,))
    assert [one.check for one in found] == ["something_is_not_readable", "daemon_does_not_run"]


@pytest.mark.parametrize("path", [*filter(is_read, healthy()), *OTHER_PATHS])
@pytest.mark.parametrize("how", ["denied", "failing"])
def test_no_single_thing_that_is_not_read_is_taken_for_a_fault(path: str, how: str) -> None:
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
    (remedy,) = remedies
    assert remedy.startswith("helm install kvoffload charts/kvoffload -n kvoffload-system --create-namespace, with the")
    assert "docs/install.md (Install the chart)" in remedy
    assert "\n## Install the chart\n" in (REPOSITORY / "docs" / "install.md").read_text()
    half = [deployment("webhook", release="kv", namespace="serving")]
    (found_half, *_) = findings_of(healthy() | {"/apis/apps/v1/deployments": half})
    assert found_half.remedy == "helm upgrade kv charts/kvoffload -n serving"


@pytest.mark.parametrize("namespace", ["kube-system", SYSTEM])
def test_a_labelled_pod_where_the_webhook_is_never_asked_is_no_fault_of_the_webhook(namespace: str) -> None:
    objects = healthy()
    objects["/api/v1/pods"].append(pod("missed", injected=False, namespace=namespace))
    (found,) = findings_of(objects)
    assert (found.severity, found.check) == (Severity.ERROR, "pod_is_not_injected")
    assert f"never asked about pods of namespace {namespace}" in found.message
    assert found.remedy == "run the pod in another namespace, or take the label off"


def with_ready_pod(*, ready_at: str, serves_since: str = "2026-11-29T17:00:00Z", **pod_more: Any) -> dict[str, Any]:
    """A healthy cluster with a third pod that no engine speaks for."""
    objects = healthy()
    alone = pod("alone", **pod_more)
    alone["status"]["conditions"][0]["lastTransitionTime"] = ready_at
    objects["/api/v1/pods"].append(alone)
    (ready,) = [one for one in objects[REGIONS][0]["status"]["conditions"] if one["type"] == "Ready"]
    ready["lastTransitionTime"] = serves_since
    return objects


@pytest.mark.parametrize(
    ("times", "severity"),
    [
        ({"ready_at": "2026-11-29T18:00:00Z"}, Severity.WARNING),
        ({"ready_at": "2026-11-29T17:58:01Z"}, Severity.WARNING),
        ({"ready_at": "2026-11-29T17:58:00Z"}, Severity.ERROR),
        ({"ready_at": "2026-11-29T17:30:00Z", "serves_since": "2026-11-29T17:58:01Z"}, Severity.WARNING),
        ({"ready_at": "2026-11-29T17:55:01Z", "probed": False}, Severity.WARNING),
        ({"ready_at": "2026-11-29T17:55:00Z", "probed": False}, Severity.ERROR),
    ],
)
def test_a_ready_pod_without_an_engine_is_named_at_once_and_is_an_error_after_two_minutes(
    times: dict[str, Any], severity: Severity
) -> None:
    (found,) = findings_of(with_ready_pod(**times))
    assert (found.severity, found.check, found.subject) == (severity, "pod_is_not_attached", "pod/team-a/alone")
    assert ("may still load its weights" in found.message) is ("probed" in times)
    assert "`Failed to load plugin kvoffload`: it was not imported, recreate the pod" in found.remedy


def test_a_pod_where_the_region_does_not_serve_is_explained_by_the_region() -> None:
    objects = with_ready_pod(ready_at="2026-11-29T17:30:00Z")
    objects[REGIONS][0]["status"]["conditions"] = says("Ready", "NoHugetlbfs")["conditions"]
    assert [one.check for one in findings_of(objects)] == ["region_does_not_serve"]


def test_a_region_that_cannot_name_all_its_engines_makes_no_pod_unattached() -> None:
    objects = with_ready_pod(ready_at="2026-11-29T17:30:00Z")
    objects[REGIONS][0]["status"]["enginesAttached"] = 65
    assert findings_of(objects) == []


OTHERS_LINES = """\
  File "/run/kvoffload/kvoffload_engine/plugin.py", line 12, in register
INFO adding /run/kvoffload to sys.path, KVOFFLOAD_POOL=llm
"""


def test_the_log_command_of_the_remedy_shows_our_lines_and_no_paths() -> None:
    source = "".join(one.read_text() for one in sorted((REPOSITORY / "agent" / "kvoffload_engine").rglob("*.py")))
    ours = re.findall(r'logger\.\w+\(\s*f?"(kvoffload[^"]*)', source)
    ours = [line.replace("%s", "0.1.0", 1) for line in ours] + ["Failed to load plugin kvoffload"]
    assert len(ours) > 20
    (found,) = findings_of(with_ready_pod(ready_at="2026-11-29T17:30:00Z"))
    grep = re.search(r"\| (grep -E '[^']+')", found.remedy)
    assert grep is not None
    log = "".join(f"INFO {line}\n" for line in ours)
    done = subprocess.run(["bash", "-c", grep[1]], input=log + OTHERS_LINES, capture_output=True, text=True, check=True)
    assert done.stdout == log


def upgraded(component: str, *, ready: int = 1, **status: Any) -> dict[str, Any]:
    """The healthy cluster after a `helm upgrade` that asked another Deployment, whose new pod is not there yet."""
    new = deployment(component, ready=ready)
    new["status"] |= {"unavailableReplicas": 1, **status}
    kept = [one for one in healthy()["/apis/apps/v1/deployments"] if one["metadata"]["name"] != new["metadata"]["name"]]
    return healthy() | {"/apis/apps/v1/deployments": [*kept, new]}


def pod_of(component: str, **status: Any) -> Object:
    labels = deployment(component)["spec"]["selector"]["matchLabels"]
    return pod("new-pod", namespace=SYSTEM, labels=labels, ready=False, injected=False, **status)


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [{"name": "c", "restartCount": 0, "state": state}]}


NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}
BACK = f"; or, after an upgrade, go back: helm rollback kvoffload -n {SYSTEM} --wait"


@pytest.mark.parametrize("component", ["operator", "webhook"])
@pytest.mark.parametrize(
    ("status", "said", "remedy"),
    [
        (waiting("ErrImageNeverPull", "no image x:nope"), "c ErrImageNeverPull: no image x:nope", "push that image"),
        (waiting("ImagePullBackOff"), "c ImagePullBackOff", "push that image"),
        (waiting("InvalidImageName"), "c InvalidImageName", "push that image"),
        (waiting("CrashLoopBackOff"), "c CrashLoopBackOff", f"kubectl -n {SYSTEM} logs new-pod --previous"),
        (waiting("CreateContainerConfigError"), "c Create", f"kubectl -n {SYSTEM} describe pod new-pod"),
        ({"conditions": [NO_NODE]}, "not scheduled: 0/2 nodes", f"kubectl -n {SYSTEM} describe pod new-pod"),
    ],
)
def test_new_pods_of_operator_or_webhook_that_do_not_run_are_one_error(
    component: str, status: dict[str, Any], said: str, remedy: str
) -> None:
    objects = upgraded(component)
    objects["/api/v1/pods"].append(pod_of(component, **status))
    (found,) = findings_of(objects)
    assert (found.severity, found.check) == (Severity.ERROR, "rollout_is_unfinished")
    assert found.subject.startswith(f"deployment/{SYSTEM}/kvoffload-{component}")
    assert found.message.startswith(f"its new pods do not run, the old pods still serve: pod new-pod: {said}")
    assert found.remedy.startswith(remedy)
    assert found.remedy.endswith(BACK)


WORDS = "pod x: Image y is not allowed, CrashLoopBackOff"


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (waiting("CreateContainerError", WORDS), "describe pod new-pod"),
        ({"conditions": [NO_NODE | {"message": WORDS}]}, "describe pod new-pod"),
        ({}, "describe deployment kvoffload-operator"),
    ],
)
def test_what_helps_follows_from_the_reason_and_from_no_words_of_a_message(status: dict[str, Any], remedy: str) -> None:
    refused = {"type": "ReplicaFailure", "status": "True", "message": WORDS}
    objects = upgraded("operator", conditions=[refused])
    objects["/api/v1/pods"].append(pod_of("operator", **status))
    (found,) = findings_of(objects)
    assert found.message.endswith(WORDS)
    assert found.remedy == f"kubectl -n {SYSTEM} {remedy}{BACK}"


def test_an_image_that_is_not_there_is_said_where_no_old_pod_serves_too() -> None:
    objects = upgraded("operator", ready=0)
    objects["/api/v1/pods"].append(pod_of("operator", **waiting("ErrImagePull", "no image x:nope")))
    (found,) = findings_of(objects)
    assert (found.severity, found.check) == (Severity.ERROR, "release_is_incomplete")
    assert found.message.endswith("pools are not reconciled (pod new-pod: c ErrImagePull: no image x:nope)")
    assert found.remedy.startswith("push that image")


@pytest.mark.parametrize("words", ["ReplicaFailure", "Progressing"])
def test_a_deployment_that_gives_up_is_an_error_in_its_own_words(words: str) -> None:
    given_up = {"type": words, "status": "True" if words == "ReplicaFailure" else "False", "message": "why"}
    (found,) = findings_of(upgraded("operator", conditions=[given_up]))
    assert (found.severity, found.check) == (Severity.ERROR, "rollout_is_unfinished")
    assert f"{words} is {given_up['status']}: why" in found.message
    assert found.remedy == f"kubectl -n {SYSTEM} describe deployment kvoffload-operator{BACK}"


@pytest.mark.parametrize(
    "status",
    [{}, {"unavailableReplicas": 0, "updatedReplicas": 0}, {"unavailableReplicas": 0, "observedGeneration": 0}],
)
def test_a_rollout_of_the_operator_that_goes_on_is_a_warning(status: dict[str, Any]) -> None:
    objects = upgraded("operator", **status)
    objects["/api/v1/pods"].append(pod_of("operator", **waiting("ContainerCreating")))
    (found,) = findings_of(objects)
    assert (found.severity, found.check) == (Severity.WARNING, "rollout_is_unfinished")
    assert found.message == "a rollout is under way, the old pods still serve"


def test_a_pod_that_ends_is_no_new_pod_that_fails() -> None:
    objects = healthy()
    ending = pod_of("operator", **waiting("CrashLoopBackOff"))
    ending["metadata"]["deletionTimestamp"] = "2026-11-29T18:00:30Z"
    objects["/api/v1/pods"].append(ending)
    assert findings_of(objects) == []
