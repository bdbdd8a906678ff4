"""From webhook configurations, secrets and CRDs to facts: certificates are parsed and compared here. For `observe`."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from kvoffload.api import keys
from kvoffload.api.schema import fields_only_in
from kvoffload_cli.facts import CertificateFacts, CRDFacts, WebhookFacts

Manifest = Mapping[str, Any]

CERTIFICATE_VARIABLE = "KVOFFLOAD_CERTIFICATE_SECRET"
"""Of operator and webhook, set by the chart whatever the certificates' mode."""


def webhook_facts(configuration: Manifest, *, kind: str, serving: Sequence[x509.Certificate]) -> Iterable[WebhookFacts]:
    """Every webhook of one configuration, and whether it trusts one of the serving certificates."""
    name = configuration["metadata"]["name"]
    for webhook in configuration.get("webhooks", []):
        service = webhook["clientConfig"].get("service", {})
        authorities = load_certificates(webhook["clientConfig"].get("caBundle", ""))
        yield WebhookFacts(
            configuration=name,
            kind=kind,
            service=f"{service.get('namespace', '')}/{service.get('name', '')}",
            authorities=tuple(certificate_facts(one, where=f"caBundle of {name}") for one in authorities),
            trusts_serving=any(is_signed_by(one, authority) for one in serving for authority in authorities)
            if serving
            else None,
        )


def certificate_secret_paths(deployments: Iterable[Manifest]) -> list[str]:
    """API paths of the Secrets that the webhook's Deployments serve from, whoever made them."""
    names = {
        (deployment["metadata"]["namespace"], variable["value"])
        for deployment in deployments
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env", [])
        if variable["name"] == CERTIFICATE_VARIABLE
    }
    return [f"/api/v1/namespaces/{namespace}/secrets/{name}" for namespace, name in sorted(names)]


def serving_certificate(secret: Manifest) -> tuple[str, x509.Certificate | None]:
    """The secret's name and the certificate that it serves; None where it holds none, or an authority's."""
    where = f"secret {secret['metadata']['namespace']}/{secret['metadata']['name']}"
    first = next(iter(load_certificates((secret.get("data") or {}).get("tls.crt", ""))), None)
    return where, None if first is None or is_authority(first) else first


def load_certificates(base64_pem: str) -> list[x509.Certificate]:
    """The certificates of a PEM bundle; an unreadable one is empty, which the checks report as missing."""
    pem = base64.b64decode(base64_pem)
    try:
        return x509.load_pem_x509_certificates(pem) if pem.strip() else []
    except ValueError:
        return []


def certificate_facts(certificate: x509.Certificate, *, where: str) -> CertificateFacts:
    """What the checks ask of a certificate."""
    return CertificateFacts(
        where=where, not_before=certificate.not_valid_before_utc, not_after=certificate.not_valid_after_utc
    )


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether it may sign others."""
    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority's key signed the certificate, or it is the same certificate."""
    if certificate == authority:
        return True
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def crd_facts(expected: Manifest, installed: Manifest | None) -> CRDFacts:
    """An installed CRD beside the one of this version."""
    name = expected["metadata"]["name"]
    version = next(
        (one for one in (installed or {}).get("spec", {}).get("versions", []) if one["name"] == keys.VERSION), None
    )
    return CRDFacts(
        name=name,
        is_established=installed is not None and has_condition(installed.get("status", {}), "Established"),
        serves_version=bool(version and version.get("served")),
        missing_fields=tuple(fields_only_in(expected, installed or {})),
    )


def has_condition(status: Manifest, kind: str) -> bool:
    """Whether the condition is True."""
    return any(one["type"] == kind and one["status"] == "True" for one in status.get("conditions", []))
