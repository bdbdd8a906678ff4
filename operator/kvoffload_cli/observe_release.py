"""From webhook configurations, certificates and CRDs to facts. For `observe`."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from kvoffload.api import keys
from kvoffload.api.schema import fields_only_in
from kvoffload_cli.facts import CertificateFacts, CRDFacts, WebhookFacts

Manifest = Mapping[str, Any]

Release = tuple[str, str]
"""Namespace and name of a release of the chart."""
MAX_PEM_CHARACTERS = 64 << 10
"""Of what a pod says that it serves."""


def webhook_facts(
    configuration: Manifest, *, kind: str, serving: Mapping[Release, Sequence[x509.Certificate]]
) -> Iterable[WebhookFacts]:
    """Every webhook of one configuration, and whether it trusts what its release serves."""
    name = configuration["metadata"]["name"]
    for webhook in configuration.get("webhooks", []):
        service = webhook["clientConfig"].get("service", {})
        authorities = trusted_authorities(webhook)
        served = serving.get((service.get("namespace", ""), release_of(configuration)), ())
        yield WebhookFacts(
            configuration=name,
            kind=kind,
            service=f"{service.get('namespace', '')}/{service.get('name', '')}",
            authorities=tuple(certificate_facts(one, where=f"caBundle of {name}") for one in authorities),
            trusts_serving=all(any(is_signed_by(one, authority) for authority in authorities) for one in served)
            if served
            else None,
        )


def release_of(manifest: Manifest) -> str:
    """The release that an object of the chart is of."""
    return str((manifest["metadata"].get("labels") or {}).get("app.kubernetes.io/instance", ""))


def served_certificate(pem: str) -> x509.Certificate | None:
    """The first of what the webhook serves; None where it is none, or an authority's."""
    first = next(iter(load_certificates(pem[:MAX_PEM_CHARACTERS].encode())), None)
    return None if first is None or is_authority(first) else first


def trusted_authorities(webhook: Manifest) -> list[x509.Certificate]:
    """Whom the API server trusts when it calls this webhook."""
    return load_certificates(base64.b64decode(webhook["clientConfig"].get("caBundle", "")))


def load_certificates(pem: bytes) -> list[x509.Certificate]:
    """The certificates of a PEM bundle; an unreadable one is empty, which the checks report as missing."""
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
