"""What `kubectl kvoffload doctor` finds on the real cluster where something is wrong, and that its remedy ends it."""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from e2e.troubles import NOWHERE, STRAY_POD
from e2e.user_tools import plugin_environment, run_plugin
from hack.console import wait_until
from hack.demo.installation import CHART, DAEMON_SELECTOR, NAMESPACE, RELEASE, create_pool, delete_pool, install_chart
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


def test_doctor_names_what_is_wrong_with_the_remedy_and_ends_with_1(troubled: Kubernetes) -> None:
    def found() -> dict[str, dict[str, str]]:
        done = run_plugin(troubled, "doctor", "-o", "json")
        assert done.status == 1, done.errors
        return {f"{one['check']} {one['subject']}": one for one in done.document["findings"]}

    wanted = {
        "pool_matches_no_node pool/nowhere",
        "pod_is_not_injected pod/demo/stray",
    }
    wait_until(
        "the operator to have looked at the pools",
        lambda: wanted <= set(found()),
        timeout_seconds=30,
        explain=lambda: json.dumps(found(), indent=1),
    )
    (short,) = [one for name, one in found().items() if name.startswith("node_is_short_of_pages")]
    assert re.search(r"the kubelet knows of \S+ of hugepages-2Mi, pool too-large needs 64Gi", short["message"])
    pages = re.search(r"\[ \$n -ge (\d+) ]", short["remedy"])
    assert pages, short
    assert int(pages[1]) >= 32768, "the pool's, beside those of the demo's pool"


