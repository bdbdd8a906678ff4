"""A real API server of its own for the operator's tests: etcd, API server, controller manager, scheduler; no kubelet.

Up in a few seconds beside the local cluster, which it does not touch: ports of its own, everything below one temporary
folder, processes ended by their ids. Nodes, and what kubelets and daemons would report, are written by the tests. The
chart's objects are applied as `helm template` renders them; `operator_process` runs the operator with its service
account's token: it has the chart's RBAC and no more.
"""

import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cache import REPOSITORY
from hack.cluster.programs import PROGRAMS

NAMESPACE = "kvoffload-system"
FIRST_PORT, PORTS_OF_A_WORKER = 20000, 1000
"""Below those that Linux gives to connections (32768), and away from the local cluster's."""
_given_ports = itertools.count()
CHART = REPOSITORY / "charts" / "kvoffload"
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, verbs: [get, list, watch]}
- {level: Metadata}
"""


def program(name: str) -> Path:
    """A program of the local cluster from the cache."""
    found = [one.folder / name for one in PROGRAMS if name in one.binaries]
    if not found or not found[0].exists():
        raise FileNotFoundError(f"{name} is not built; run `make cluster-up` once")
    return found[0]


def wait_until(is_true: Callable[[], bool], what: str, *, seconds: float = 90.0) -> float:
    """Poll until it holds; returns how long it took, seconds. The bound is for a machine that starts vLLM beside it."""
    started = time.monotonic()
    while not is_true():
        waited = time.monotonic() - started
        if waited > seconds:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - started


def event_time(event: dict[str, Any]) -> float:
    """When the API server received the request of an audit event, in seconds since the epoch."""
    return datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()


def free_port() -> int:
    """A port that is free, and that neither another worker of pytest-xdist nor a connection is given: some are bound
    only seconds later."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = FIRST_PORT + worker * PORTS_OF_A_WORKER + next(_given_ports) % PORTS_OF_A_WORKER
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class ControlPlane:
    """The running API server, and kubectl on it."""

    folder: Path
    port: int
    admin_token: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Address of the API server."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.folder / "admin.kubeconfig"

    def write_kubeconfig(self, name: str, token: str, *, url: str = "") -> Path:
        """A kubeconfig for a token, of this server or of a proxy before it."""
        path = self.folder / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": url or self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True, token: str = "") -> str:
        """Run kubectl; returns stdout, or stdout and stderr where it need not succeed."""
        command = [str(program("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        if token:
            command[1] = f"--kubeconfig={self.write_kubeconfig('token', token)}"
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}{done.stdout}")
        return done.stdout if check else done.stdout + done.stderr

    def kubectl_if_there(self, *arguments: str, stdin: str | None = None) -> bool:
        """Run kubectl on an object that may go meanwhile; returns whether it was there."""
        try:
            self.kubectl(*arguments, stdin=stdin)
        except RuntimeError as error:
            if "(NotFound)" not in str(error):
                raise
            return False
        return True

    def get(self, *arguments: str) -> Any:
        """Objects as JSON."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def find(self, *arguments: str) -> Any:
        """One object, None if there is none."""
        text = self.kubectl("get", *arguments, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def apply(self, *manifests: dict[str, Any] | str) -> None:
        """Apply manifests."""
        texts = [one if isinstance(one, str) else yaml.safe_dump(one) for one in manifests]
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(texts))

    def audit(self, *, user: str = "", since: float = 0.0) -> list[dict[str, Any]]:
        """Writes that the API server saw, by user-agent or user name, from a moment on (seconds since the epoch)."""
        events = []
        for line in (self.folder / "audit.log").read_text().splitlines():
            event = json.loads(line)
            at = event_time(event)
            if at >= since and user in (event["user"]["username"] + " " + event.get("userAgent", "")):
                events.append(event)
        return events

    def set_node_pages(self, name: str, size: str, quantity: str) -> None:
        """What a kubelet would report as allocatable."""
        resources = {f"hugepages-{size}": quantity, "cpu": "4", "memory": "8Gi", "pods": "110"}
        patch = {"status": {"allocatable": resources, "capacity": resources}}
        self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(patch))

    def add_node(self, name: str, *, pages: str = "256Mi", labels: dict[str, str] | None = None) -> None:
        """A node that is Ready and has that many bytes of 2Mi pages."""
        self.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels or {}}})
        self.set_node_pages(name, "2Mi", pages)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
        patch = {"status": {"conditions": [{**ready, "lastTransitionTime": now}]}}
        self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(patch))
        # nobody renews its lease: without these the controller would taint it and evict
        self.kubectl("taint", "node", name, "--all", "node.kubernetes.io/not-ready-", check=False)


@contextlib.contextmanager
def running_control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Start everything, and end it by its ids afterwards."""
    plane = ControlPlane(folder, free_port(), secrets.token_hex(16))
    etcd_port, peer_port = free_port(), free_port()
    key = folder / "sa.key"
    openssl = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(openssl, check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{plane.admin_token},admin,admin,"system:masters"\n')
    (folder / "audit.yaml").write_text(AUDIT_POLICY)
    plane.write_kubeconfig("admin", plane.admin_token)
    peer = f"http://127.0.0.1:{peer_port}"
    commands: dict[str, list[str]] = {
        "etcd": [
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            f"--secure-port={plane.port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder}/certs",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.97.0.0/16",
            "--endpoint-reconciler-type=none",
            "--enable-aggregator-routing=true",  # webhooks are called at their endpoints
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={folder}/tokens.csv",
            "--allow-privileged=true",
            f"--audit-policy-file={folder}/audit.yaml",
            f"--audit-log-path={folder}/audit.log",
        ],
        "kube-controller-manager": [
            f"--kubeconfig={plane.kubeconfig}",
            f"--service-account-private-key-file={key}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            f"--secure-port={free_port()}",
            f"--cert-dir={folder}/certs",
            "--controllers=*,-node-lifecycle-controller,-taint-eviction-controller",
        ],
        "kube-scheduler": [
            f"--kubeconfig={plane.kubeconfig}",
            "--leader-elect=false",
            f"--secure-port={free_port()}",
            f"--cert-dir={folder}/certs",
        ],
    }
    try:
        for name, arguments in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                # it ends with pytest, however that ends
                command = ["setpriv", "--pdeathsig", "KILL", str(program(name)), *arguments]
                process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
            plane.processes.append(process)
            if name == "kube-apiserver":
                wait_until(
                    lambda: "ok" in plane.kubectl("get", "--raw", "/readyz", check=False)[:2],
                    f"API server of {folder} to be ready",
                )
        wait_until(lambda: plane.find("serviceaccount", "default") is not None, "the controller manager to work")
        yield plane
    finally:
        for process in reversed(
            plane.processes
        ):  # nothing of it is used again: an API server takes 10 s over a SIGTERM
            process.kill()
            process.wait()


def render_chart(*values: str, chart: Path = CHART, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """A chart's objects, and its CRDs first; its name is the release's."""
    sets = [argument for value in values for argument in ("--set", value)]
    command = [
        program("helm"),
        "template",
        chart.name,
        chart,
        "-n",
        namespace,
    ]
    done = subprocess.run(
        [*map(str, command), "--kube-version=1.37.2", "--include-crds", *sets],
        check=True,
        capture_output=True,
        text=True,
    )
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def render_rules(*, wait: str) -> str:
    """The chart's alert rules as a Prometheus' rule file, each with `for: wait`."""
    rules = yaml.safe_load((REPOSITORY / "charts/kvoffload/rules/kvoffload.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    values = [f"monitoring.prometheusRule.alerts.{alert}.for={wait}" for alert in alerts]
    objects = render_chart("monitoring.prometheusRule.enabled=true", *values)
    (rule,) = [one for one in objects if one["kind"] == "PrometheusRule"]
    return yaml.safe_dump(rule["spec"])


def install_chart(plane: ControlPlane, *values: str) -> None:
    """Apply the chart. Webhook configurations are left out: nothing serves them here."""
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    objects = render_chart(*values)
    crds = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(crds))
    plane.kubectl(
        "wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{c['metadata']['name']}" for c in crds)
    )
    rest = [one for one in objects if one not in crds and not one["kind"].endswith("WebhookConfiguration")]
    plane.apply(*rest)


def region_report(plane: ControlPlane, region: dict[str, Any], **status: Any) -> dict[str, Any]:
    """What a node's daemon would write into its region: it serves."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    generation = region["metadata"]["generation"]
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "serves",
        "observedGeneration": generation,
        "lastTransitionTime": now,
    }
    capacity = region["spec"]["capacityBytes"]
    return {
        "apiVersion": "kvoffload.io/v1alpha1",
        "kind": "KVOffloadRegion",
        "metadata": {"name": region["metadata"]["name"]},
        "status": {
            "observedGeneration": generation,
            "conditions": [ready],
            "capacityBytes": capacity,
            "freeBytes": capacity,
            **status,
        },
    }


def report_regions(plane: ControlPlane, **status: Any) -> int:
    """Let every region's daemon report; returns how many do. One that goes meanwhile needs no report."""
    regions = plane.get("kvregion")["items"]
    return sum(
        plane.kubectl_if_there(
            "apply",
            "--server-side",
            "--subresource=status",
            "--field-manager=kvoffload-node",
            "-f",
            "-",
            stdin=json.dumps(region_report(plane, region, **status)),
        )
        for region in regions
    )


def run_daemon_pods(plane: ControlPlane) -> int:
    """Be the kubelets: every scheduled pod of a DaemonSet runs and is ready; returns how many do."""
    pods = plane.get("pods", "-n", NAMESPACE, "-l", "kvoffload.io/daemon-of")["items"]
    running = 0
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60))
    for pod in pods:
        if not pod["spec"].get("nodeName"):
            continue
        running += 1
        if pod["metadata"].get("deletionTimestamp"):
            where = ("-n", NAMESPACE, "--force", "--grace-period=0")
            plane.kubectl_if_there("delete", "pod", pod["metadata"]["name"], *where)
            continue
        if pod["status"].get("phase") == "Running":
            continue
        condition = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        patch = {"status": {"phase": "Running", "startTime": now, "conditions": [condition]}}
        plane.kubectl_if_there(
            "patch", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p",
            json.dumps(patch),
        )  # fmt: skip
    return running


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The API server with the chart's objects and two nodes, n1 and n2."""
    with running_control_plane(tmp_path_factory.mktemp("control-plane")) as plane:
        install_chart(plane)
        for name in ("n1", "n2"):
            plane.add_node(name)
        yield plane
