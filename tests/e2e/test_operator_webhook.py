"""The webhook as processes behind a real API server: injection, replicas lost and certificates rotated under load, p99.

The API server calls two replicas on this machine through the chart's Services, whose endpoints the test writes once: a
replica that is killed, stopped or ended stays published, as on a node that died.
"""

import asyncio
import base64
import http.server
import json
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

import endpoints
from e2e.control_plane import NAMESPACE, ControlPlane, free_port, render_chart, wait_until
from e2e.light_pod import skip_reason
from e2e.operator_pools import pool_manifest
from e2e.operator_process import checked_metrics
from e2e.webhook_load import Load, create_many, wait_for_more
from e2e.webhook_replicas import (
    DEEPSEEK,
    Replica,
    certificates_for_doctor,
    create,
    expiring_for_doctor,
    host_address,
    is_injected,
    is_serving,
    listed_pods,
    publish,
    served_serial,
    serving_replicas,
    start_replica,
)
from kvoffload_operator.webhook.certificates import load_context, make_certificate
from operator_builders import pod_manifest

pytestmark = pytest.mark.e2e

SECRET = "kvoffload-webhook-tls"
TIMEOUT_SECONDS = 2
"""Of the chart: how long the API server waits for a replica before it asks the next."""


@pytest.fixture(scope="module")
def replicas(control_plane: ControlPlane) -> Iterator[list[Replica]]:
    """Two webhooks that the API server calls, with certificates by the operator."""
    with serving_replicas(control_plane) as running:
        yield running


def test_a_replica_shows_every_result_also_before_it_happens(replicas: list[Replica]) -> None:
    """The second one is asked only where the first does not answer."""
    first, second = (checked_metrics(replica.metrics_port) for replica in replicas)
    name = "kvoffload_operator_injections_total"
    assert first[f'{name}{{reason="",result="injected"}}'] > 0
    assert second[f'{name}{{reason="",result="error"}}'] == 0
    assert second[f'{name}{{reason="PoolNotFound",result="skipped"}}'] == 0


def test_an_opted_in_pod_is_injected_and_others_are_not_seen(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    pod = create(control_plane, pod_manifest(command=DEEPSEEK))
    environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert environment["PYTHONPATH"] == "/run/kvoffload"
    assert environment["KVOFFLOAD_REPLICATED_LAYOUT"] == "replicated"
    plain = pod_manifest(command=DEEPSEEK)
    del plain["metadata"]["labels"]
    assert "env" not in create(control_plane, plain)["spec"]["containers"][0]
    assert not is_injected(create(control_plane, pod_manifest(command=DEEPSEEK), namespace="kube-system"))


def test_a_command_line_that_grows_beyond_measure_holds_up_nobody_and_is_said(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    """8 MiB after 20 doublings; each more doubles what it would ask for."""
    unread = "kvoffload_operator_unread_command_lines_total"
    before = replicas[0].metrics()[unread]
    doubling = ["sh", "-c", "A=aaaaaaaa;" + "A=$A$A;" * 20 + "vllm serve deepseek-ai/DeepSeek-V3 -tp 8 $A"]
    pod = create(control_plane, pod_manifest(command=doubling))
    assert pod["metadata"]["annotations"]["kvoffload.io/replicated-layout"].startswith("auto (UnknownModel: the pod's")
    assert replicas[0].metrics()[unread] == before + 1
    assert is_injected(create(control_plane, pod_manifest(command=DEEPSEEK)))


def test_a_restricted_namespace_a_quota_and_a_limit_range_take_the_injected_pod(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "strict", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q", "namespace": "strict"},
            "spec": {"hard": {"requests.memory": "8Gi", "limits.memory": "8Gi", "pods": "5"}},
        },
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "l", "namespace": "strict"},
            "spec": {"limits": [{"type": "Container", "default": {"memory": "1Gi"}, "max": {"memory": "2Gi"}}]},
        },
    )
    wait_until(
        lambda: control_plane.find("serviceaccount", "default", "-n", "strict") is not None, "the service account"
    )
    hardened = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod = pod_manifest(command=DEEPSEEK, container={"securityContext": hardened})
    assert is_injected(create(control_plane, pod, namespace="strict"))


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (pod_manifest(command=[*DEEPSEEK, "--nnodes", "2", "--node-rank", "1"]), "MultiNode"),
        (pod_manifest(command=[*DEEPSEEK, "--kv-transfer-config", "{}"]), "UserConnector"),
        (pod_manifest(command=DEEPSEEK, pool="nobody"), "PoolNotFound"),
        (pod_manifest(command=DEEPSEEK, image="vllm/vllm-openai:v0.10.0"), "UnsupportedVLLM"),
    ],
)
def test_a_pod_that_is_left_alone_is_created_with_one_reason(
    control_plane: ControlPlane, replicas: list[Replica], pod: dict[str, Any], reason: str
) -> None:
    created = create(control_plane, pod)
    assert skip_reason(created) == reason
    assert "env" not in created["spec"]["containers"][0]


