"""The kubectl plugin on the real cluster with the chart's roles for who looks after it, and no right besides.

A pool, its daemon and a labelled pod without an engine are enough for it: the demo's servers are not started.
"""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
import zipfile
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.control_plane import render_chart
from e2e.light_pod import light_pod
from e2e.rbac_use import CLUSTER, Permission, find_allowed, find_refused, find_used, read_events
from e2e.user_tools import Done, plugin_environment, run_plugin
from hack.console import wait_until
from hack.demo import servers
from hack.demo.installation import DAEMON_SELECTOR, NAMESPACE, create_pool, delete_pool
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage
from kvoffload.api.keys import CONTAINER_ANNOTATION, GROUP, POOL_PLURAL, REGION_PLURAL
from kvoffload_cli.__main__ import app

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

POOL = "cared-for"
MANIFEST = f"""\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {{name: {POOL}}}
spec: {{capacity: 16Mi, pageSize: 2Mi}}
"""
ACCOUNT = "caretaker"
MARKER = "hf_Xq7bWm2cZ9kLr4"
"""Of a variable that a user put into a pod of theirs."""
PRINTED = "the `kubectl describe` that doctor's findings name"
NOT_ASKED = {
    Permission(ACCOUNT, CLUSTER, GROUP, POOL_PLURAL, "get"): PRINTED,
    Permission(ACCOUNT, CLUSTER, GROUP, REGION_PLURAL, "get"): PRINTED,
}
"""What the roles give and the plugin does not ask for, and what does."""


@dataclass(frozen=True)
class Caretaker:
    """An account with the roles, and when it was made (seconds since the epoch)."""

    kubernetes: Kubernetes
    kubeconfig: Path
    token: str = field(repr=False)
    since: float

    def run(self, *arguments: str) -> Done:
        """Run the plugin as this account."""
        return run_plugin(self.kubernetes, *arguments, "--kubeconfig", str(self.kubeconfig))


@pytest.fixture(scope="module")
def caretaker(release: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caretaker]:
    """The account, while a pool is served and a labelled pod with a variable of its user's runs."""
    kubernetes, since = release.kubernetes, time.time()
    in_release, account = f"--namespace={NAMESPACE}", f"--serviceaccount={servers.NAMESPACE}:{ACCOUNT}"
    named = {CONTAINER_ANNOTATION: "main"}
    pod = json.loads(light_pod("marked", pool=POOL, image=release.images.python, annotations=named))
    pod["spec"]["containers"][0]["env"] = [{"name": "HF_TOKEN", "value": MARKER}]
    try:
        kubernetes.kubectl("create", "serviceaccount", ACCOUNT, f"--namespace={servers.NAMESPACE}")
        kubernetes.kubectl("create", "clusterrolebinding", ACCOUNT, "--clusterrole=kvoffload-doctor", account)
        kubernetes.kubectl("create", "rolebinding", ACCOUNT, "--role=kvoffload-doctor", account, in_release)
        token = kubernetes.kubectl("create", "token", ACCOUNT, f"--namespace={servers.NAMESPACE}").strip()
        create_pool(kubernetes, MANIFEST, name=POOL)
        kubernetes.apply(json.dumps(pod))
        kubernetes.wait_ready_pod(namespace=servers.NAMESPACE, selector="app=marked", timeout_seconds=120)
        kubeconfig = tmp_path_factory.mktemp("caretaker") / "kubeconfig"
        content = yaml.safe_load(kubernetes.settings.kubeconfig.read_text())
        content["users"] = [{"name": one["name"], "user": {"token": token}} for one in content["users"]]
        kubeconfig.write_text(yaml.safe_dump(content))
        yield Caretaker(kubernetes=kubernetes, kubeconfig=kubeconfig, token=token, since=since)
    finally:
        kubernetes.delete("pod", "marked", namespace=servers.NAMESPACE)
        delete_pool(kubernetes, name=POOL)
        kubernetes.delete("rolebinding", ACCOUNT, namespace=NAMESPACE)
        kubernetes.delete("clusterrolebinding", ACCOUNT)
        kubernetes.delete("serviceaccount", ACCOUNT, namespace=servers.NAMESPACE)


def daemon_of(kubernetes: Kubernetes) -> dict[str, Any]:
    return kubernetes.wait_ready_pod(namespace=NAMESPACE, selector=f"{DAEMON_SELECTOR}={POOL}", timeout_seconds=120)


@pytest.fixture(scope="module")
def restarted_attacher(caretaker: Caretaker) -> str:
    """The name of the daemon's pod, whose attacher was killed once, so that it has a log of before."""
    pod = daemon_of(caretaker.kubernetes)
    (pid,) = [pid for pid, line in servers.find_pod_processes(pod).items() if line.split()[-1:] == ["attacher"]]
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        statuses = caretaker.kubernetes.get("pod", name, namespace=NAMESPACE)["status"]["containerStatuses"]
        return all(one["ready"] for one in statuses) and sum(one["restartCount"] for one in statuses) == 1

    name = str(pod["metadata"]["name"])
    wait_until("the attacher to be there again", is_back, timeout_seconds=120)
    return name


