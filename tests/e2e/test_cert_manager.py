"""The chart's mode cert-manager, with cert-manager: it issues and renews, our webhook serves that, pods are injected.

A control plane without kubelets. The test is the kubelet of the webhook's pods: it writes the Secret into the folder
that the Deployment mounts, and the endpoints. cert-manager is built the first time (hack/cert_manager).
"""

import base64
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

import endpoints
from e2e.control_plane import NAMESPACE, ControlPlane, free_port, render_chart, running_control_plane, wait_until
from e2e.operator_pools import condition, pool_manifest
from e2e.operator_process import operator_token, running_operator
from e2e.webhook_replicas import (
    DEEPSEEK,
    certificates_for_doctor,
    create,
    host_address,
    is_injected,
    listed_pods,
    publish,
)
from hack.cert_manager.program import PROGRAM, cert_manager_crds
from hack.cluster.programs import ensure_program
from operator_builders import pod_manifest

pytestmark = [pytest.mark.e2e, pytest.mark.long]

VALUES = (
    "webhook.certificates.mode=cert-manager",
    "webhook.certificates.issuerRef.name=company-ca",
    "webhook.certificates.issuerRef.kind=Issuer",
)
ISSUERS = f"""
apiVersion: cert-manager.io/v1
kind: Issuer
metadata: {{name: self-signed, namespace: {NAMESPACE}}}
spec: {{selfSigned: {{}}}}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {{name: company-ca, namespace: {NAMESPACE}}}
spec:
  isCA: true
  commonName: company-ca
  secretName: company-ca
  privateKey: {{algorithm: ECDSA, size: 256}}
  issuerRef: {{name: self-signed, kind: Issuer}}
---
apiVersion: cert-manager.io/v1
kind: Issuer
metadata: {{name: company-ca, namespace: {NAMESPACE}}}
spec: {{ca: {{secretName: company-ca}}}}
"""
Object = dict[str, Any]


@dataclass
class Webhook:
    """One replica's process, and the folder that stands for its mounted Secret."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    tls: Path

    def metrics(self) -> dict[str, float]:
        return endpoints.samples(endpoints.scrape(self.metrics_port))

    @property
    def served(self) -> x509.Certificate:
        """The certificate that it serves now."""
        pem = ssl.get_server_certificate((host_address(), self.port), timeout=10)
        return x509.load_pem_x509_certificate(pem.encode())


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with cert-manager, an issuer, and the chart as it is, webhook configurations included."""
    program = ensure_program(PROGRAM)
    with running_control_plane(tmp_path_factory.mktemp("cert-manager")) as running:
        for crd in cert_manager_crds():
            running.kubectl("apply", "--server-side", "-f", str(crd))
        running.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        running.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        running.apply(ISSUERS)
        crds = [one for one in render_chart(*VALUES) if one["kind"] == "CustomResourceDefinition"]
        running.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(crds))
        running.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        with (running.folder / "cert-manager.log").open("wb") as log:
            command = [str(program), f"--kubeconfig={running.kubeconfig}", f"--cluster-resource-namespace={NAMESPACE}"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            running.apply(*(one for one in render_chart(*VALUES) if one not in crds))
            yield running
        finally:
            process.terminate()
            process.wait(20)


def certificate(plane: ControlPlane) -> Object:
    (found,) = (one for one in plane.get("certificates", "-n", NAMESPACE)["items"] if "dnsNames" in one["spec"])
    return dict(found)


def is_ready(one: Object) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in one.get("status", {}).get("conditions", [])
    )


def secret_of(plane: ControlPlane) -> dict[str, bytes]:
    found = plane.find("secret", certificate(plane)["spec"]["secretName"], "-n", NAMESPACE) or {}
    return {name: base64.b64decode(value) for name, value in found.get("data", {}).items()}


def mount(plane: ControlPlane, folder: Path) -> None:
    """What the kubelet does with a Secret that changed."""
    folder.mkdir(exist_ok=True)
    for name, value in secret_of(plane).items():
        (folder / f".{name}").write_bytes(value)
        (folder / f".{name}").rename(folder / name)


@pytest.fixture(scope="module")
def webhooks(plane: ControlPlane) -> Iterator[list[Webhook]]:
    """A process for every Deployment of the webhook, with its settings, behind the Services that select its pods."""
    wait_until(lambda: is_ready(certificate(plane)), "the Certificate to be Ready")
    objects = render_chart(*VALUES)
    deployments = [one for one in objects if one["kind"] == "Deployment" and "webhook" in one["metadata"]["name"]]
    services = [one for one in objects if one["kind"] == "Service" and "webhook" in one["metadata"]["name"]]
    running: list[Webhook] = []
    try:
        for deployment in deployments:
            running.append(start(plane, deployment, services))
        yield running
    finally:
        for one in running:
            one.process.terminate()
            one.process.wait(20)