REFUSED = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: refused}
spec: {capacity: 16Mi, pageSize: 2Mi}
"""
ENFORCE = "pod-security.kubernetes.io/enforce"


@pytest.fixture
def refusing(release: Stage) -> Iterator[Kubernetes]:
    """A pool that was ready, until Pod Security `baseline` was enforced in its namespace and its daemon deleted."""
    kubernetes = release.kubernetes
    before = kubernetes.get("namespace", NAMESPACE)["metadata"]["labels"].get(ENFORCE)
    try:
        create_pool(kubernetes, REFUSED, name="refused")
        kubernetes.kubectl("label", "namespace", NAMESPACE, f"{ENFORCE}=baseline", "--overwrite")
        selector = f"--selector={DAEMON_SELECTOR}=refused"
        kubernetes.kubectl("delete", "pods", selector, f"--namespace={NAMESPACE}", "--wait=true")
        yield kubernetes
    finally:
        kubernetes.kubectl(
            "label", "namespace", NAMESPACE, f"{ENFORCE}={before}" if before else f"{ENFORCE}-", "--overwrite"
        )
        delete_pool(kubernetes, name="refused")


def test_doctor_finds_that_pod_security_refuses_the_daemons_and_its_remedy_helps(refusing: Kubernetes) -> None:
    def findings() -> list[dict[str, str]]:
        done = run_plugin(refusing, "doctor", "-o", "json")
        return [one for one in done.document["findings"] if "refused" in one["subject"]]

    wait_until(
        "doctor to find it, and nothing else of that pool",
        lambda: [one["check"] for one in findings()] == ["daemon_pods_are_refused"],
        timeout_seconds=60,
        explain=lambda: json.dumps(findings(), indent=1),
    )
    (found,) = findings()
    assert found["subject"] == f"daemonset/{NAMESPACE}/kvoffload-refused"
    assert 'violates PodSecurity "baseline:latest": ' in found["message"]
    label, _, again = found["remedy"].partition("; its controller tries again within 17 minutes, or at once: ")
    environment = plugin_environment(refusing)
    for command in (label, again):
        subprocess.run(["bash", "-euc", command], env=environment, capture_output=True, check=True)
    create_pool(refusing, REFUSED, name="refused")  # waits until it is Ready again
    wait_until(
        "doctor to find nothing any more",
        lambda: findings() == [],
        timeout_seconds=90,
        explain=lambda: json.dumps(findings(), indent=1),
    )


def test_doctor_names_a_ready_pod_without_an_engine_at_once_and_its_command_shows_that_nothing_was_said(
    alone: Kubernetes,
) -> None:
    findings = run_plugin(alone, "doctor", "-o", "json").document["findings"]
    (found,) = [one for one in findings if "alone" in one["subject"]]
    assert (found["check"], found["severity"]) == ("pod_is_not_attached", "warning")
    command = ["bash", "-uc", found["remedy"]]
    done = subprocess.run(command, env=plugin_environment(alone), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", ""), "grep finds no line of the plugin"
    answer = run_plugin(alone, "explain", "pod", "demo/alone", "-o", "json").document["attached"]
    assert answer == [f"no: {found['message']}", found["remedy"]]


@pytest.fixture
def stuck_upgrade(release: Stage) -> Iterator[Kubernetes]:
    """The chart upgraded to an operator image that no node has, as helm reports success of without `--wait`."""
    kubernetes = release.kubernetes
    values = ("--reuse-values", "--set=image.operator.tag=mistyped")
    try:
        kubernetes.helm("upgrade", RELEASE, CHART, f"--namespace={NAMESPACE}", *values)
        yield kubernetes
    finally:
        install_chart(kubernetes, release.images)


def test_doctor_names_an_upgrade_whose_image_is_missing_and_its_way_back_is_one(stuck_upgrade: Kubernetes) -> None:
    def findings() -> list[dict[str, str]]:
        done = run_plugin(stuck_upgrade, "doctor", "-o", "json")
        return [one for one in done.document["findings"] if one["check"] == "rollout_is_unfinished"]

    names = {f"deployment/{NAMESPACE}/{RELEASE}-{name}" for name in ("operator", "webhook-0", "webhook-1")}

    def are_all_stuck() -> bool:
        return {one["subject"] for one in findings() if one["severity"] == "error"} == names

    wait_until(
        "doctor to find all three",
        are_all_stuck,
        timeout_seconds=60,
        explain=lambda: json.dumps(findings(), indent=1),
    )
    for found in findings():
        assert "the old pods still serve: pod kvoffload-" in found["message"]
        assert "ErrImageNeverPull" in found["message"]
        assert ":mistyped" in found["message"]
    back = found["remedy"].rpartition("go back: ")[2]
    subprocess.run(["bash", "-euc", back], env=plugin_environment(stuck_upgrade), capture_output=True, check=True)
    wait_until(
        "doctor to find nothing any more",
        lambda: findings() == [],
        timeout_seconds=60,
        explain=lambda: json.dumps(findings(), indent=1),
    )


@pytest.fixture
def no_webhook(release: Stage) -> Iterator[Kubernetes]:
    """Both Deployments of the webhook at no replica."""
    kubernetes = release.kubernetes
    in_namespace = f"--namespace={NAMESPACE}"
    names = ("deployment/kvoffload-webhook-0", "deployment/kvoffload-webhook-1")
    kubernetes.kubectl("scale", *names, "--replicas=0", in_namespace)
    yield kubernetes
    kubernetes.kubectl("scale", *names, "--replicas=1", in_namespace)
    for name in names:
        kubernetes.kubectl("rollout", "status", name, in_namespace, "--timeout=90s")


def test_doctor_names_a_webhook_without_replicas_and_a_pod_that_it_missed(no_webhook: Kubernetes) -> None:
    stray = STRAY_POD.replace("never-made", "nowhere").replace("name: stray", "name: missed")

    def found() -> dict[str, str]:
        done = run_plugin(no_webhook, "doctor", "-o", "json")
        return {f"{one['check']} {one['subject']}": one["message"] for one in done.document["findings"]}

    missing = [f"release_is_incomplete deployment/{NAMESPACE}/kvoffload-webhook-{replica}" for replica in (0, 1)]
    wanted = {*missing, "webhook_is_not_asked webhook"}
    wait_until("doctor to miss the webhook", lambda: wanted <= found().keys(), timeout_seconds=120)
    assert all("0 of 0 replicas are ready: labelled pods start" in found()[one] for one in missing)
    no_webhook.apply(NOWHERE)
    no_webhook.apply(stray)
    try:
        assert "no webhook answered" in found()["pod_is_not_injected pod/demo/missed"]
    finally:
        no_webhook.delete("pod", "missed", namespace="demo")
        delete_pool(no_webhook, name="nowhere")