@pytest.fixture(scope="module")
def bundle(caretaker: Caretaker, restarted_attacher: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What `report` wrote for the account, by the name of each file."""
    target = tmp_path_factory.mktemp("report") / "r.zip"
    done = caretaker.run("report", "-f", str(target))
    assert (done.status, done.errors) == (0, ""), done.output
    assert target.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(target) as archive:
        return {name.removeprefix("r/"): archive.read(name) for name in archive.namelist()}


def test_a_report_has_every_part(caretaker: Caretaker, bundle: dict[str, bytes], restarted_attacher: str) -> None:
    documents = {name: json.loads(text) for name, text in bundle.items() if name.endswith(".json")}
    assert documents["not-read.json"] == []
    assert POOL in {one["metadata"]["name"] for one in documents["pools.json"]}
    assert POOL in {one["spec"]["poolName"] for one in documents["regions.json"]}
    assert [one["environment"]["main"]["KVOFFLOAD_POOL"] for one in documents["engine-pods.json"]] == [POOL]
    assert {one["metadata"]["name"] for one in documents["workloads.json"]} >= {
        *("kvoffload-operator", "kvoffload-webhook-0", "kvoffload-webhook-1", f"kvoffload-{POOL}"),
    }
    assert len(documents["webhook-configurations.json"]) == 3
    assert {one["versions"][0]["name"] for one in documents["crds.json"]} == {"v1alpha1"}
    assert len(documents["nodes.json"]) == 1
    about = {one["involvedObject"]["name"] for one in documents["events.json"]}
    assert {POOL, restarted_attacher} <= about
    assert documents["doctor.json"]["checked"]["pools"] >= 1
    folder = f"logs/{NAMESPACE}/{restarted_attacher}"
    for name in ("daemon", "attacher", "attacher.previous"):
        assert bundle[f"{folder}/{name}.log"], name
    pods = caretaker.kubernetes.pods(namespace=NAMESPACE, selector="app.kubernetes.io/name=kvoffload")
    assert len(pods) >= 4
    for pod in pods:
        metrics = bundle[f"metrics/{NAMESPACE}/{pod['metadata']['name']}.txt"]
        assert b"kvoffload_" in metrics, pod["metadata"]["name"]


def test_nothing_secret_is_in_a_report(caretaker: Caretaker, bundle: dict[str, bytes]) -> None:
    """Every value of every Secret of the release, every token of its pods, and what a user gave a pod of theirs."""
    kubernetes = caretaker.kubernetes
    secrets = {
        f"{one['metadata']['name']}: {key}": value.encode()
        for one in kubernetes.get("secrets", namespace=NAMESPACE)["items"]
        for key, value in one.get("data", {}).items()
    }
    assert f"{'kvoffload-webhook-tls'}: tls.key" in secrets
    tokens = {
        str(path): path.read_bytes() for path in Path(kubernetes.settings.kubelet_root).glob("pods/*/volumes/*/*/token")
    }
    assert tokens
    key = b64decode(secrets["kvoffload-webhook-tls: tls.key"])
    lines = {f"key, line {number}": line for number, line in enumerate(key.splitlines()) if b"-----" not in line}
    decoded = {f"{name}, decoded": b64decode(value) for name, value in secrets.items()}
    user = {"the user's variable": MARKER.encode(), "the caretaker's token": caretaker.token.encode()}
    assert MARKER in json.dumps(kubernetes.get("pod", "marked", namespace=servers.NAMESPACE))
    for what, value in {**secrets, **decoded, **tokens, **lines, **user}.items():
        assert len(value) >= 4, what
        assert [name for name, content in bundle.items() if value in content] == [], what


def test_a_redacted_report_names_no_pod_and_no_namespace_of_a_user(caretaker: Caretaker, tmp_path: Path) -> None:
    target = tmp_path / "r.zip"
    assert caretaker.run("report", "--redact", "--since", "1h", "-f", str(target)).status == 0
    node = caretaker.kubernetes.get("nodes")["items"][0]["metadata"]["name"]
    with zipfile.ZipFile(target) as archive:
        everything = b"\n".join(archive.read(name) for name in archive.namelist()).decode()
    for name in ("marked", servers.NAMESPACE, node):
        assert not re.search(rf"(?<![-\w]){re.escape(name)}(?![-\w])", everything), name
    assert NAMESPACE in everything
    again = caretaker.run("report", "-f", str(target))
    assert again.status == 2
    assert "is there already" in again.errors


def test_a_report_without_the_roles_says_what_is_missing(caretaker: Caretaker, tmp_path: Path) -> None:
    kubernetes, target = caretaker.kubernetes, tmp_path / "r.zip"
    kubernetes.delete("rolebinding", ACCOUNT, namespace=NAMESPACE)
    try:
        done = caretaker.run("report", "-f", str(target))
    finally:
        kubernetes.kubectl(
            *("create", "rolebinding", ACCOUNT, "--role=kvoffload-doctor", f"--namespace={NAMESPACE}"),
            f"--serviceaccount={servers.NAMESPACE}:{ACCOUNT}",
        )
    assert done.status == 1
    with zipfile.ZipFile(target) as archive:
        failures = json.loads(archive.read("r/not-read.json"))
    assert {one["what"].partition("/")[0] for one in failures} == {"logs", "metrics"}
    assert all("(403)" in one["reason"] for one in failures)
    assert all(f"not read: {one['what']}" in done.output for one in failures)


def test_top_draws_on_a_terminal_until_it_is_interrupted_and_gives_it_back(caretaker: Caretaker) -> None:
    terminal, of_the_program = pty.openpty()
    os.set_blocking(terminal, False)
    before = termios.tcgetattr(of_the_program)
    environment = plugin_environment(caretaker.kubernetes) | {"TERM": "xterm-256color", "LINES": "24"}
    command = ["kubectl", "kvoffload", "top", "--interval", "0.5", "--kubeconfig", str(caretaker.kubeconfig)]
    process = subprocess.Popen(
        command, env=environment, stdin=of_the_program, stdout=of_the_program, stderr=of_the_program,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C there is a signal
    )  # fmt: skip
    drawn = ""

    def has_drawn(frames: int) -> bool:
        nonlocal drawn
        drawn += read_all(terminal)
        return len(re.findall(r"\d\d:\d\d:\d\d UTC, \d+ daemons", drawn)) >= frames

    try:
        wait_until("two frames", lambda: has_drawn(2), timeout_seconds=60, explain=lambda: repr(drawn))
        os.write(terminal, termios.tcgetattr(of_the_program)[6][termios.VINTR])  # Ctrl-C, as the terminal sends it
        process.wait(30)
        drawn += read_all(terminal)
        assert termios.tcgetattr(of_the_program) == before
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(terminal)
        os.close(of_the_program)
    assert process.returncode == 0, drawn
    assert "Traceback" not in drawn
    assert POOL in drawn
    assert re.search(r"\x1b\[\d*A|\x1b\[2K", drawn), "the second frame takes the place of the first"
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l"), "the cursor is shown again"


def read_all(descriptor: int) -> str:
    """What has been written to a terminal and not been read."""
    found = b""
    try:
        while part := os.read(descriptor, 65536):
            found += part
    except BlockingIOError:
        pass
    return found.decode(errors="replace")


def test_the_roles_give_what_the_plugin_asks_for_and_nothing_else(
    caretaker: Caretaker, bundle: dict[str, bytes]
) -> None:
    """By the audit log; what is refused is the one try, a labelled pod in a dry run, and then the look for who may."""
    commands = {
        "doctor": ["doctor"],
        "status": ["status"],
        "top": ["top", "--iterations", "1", "--interval", "0.5"],
        "explain": ["explain", "pod", f"{servers.NAMESPACE}/marked"],
    }
    assert {one.name for one in app.registered_commands} == {"plan", "report", *commands} - {"explain"}
    for name, arguments in commands.items():
        done = caretaker.run(*arguments)
        found = (1,) if name == "doctor" else ()  # no engine attaches in the pod, which is an error after two minutes
        assert done.status in (0, *found), f"{name}: {done.output}"
        assert done.errors == "", name
    roles = [one for one in render_chart() if one["metadata"]["name"] == "kvoffload-doctor"]
    assert {one["kind"] for one in roles} == {"ClusterRole", "Role"}
    granted = {permission for role in roles for permission in find_allowed(role, account=ACCOUNT)}

    def unused() -> set[Permission]:
        log = caretaker.kubernetes.settings.audit_log
        events = read_events(log, namespace=servers.NAMESPACE, since=caretaker.since)
        return granted - find_used(events, namespace=servers.NAMESPACE, release_namespace=NAMESPACE)

    wait_until(
        "the audit log to have every request",
        lambda: unused() == set(NOT_ASKED),
        timeout_seconds=10,
        explain=lambda: "\n".join(map(str, sorted(unused()))),
    )
    events = read_events(caretaker.kubernetes.settings.audit_log, namespace=servers.NAMESPACE, since=caretaker.since)
    without_the_role = f"/namespaces/{NAMESPACE}/pods/"
    expected = ("create /api/v1/namespaces/default/pods?dryRun=All", "/v1/clusterroles?", without_the_role)
    refused = [one for one in find_refused(events, namespace=servers.NAMESPACE) if ACCOUNT in one]
    assert [one for one in refused if not any(part in one for part in expected)] == []
