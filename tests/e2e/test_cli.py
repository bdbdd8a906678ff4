"""The kubectl plugin and the dashboard on the real cluster, beside what kubectl and the engines say."""

import html
import json
import math
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.control_plane import render_rules
from e2e.light_pod import is_injected, light_pod
from e2e.user_tools import ToolOutputs, plugin_environment, run_plugin
from hack.console import wait_until
from hack.demo.installation import CHART, DAEMON_SELECTOR, NAMESPACE, RELEASE, create_pool, delete_pool, install_chart
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import running_prometheus
from hack.demo.run import POOL, Stage
from hack.docs import screenshot
from hack.docs.panels import PANELS

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

TOO_LARGE = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: too-large}
spec: {capacity: 64Gi, pageSize: 2Mi}
"""
NOWHERE = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: nowhere}
spec: {capacity: 64Mi, nodeSelector: {zone: nowhere}}
"""
STRAY_POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: stray
  namespace: demo
  labels: {kvoffload.io/pool: never-made}
spec:
  containers:
  - {name: vllm, image: stray, imagePullPolicy: Never, command: [vllm, serve, x]}
"""


@pytest.fixture
def tools(demo_result) -> ToolOutputs:
    if isinstance(demo_result.tools, Exception):
        raise demo_result.tools
    return demo_result.tools


def test_every_command_ran_without_an_error(tools: ToolOutputs) -> None:
    failed = {name: done for name, done in tools.plugin.items() if done.status or done.errors}
    assert not failed


def test_doctor_finds_nothing_while_everything_works(tools: ToolOutputs) -> None:
    document = tools.plugin["doctor json"].document
    assert document["findings"] == []
    assert document["notChecked"] == []
    assert document["checked"]["pools"] == 1
    assert document["checked"]["labelled pods"] == 2


def test_status_shows_both_engines_replicated(tools: ToolOutputs) -> None:
    (pool,) = tools.plugin["status json"].document["pools"]
    engines = [engine for region in pool["regions"] for engine in region["status"]["engines"]]
    assert len(engines) == 2
    assert {engine["confirmedLayout"] for engine in engines} == {"replicated"}
    assert all(engine["podName"] in tools.plugin["status"].output for engine in engines)


def test_a_prompt_that_is_sent_as_the_examples_say_is_found_by_the_other_server(tools: ToolOutputs) -> None:
    first, of_the_other = tools.cached_by_hand
    assert first == 0
    assert of_the_other >= 256


def test_explain_shows_predicted_beside_confirmed_and_the_other_pod(tools: ToolOutputs) -> None:
    answers = {name: done.document for name, done in tools.plugin.items() if name.startswith("explain demo/")}
    assert len(answers) == 2
    for name, answer in answers.items():
        assert answer["injected"][0].startswith("yes")
        assert answer["layout"][0].startswith("predicted: auto (UnknownModel")  # the model is a path
        assert "replicated" in answer["layout"][1]
        (other,) = [one.removeprefix("explain ") for one in answers if one != name]
        assert other in answer["sharing"][-1]


def test_top_shows_the_node_with_its_figures(tools: ToolOutputs) -> None:
    lines = [line for line in tools.plugin["top"].output.splitlines() if f" {POOL} " in line]
    assert len(lines) == 2, "one for each reading"
    assert all("256 MiB" in line for line in lines)


def test_every_query_of_the_dashboard_returns_a_number(tools: ToolOutputs) -> None:
    """A share of nothing is NaN, which a panel does not draw."""
    empty = {
        f"{title}: {query}": samples
        for title, query, samples in tools.queries
        if not any(math.isfinite(value) for _, value in samples)
    }
    assert not empty


def test_the_dashboard_s_variables_offer_the_pool_and_the_node(tools: ToolOutputs, release: Stage) -> None:
    assert tools.variables == {"pool": [POOL], "node": [release.kubernetes.settings.node_name]}


def test_the_dashboard_was_drawn_with_a_figure_or_a_line_in_every_panel(tools: ToolOutputs) -> None:
    panels = re.findall(r"<div class='title'>(.*?)</div>(.*?)</div>", tools.page)
    assert [html.unescape(title) for title, _ in panels] == [panel.title for panel in PANELS]
    assert not [title for title, drawn in panels if not re.search(r"<polyline points='\d|<b>\d|all \d+ are 0", drawn)]


def test_its_picture_is_of_the_whole_page_and_not_empty(tools: ToolOutputs) -> None:
    width, height, rows = read_picture(tools.picture)
    assert (width, height) == (screenshot.WIDTH, screenshot.page_height())
    # a row of one colour, whichever of PNG's filters it went through, has at most its first pixel left
    assert sum(sum(byte != 0 for byte in row[1:]) > 3 for row in rows) > height / 3


def read_picture(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and filtered rows of a PNG of three bytes a pixel."""
    data, at, pixels = path.read_bytes(), 8, b""
    width, height, depth, colours = struct.unpack(">IIBB", data[16:26])
    assert (data[:8], depth, colours) == (b"\x89PNG\r\n\x1a\n", 8, 2)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        pixels += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    pixels, row = zlib.decompress(pixels), width * 3 + 1
    return width, height, [pixels[start : start + row] for start in range(0, len(pixels), row)]