def start(plane: ControlPlane, deployment: Object, services: list[Object]) -> Webhook:
    name, template = deployment["metadata"]["name"], deployment["spec"]["template"]
    tls, port, metrics_port = plane.folder / f"{name}-tls", free_port(), free_port()
    mount(plane, tls)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVOFFLOAD_")}
    environment |= {one["name"]: one["value"] for one in template["spec"]["containers"][0]["env"] if "value" in one}
    environment |= {
        "KUBECONFIG": str(plane.write_kubeconfig(name, operator_token(plane, template["spec"]["serviceAccountName"]))),
        "KVOFFLOAD_POD_NAME": name,
        "KVOFFLOAD_WEBHOOK_PORT": str(port),
        "KVOFFLOAD_METRICS_PORT": str(metrics_port),
        "KVOFFLOAD_CERTIFICATE_DIR": str(tls),
    }
    command = [sys.executable, "-m", "kvoffload_operator", "webhook"]
    with (plane.folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=plane.folder)
    for service in services:
        if service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
            publish(plane, service["metadata"]["name"], {name: port})
    return Webhook(name, process, port, metrics_port, tls)


def bundles(plane: ControlPlane) -> set[bytes]:
    """The CAs that the API server trusts for our webhooks."""
    configurations = [
        *plane.get("mutatingwebhookconfigurations")["items"], *plane.get("validatingwebhookconfigurations")["items"]
    ]  # fmt: skip
    webhooks = [webhook for one in configurations for webhook in one["webhooks"]]
    return {base64.b64decode(webhook["clientConfig"].get("caBundle", "")) for webhook in webhooks}


def test_cert_manager_fills_the_secret_and_its_injector_the_ca_bundles(plane: ControlPlane) -> None:
    wait_until(lambda: is_ready(certificate(plane)), "the Certificate to be Ready")
    secret = secret_of(plane)
    assert {"ca.crt", "tls.crt", "tls.key"} <= set(secret)
    names = x509.load_pem_x509_certificate(secret["tls.crt"]).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert set(names.value.get_values_for_type(x509.DNSName)) == set(certificate(plane)["spec"]["dnsNames"])
    wait_until(lambda: bundles(plane) == {secret["ca.crt"]}, "the CA in every webhook configuration")


def test_our_webhook_serves_it_pods_are_injected_and_pools_checked(
    plane: ControlPlane, webhooks: list[Webhook]
) -> None:
    wait_until(lambda: all(is_serving(one) for one in webhooks), "the webhooks to serve")
    issued = x509.load_pem_x509_certificate(secret_of(plane)["tls.crt"])
    assert {one.served.serial_number for one in webhooks} == {issued.serial_number}
    end = issued.not_valid_after_utc
    expiry = "kvoffload_operator_certificate_expiry_timestamp_seconds"
    assert {one.metrics()[expiry] for one in webhooks} == {end.timestamp()}
    with listed_pods(plane, {one.name: one.metrics_port for one in webhooks}):
        assert certificates_for_doctor(plane) == {f"webhook/{NAMESPACE}/kvoffload": end}
    with running_operator(plane, certificate_mode="cert-manager"):
        plane.apply(pool_manifest("main", nodeSelector={"nowhere": "yes"}))
        wait_until(lambda: is_injected(create(plane, pod_manifest(command=DEEPSEEK))), "a pod to be injected")
        # nobody runs the Deployment's pods here; that the CA is there is what the operator can see of cert-manager
        wait_until(
            lambda: condition(plane, "main", "InjectionReady")["reason"] == "WebhookUnavailable",
            "the operator to find the CA in place and no pod",
        )
    observing = json.dumps(pool_manifest("observing", mode="Observe"))
    answer = plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=observing, check=False)
    assert "spec.mode Observe makes nothing" in answer, "the webhook for pools is called with the same certificate"


def test_a_renewed_certificate_is_served_without_a_restart_and_no_pod_misses_it(
    plane: ControlPlane, webhooks: list[Webhook]
) -> None:
    plane.apply(pool_manifest("main", nodeSelector={"nowhere": "yes"}))
    before = {one.served.serial_number for one in webhooks}
    one, now = certificate(plane), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    issuing = {
        "type": "Issuing",
        "status": "True",
        "reason": "Test",
        "message": "as cmctl renew",
        "lastTransitionTime": now,
    }
    status = {"conditions": [*one["status"]["conditions"], issuing]}
    plane.kubectl(
        "patch", "certificate", one["metadata"]["name"], "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p",
        json.dumps({"status": status}),
    )  # fmt: skip

    def renewed() -> bool:
        for webhook in webhooks:
            mount(plane, webhook.tls)
        assert is_injected(create(plane, pod_manifest(command=DEEPSEEK)))
        return before.isdisjoint(webhook.served.serial_number for webhook in webhooks)

    wait_until(renewed, "every replica to serve the renewed certificate")
    assert all(webhook.process.poll() is None for webhook in webhooks)


def is_serving(webhook: Webhook) -> bool:
    try:
        return webhook.served is not None
    except OSError:
        return False
