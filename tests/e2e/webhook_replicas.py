"""Webhook processes that a real API server calls, and pods to ask them about; for the tests of the webhook and its
certificates."""

import json
import socket
import ssl
import subprocess
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from urllib3.exceptions import InsecureRequestWarning

import endpoints
from e2e.control_plane import NAMESPACE, ControlPlane, operator_token, start_process
from kvoffload_cli.checks.release import certificate_expires
from kvoffload_cli.facts import ClusterFacts
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observe import observe_cluster

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


def publish(plane: ControlPlane, service: str, **ports: int) -> None:
    """Endpoints of a Service, by name of who listens."""
    slices = [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{service}-of-{name}",
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "ports": [{"name": "admission", "port": port, "protocol": "TCP"}],
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