def test_planned_bytes_are_those_of_the_running_engine(tools: ToolOutputs, demo_result) -> None:
    """The demo's model in float32, in blocks of as many tokens as the running server itself says."""
    plan = tools.plugin["plan json"].document
    assert plan["blockTokens"] == tools.block_tokens
    assert plan["slotBytes"] == demo_result.shared.figures.chunk_bytes
    assert plan["blocks"] == demo_result.shared.figures.capacity_chunks
    assert plan["layout"] == "replicated"
    lines = tools.plugin["plan"].output.splitlines()
    (chunk,) = [line for line in lines if line.startswith("Chunk ")]
    assert chunk.split()[1:5] == [str(tools.block_tokens), "tokens", "in", f"{plan['slotBytes']:,}"]
    assert "  capacity: 256Mi" in lines


@pytest.fixture
def troubled(release: Stage) -> Iterator[Kubernetes]:
    """A pool that no node can hold, one that no node matches, and a pod that names a pool that nobody made."""
    kubernetes = release.kubernetes
    for manifest in (TOO_LARGE, NOWHERE, STRAY_POD):
        kubernetes.apply(manifest)
    yield kubernetes
    kubernetes.delete("pod", "stray", namespace="demo")
    for name in ("too-large", "nowhere"):
        delete_pool(kubernetes, name=name)


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


def test_alerts_on_short_nodes_and_unready_pools_fire(troubled: Kubernetes, tmp_path) -> None:
    """The chart's rules in a real Prometheus, with a short `for:`; its length is promtool's to test."""
    with running_prometheus(troubled, tmp_path, rules=render_rules(wait="1s")) as prometheus:
        for alert in ("KVOffloadNodesShortOfPages", "KVOffloadPoolNotReady"):
            wait_until(
                f"{alert} to fire",
                lambda alert=alert: "too-large" in {labels["pool"] for labels in prometheus.firing(alert)},  # type: ignore[misc]
                timeout_seconds=90,
                explain=lambda: (
                    f"alerts: {prometheus.query('ALERTS')}, "
                    f"node counts: {prometheus.query('kvoffload_operator_pool_nodes')}"
                ),
                log=prometheus.log,
            )
        for alert in ("KVOffloadOperatorDown", "KVOffloadWebhookDown"):
            wait_until(
                f"{alert} to be silent",
                lambda alert=alert: not prometheus.firing(alert),  # type: ignore[misc]
                timeout_seconds=30,
                log=prometheus.log,
            )


ENFORCE = "pod-security.kubernetes.io/enforce"
REFUSED = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: refused}
spec: {capacity: 16Mi, pageSize: 2Mi}
"""


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


ALONE = REFUSED.replace("name: refused", "name: alone")


@pytest.fixture
def alone(release: Stage) -> Iterator[Kubernetes]:
    """A pool that serves, and an injected pod that is ready and has no engine, as where the plugin was not imported."""
    kubernetes = release.kubernetes
    annotations = {"kvoffload.io/container": "main"}
    try:
        create_pool(kubernetes, ALONE, name="alone")
        kubernetes.apply(light_pod("alone", pool="alone", image=release.images.python, annotations=annotations))
        pod = kubernetes.wait_ready_pod(namespace="demo", selector="app=alone", timeout_seconds=60)
        assert is_injected(pod)
        yield kubernetes
    finally:
        kubernetes.delete("pod", "alone", namespace="demo")
        delete_pool(kubernetes, name="alone")


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
    wait_until("doctor to miss the webhook", lambda: wanted <= found().keys(), timeout_seconds=60)
    assert all("0 of 0 replicas are ready: labelled pods start" in found()[one] for one in missing)
    no_webhook.apply(NOWHERE)
    no_webhook.apply(stray)
    try:
        assert "no webhook answered" in found()["pod_is_not_injected pod/demo/missed"]
    finally:
        no_webhook.delete("pod", "missed", namespace="demo")
        delete_pool(no_webhook, name="nowhere")


def test_kubectl_completes_the_plugin(release) -> None:
    done = run_plugin(release.kubernetes, "pl", program="__complete")
    assert done.output.splitlines() == ["plan", ":4"]


def test_kubectl_completes_a_labelled_pod(alone: Kubernetes) -> None:
    done = run_plugin(alone, "explain", "pod", "demo/al", program="__complete")
    assert done.output.splitlines() == ["demo/alone", ":4"]


def test_explain_says_why_a_pod_is_not_injected(troubled: Kubernetes) -> None:
    answer = run_plugin(troubled, "explain", "pod", "demo/stray", "-o", "json").document
    assert answer["injected"][0] == "no: PoolNotFound"
    assert "never-made does not exist" in answer["pool"][0]


def test_unknown_pod_and_unreachable_cluster_end_with_2_and_one_line(release, tmp_path) -> None:
    done = run_plugin(release.kubernetes, "explain", "pod", "demo/nobody")
    assert (done.status, done.errors.count("\n")) == (2, 1)
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    done = run_plugin(release.kubernetes, "status", "--kubeconfig", str(config))
    assert done.status == 2
    assert "does not answer" in done.errors