def test_an_update_is_left_alone(control_plane: ControlPlane, replicas: list[Replica]) -> None:
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "later"},
            "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "command": DEEPSEEK}]},
        }
    )
    try:
        control_plane.kubectl("label", "pod", "later", "kvoffload.io/pool=main")
        assert not is_injected(control_plane.get("pod", "later"))
    finally:
        control_plane.kubectl("delete", "pod", "later", "--force", "--grace-period=0")


def test_a_pool_s_warnings_and_errors_are_shown_when_it_is_applied(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    manifest = pool_manifest("warned", sharing="Pool")
    answer = control_plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    assert "Warning: spec.nodeSelector is empty" in answer
    assert "Warning: spec.sharing Pool lets pods of every allowed namespace" in answer
    manifest["spec"] = {"capacity": "64Mi", "nodeSelector": {"a b": "c"}}
    answer = control_plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    assert "spec.nodeSelector[a b]: 'a b' is no label key" in answer


# --- under load -----------------------------------------------------------------------------------------------------


def test_the_second_replica_is_asked_only_where_the_first_does_not_answer(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    num_late = 0

    def timed(pod: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_late
        started = time.monotonic()
        created = create(control_plane, pod)
        num_late += time.monotonic() - started >= TIMEOUT_SECONDS
        return created

    before = [replica.num_calls() for replica in replicas]
    for _ in range(5):
        assert is_injected(timed(pod_manifest(command=DEEPSEEK)))
    assert skip_reason(timed(pod_manifest(command=DEEPSEEK, pool="nobody"))) == "PoolNotFound"
    first, second = (replica.num_calls() - calls for replica, calls in zip(replicas, before, strict=True))
    assert first == 6
    assert second <= num_late, "a busy machine may make the first one late"


@pytest.fixture
def spoiler(control_plane: ControlPlane) -> Iterator[None]:
    """Somebody else's webhook, called once a pod and after ours, that takes KVOFFLOAD_POOL out of the environment."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
            names = [one["name"] for one in request["object"]["spec"]["containers"][0]["env"]]
            patch = [{"op": "remove", "path": f"/spec/containers/0/env/{names.index('KVOFFLOAD_POOL')}"}]
            encoded = base64.b64encode(json.dumps(patch).encode()).decode()
            response = {"uid": request["uid"], "allowed": True, "patchType": "JSONPatch", "patch": encoded}
            review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
            body = json.dumps(review).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: pytest shows what fails."""

    pair = make_certificate((f"spoiler.{NAMESPACE}.svc",), now=datetime.now(UTC), lifetime=timedelta(days=1))
    server = http.server.ThreadingHTTPServer((host_address(), 0), Handler)
    server.socket = load_context(pair["tls.crt"], pair["tls.key"]).wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    configuration = next(one for one in render_chart() if one["kind"] == "MutatingWebhookConfiguration")
    configuration["metadata"] = {"name": "later-than-ours"}
    (webhook,) = configuration["webhooks"]
    del webhook["matchConditions"]
    webhook["name"], webhook["reinvocationPolicy"], webhook["failurePolicy"] = "spoiler.example.com", "Never", "Fail"
    webhook["timeoutSeconds"] = 20  # it answers from this process, whatever else that does
    webhook["clientConfig"] = {
        "caBundle": base64.b64encode(pair["ca.crt"]).decode(),
        "service": {"name": "spoiler", "namespace": NAMESPACE},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "spoiler", "namespace": NAMESPACE},
        "spec": {"ports": [{"name": "admission", "port": 443}]},
    }
    try:
        control_plane.apply(service)
        publish(control_plane, "spoiler", {"only": server.server_address[1]})
        control_plane.apply(configuration)
        yield
    finally:
        control_plane.kubectl("delete", configuration["kind"], "later-than-ours", check=False)
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_change_by_others_brings_the_replica_that_answered_back(
    control_plane: ControlPlane, replicas: list[Replica], spoiler: None
) -> None:
    """Another webhook, called after ours, takes our variable away: who injected is asked again (reinvocation)."""

    def calls_of(index: int) -> int:
        """How often that replica is asked about one pod, which has our variable in the end."""
        before = replicas[index].num_calls()
        pod = create(control_plane, pod_manifest(command=DEEPSEEK))
        assert "KVOFFLOAD_POOL" in {one["name"] for one in pod["spec"]["containers"][0]["env"]}
        return replicas[index].num_calls() - before

    wait_until(lambda: calls_of(0) == 2, "the API server to know the other webhook")
    replicas[0].process.send_signal(signal.SIGSTOP)
    try:
        durations = []
        for _ in range(3):  # waiting twice is never faster than two time-outs; a busy machine may be slow once
            started = time.monotonic()
            num_calls = calls_of(1)
            durations.append(time.monotonic() - started)
            assert num_calls == 2 or durations[-1] >= 2 * TIMEOUT_SECONDS
        assert min(durations) < 2 * TIMEOUT_SECONDS, "replica 0 is waited for once, not again"
    finally:
        replicas[0].process.send_signal(signal.SIGCONT)


def test_losing_either_replica_and_rotating_certificates_under_load_loses_no_injection(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    """Each replica is killed, stopped and ended by SIGTERM, while its endpoint stays, during two rotations."""
    services = ("kvoffload-webhook", *(replica.name for replica in replicas))
    names = tuple(f"{name}.{NAMESPACE}{suffix}" for name in services for suffix in (".svc", "", ".svc.cluster.local"))
    # one that is old enough to be renewed at once: promoting it is one rotation, renewing it the next
    aged = make_certificate(names, now=datetime.now(UTC) - timedelta(days=63), lifetime=timedelta(days=90))
    announced = {f"next-{name}": value for name, value in aged.items()}
    announced["announced-at"] = datetime.now(UTC).isoformat().encode()
    patch = {"data": {name: base64.b64encode(value).decode() for name, value in announced.items()}}
    serials: list[set[int]] = [{served_serial(replica)} for replica in replicas]

    async def lose(load: Load, index: int, sent: signal.Signals) -> None:
        """Create pods without that replica, then have it back."""
        replica = replicas[index]
        replica.process.send_signal(sent)
        if sent is signal.SIGSTOP:
            await wait_for_more(load, 20)
            replica.process.send_signal(signal.SIGCONT)
            return
        await asyncio.to_thread(replica.process.wait, 30)
        await wait_for_more(load, 200)
        replicas[index] = start_replica(
            control_plane, replica.name, port=replica.port, metrics_port=replica.metrics_port
        )
        await asyncio.to_thread(wait_until, lambda: is_serving(replicas[index]), f"{replica.name} to serve again")

    async def run() -> Load:
        load, until = Load(), asyncio.Event()
        task = asyncio.create_task(create_many(control_plane, load, until=until, at_least=3000, parallel=10))
        await asyncio.to_thread(
            control_plane.kubectl, "patch", "secret", SECRET, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch)
        )
        losses = [(index, sent) for sent in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM) for index in (0, 1)]
        deadline = time.monotonic() + 120
        while (losses or min(map(len, serials)) < 3) and time.monotonic() < deadline and not task.done():
            if losses:
                await lose(load, *losses.pop(0))
            for seen, replica in zip(serials, replicas, strict=True):
                seen.add(await asyncio.to_thread(served_serial, replica))
            await asyncio.sleep(0.5)
        until.set()
        await task
        assert not losses
        assert min(map(len, serials)) >= 3, "two rotations at each replica"
        return load

    load = asyncio.run(run())
    print(f"replicas lost and certificates rotated under load: {load}")
    assert (load.num_missed, load.num_failed) == (0, 0)
    assert load.num_injected >= 3000
    assert load.num_by_second >= 3 * 20, "while the first one was away"


EXPIRY, VALIDITY = (f"kvoffload_operator_certificate_{what}_seconds" for what in ("expiry_timestamp", "validity"))


def test_the_served_certificate_is_watched_by_metric_and_by_doctor(
    control_plane: ControlPlane, replicas: list[Replica]
) -> None:
    with listed_pods(control_plane, {replica.name: replica.metrics_port for replica in replicas}):
        ((where, end),) = certificates_for_doctor(control_plane).items()
        assert where == f"webhook/{NAMESPACE}/kvoffload"
        assert where not in expiring_for_doctor(control_plane, at=datetime.now(UTC))
        assert where in expiring_for_doctor(control_plane, at=end - timedelta(days=13))
    for replica in replicas:
        wait_until(lambda replica=replica: replica.metrics()[EXPIRY] == end.timestamp(), "its end")  # type: ignore[misc]
        assert replica.metrics()[VALIDITY] == pytest.approx(90 * 86400, abs=600)


def test_a_given_certificate_is_watched_and_its_end_takes_the_replica_out(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    def give(lifetime: timedelta) -> float:
        """The Secret as the kubelet mounts it; returns when it ends."""
        now = datetime.now(UTC)
        for name, value in make_certificate(("x.svc",), now=now, lifetime=lifetime).items():
            (tmp_path / f".{name}").write_bytes(value)
            (tmp_path / f".{name}").rename(tmp_path / name)
        return (now + lifetime).timestamp()

    def is_ready() -> bool:
        """Also before it listens at all."""
        try:
            return endpoints.readyz(replica.metrics_port)[0] == 200
        except URLError:
            return False

    ends = give(timedelta(seconds=40))  # more than a start takes on a busy machine
    replica = start_replica(
        control_plane,
        "kvoffload-webhook-given",
        port=free_port(),
        metrics_port=free_port(),
        certificate_mode="provided",
        certificate_dir=str(tmp_path),
    )
    try:
        wait_until(is_ready, "the replica to be ready")
        assert replica.metrics()[EXPIRY] == int(ends)
        wait_until(lambda: not is_ready(), "the certificate's end")
        assert time.time() >= int(ends)
        log = control_plane.folder / "kvoffload-webhook-given.log"
        wait_until(lambda: "no pod is injected until its issuer renews it" in log.read_text(), "the log to say so")
        give(timedelta(days=1))
        wait_until(is_ready, "the replica to be ready with a new one")
    finally:
        replica.process.terminate()
        replica.process.wait(20)
