"""Webhook processes that a real API server calls, and pods to ask them about; for the tests of the webhook, its
certificates, and of workloads of others whose pods it sees."""

import contextlib
import json
import socket
import ssl
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from urllib3.exceptions import InsecureRequestWarning

import endpoints
from e2e.control_plane import NAMESPACE, ControlPlane, free_port, render_chart, wait_until
from e2e.operator_pools import pool_manifest
from e2e.operator_process import operator_token, running_operator, start_process
from kvoffload.api.keys import INJECTED_ANNOTATION
from kvoffload.api.keys import WEBHOOK_REPLICA_ANNOTATION as REPLICA
from kvoffload_cli.checks.release import certificate_expires
from kvoffload_cli.facts import ClusterFacts
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observe import observe_cluster
from operator_builders import pod_manifest

DEEPSEEK = ["vllm", "serve", "deepseek-ai/DeepSeek-V3", "-tp", "8"]


@dataclass
class Replica:
    """One webhook process."""

    process: subprocess.Popen[bytes]
    name: str
    port: int
    metrics_port: int

    def metrics(self) -> dict[str, float]:
        return endpoints.samples(endpoints.scrape(self.metrics_port))

    def num_calls(self) -> int:
        """Pods that the API server asked it about."""
        return int(self.metrics()['kvoffload_operator_admission_duration_seconds_count{webhook="mutate-pods"}'])


@contextlib.contextmanager
def listed_pods(plane: ControlPlane, metrics_ports: Mapping[str, int]) -> Iterator[None]:
    """Pods of the webhook's Deployments with these names, as a kubelet reports them where the processes listen."""
    address = host_address()
    running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    for name, port in metrics_ports.items():
        template = plane.get("deployment", name, "-n", NAMESPACE)["spec"]["template"]
        (container,) = template["spec"]["containers"]
        container["ports"] = [{"name": "metrics", "containerPort": port}]
        metadata = {"name": name, "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
        plane.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
        patch = json.dumps({"status": running})
        plane.kubectl("patch", "pod", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", f"--patch={patch}")
    try:
        yield
    finally:
        plane.kubectl("delete", "pod", *metrics_ports, "-n", NAMESPACE, "--grace-period=0", "--force")


def certificates_for_doctor(plane: ControlPlane) -> dict[str, datetime]:
    """The serving certificates that doctor judges: where they are, and when they end."""
    return {one.where: one.not_after for one in _observe(plane, at=datetime.now(UTC)).serving_certificates}


def expiring_for_doctor(plane: ControlPlane, *, at: datetime) -> set[str]:
    """Where doctor finds certificates that end soon, if it looks at that time."""
    return {subject for _, subject, _, _ in certificate_expires(_observe(plane, at=at))}


def _observe(plane: ControlPlane, *, at: datetime) -> ClusterFacts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InsecureRequestWarning)  # the kubeconfig verifies nothing
        return observe_cluster(ClusterReader(kubeconfig=str(plane.kubeconfig)), now=at)


def host_address() -> str:
    """An address of this machine that is not loopback, which endpoints may not have."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def start_replica(plane: ControlPlane, name: str, *, port: int, metrics_port: int, **settings: str) -> Replica:
    kubeconfig = plane.write_kubeconfig(name, operator_token(plane, "kvoffload-webhook"))
    settings |= {"webhook_port": str(port), "metrics_port": str(metrics_port)}
    log = plane.folder / f"{name}.log"
    process = start_process(plane, "webhook", name, kubeconfig=kubeconfig, log=log, **settings)
    return Replica(process, name, port, metrics_port)


@contextlib.contextmanager
def serving_replicas(plane: ControlPlane) -> Iterator[list[Replica]]:
    """Two webhooks that the API server calls, with certificates by the operator, and a pool `main` to ask about."""
    services = [one for one in render_chart() if one["kind"] == "Service"]
    for service in services:
        plane.kubectl("delete", "service", service["metadata"]["name"], "-n", NAMESPACE)
        del service["spec"]["selector"]
    plane.apply(*services)
    configurations = [one for one in render_chart() if one["kind"].endswith("WebhookConfiguration")]
    plane.apply(*configurations)
    plane.apply(pool_manifest("main", nodeSelector={"nowhere": "yes"}))
    running: list[Replica] = []
    with running_operator(plane, "operator-w"):
        try:
            for name in ("kvoffload-webhook-0", "kvoffload-webhook-1"):
                replica = start_replica(plane, name, port=free_port(), metrics_port=free_port())
                running.append(replica)
                publish(plane, name, {"only": replica.port})
            publish(plane, "kvoffload-webhook", {"first": running[0].port, "second": running[1].port})
            for replica in running:
                wait_until(lambda replica=replica: is_serving(replica), f"{replica.name} to serve")  # type: ignore[misc]
            wait_until(
                lambda: annotations(plane).keys() & {INJECTED_ANNOTATION, REPLICA} == {INJECTED_ANNOTATION},
                "the first replica to answer",
            )
            yield running
        finally:
            for replica in running:
                replica.process.terminate()
                replica.process.wait(20)
            for configuration in configurations:
                plane.kubectl("delete", configuration["kind"], configuration["metadata"]["name"])
            plane.kubectl("delete", "kvpool", "main")


def annotations(plane: ControlPlane) -> dict[str, str]:
    """Of a new pod."""
    return dict(create(plane, pod_manifest(command=DEEPSEEK))["metadata"].get("annotations") or {})


def publish(
    plane: ControlPlane,
    service: str,
    ports: Mapping[str, int],
    *,
    namespace: str = NAMESPACE,
    port_name: str = "admission",
) -> None:
    """Endpoints of a Service: of each who listens, by its name, the port."""
    slices = [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{service}-of-{name}",
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [host_address()], "conditions": {"ready": True}}],
        }
        for name, port in ports.items()
    ]
    plane.apply(*slices)


def served_serial(replica: Replica) -> int:
    """Serial number of the certificate that a replica serves now."""
    pem = ssl.get_server_certificate((host_address(), replica.port), timeout=10)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def is_serving(replica: Replica) -> bool:
    try:
        served_serial(replica)
    except OSError:
        return False
    return True


def create(plane: ControlPlane, pod: dict[str, Any], *, namespace: str = "default") -> dict[str, Any]:
    """What the API server would store; nothing is stored."""
    manifest = {"apiVersion": "v1", "kind": "Pod", **pod}
    arguments = ["create", "--dry-run=server", "-n", namespace, "-o", "json", "-f", "-"]
    answer: dict[str, Any] = json.loads(plane.kubectl(*arguments, stdin=json.dumps(manifest)))
    return answer


def is_injected(pod: dict[str, Any]) -> bool:
    return "kvoffload.io/injected" in (pod["metadata"].get("annotations") or {})
