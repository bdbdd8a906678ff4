"""The webhook's serving certificate: made and rotated by the leader, or brought by cert-manager or the administrator.

Self-made, the Secret holds the state, and rotation has two steps so that no admission ever meets an untrusted
certificate:

    1. announce   a new CA and certificate are stored beside the present ones (`next-*`); caBundle = present + next
    2. promote    once the API servers have had time to see that bundle, next becomes present; previous stays trusted

The webhook's pods read the Secret and reload in place; whichever of the two they serve, it is trusted.
`plan_rotation` decides from what it is given, and makes keys and certificates where new ones are needed (OpenSSL loads
pairs from files only, so it writes them to a temporary folder to try them). `ensure_certificates` runs in the leader,
`CertificateWatch` in the webhook.
"""

import asyncio
import base64
import logging
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvoffload.api.keys import OPERATOR_FIELD_MANAGER
from kvoffload.errors import KVOffloadError
from kvoffload_operator import metrics
from kvoffload_operator.kube import DEPLOYMENTS, SECRETS, KubeClient, Resource

logger = logging.getLogger(__name__)

PRESENT = ("ca.crt", "tls.crt", "tls.key")
NEXT_PREFIX = "next-"
NEXT = tuple(f"{NEXT_PREFIX}{name}" for name in PRESENT)
PREVIOUS_CA = "previous-ca.crt"
ANNOUNCED_AT = "announced-at"
PROMOTE_AFTER = timedelta(seconds=15)
"""Time for every API server to see a new caBundle before a certificate that needs it is served."""
FOLLOW_SECONDS = 5.0
"""How often the webhook looks whether its source changed."""


UNREADABLE = (
    ValueError,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What reading a certificate raises that somebody else made."""


class CertificateUnusable(KVOffloadError):
    """There is no certificate, or key and certificate do not belong together."""


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """What to store and what to trust; `data` is None where the Secret stays."""

    data: Mapping[str, bytes] | None
    bundle: bytes
    recheck_after: timedelta
    expires_at: datetime
    step: str = "keep"


def make_certificate(dns_names: tuple[str, ...], *, now: datetime, lifetime: timedelta) -> dict[str, bytes]:
    """A new CA and a serving certificate signed by it; the CA's key is thrown away."""
    begins, ends = now - timedelta(minutes=5), now + lifetime
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvoffload-webhook-ca-{serial:x}"[:64])])
    ca = (
        x509.CertificateBuilder()
        .subject_name(ca_name)
        .issuer_name(ca_name)
        .public_key(ca_key.public_key())
        .serial_number(serial)
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_names[0][:64])]))
        .issuer_name(ca_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    return {
        "ca.crt": ca.public_bytes(serialization.Encoding.PEM),
        "tls.crt": leaf.public_bytes(serialization.Encoding.PEM),
        "tls.key": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _validity(pem: bytes) -> tuple[datetime, datetime]:
    certificate = x509.load_pem_x509_certificate(pem)
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _names(pem: bytes) -> frozenset[str]:
    extension = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return frozenset(extension.value.get_values_for_type(x509.DNSName))


def _usable_validity(
    stored: Mapping[str, bytes], prefix: str, dns_names: tuple[str, ...], now: datetime
) -> tuple[datetime, datetime] | None:
    """Begin and end of a stored pair that can be served now, None where it is missing, broken, foreign or over."""
    try:
        certificate, key, ca = (stored[f"{prefix}{name}"] for name in ("tls.crt", "tls.key", "ca.crt"))
        begins, ends = _validity(certificate)
        usable = begins <= now < ends and frozenset(dns_names) <= _names(certificate)
        _validity(ca)
        load_context(certificate, key)
    except (KeyError, CertificateUnusable, *UNREADABLE):
        return None
    return (begins, ends) if usable else None


def _announced_at(stored: Mapping[str, bytes], now: datetime) -> datetime | None:
    """When the next pair was announced, None where nobody can tell: no such time, or one that is yet to come."""
    try:
        announced = datetime.fromisoformat(stored[ANNOUNCED_AT].decode())
        return announced if announced <= now + PROMOTE_AFTER else None
    except (KeyError, ValueError, TypeError):  # TypeError: a time without a zone cannot be compared
        return None


def plan_rotation(
    stored: Mapping[str, bytes], *, dns_names: tuple[str, ...], now: datetime, lifetime: timedelta
) -> RotationPlan:
    """Decide from what the Secret holds; what is broken or foreign in it is replaced, a bad next pair dropped."""
    validity = _usable_validity(stored, "", dns_names, now)
    if validity is None:
        made = make_certificate(dns_names, now=now, lifetime=lifetime)
        bundle = _bundle(now, made["ca.crt"], stored.get("ca.crt"))
        return RotationPlan(made, bundle, PROMOTE_AFTER, now + lifetime, "make")
    begins, ends = validity
    following, announced = _usable_validity(stored, NEXT_PREFIX, dns_names, now), _announced_at(stored, now)
    if following is not None and announced is not None:
        left = announced + PROMOTE_AFTER - now
        if left > timedelta():
            return RotationPlan(None, _bundle(now, stored["ca.crt"], stored["next-ca.crt"]), left, ends, "announced")
        promoted = {name: stored[f"{NEXT_PREFIX}{name}"] for name in PRESENT} | {PREVIOUS_CA: stored["ca.crt"]}
        bundle = _bundle(now, promoted["ca.crt"], promoted[PREVIOUS_CA])
        return RotationPlan(promoted, bundle, PROMOTE_AFTER, following[1], "promote")
    renew_at = begins + (ends - begins) * 2 / 3
    if now >= renew_at:
        made = make_certificate(dns_names, now=now, lifetime=lifetime)
        data = dict(stored) | {f"{NEXT_PREFIX}{name}": value for name, value in made.items()}
        data[ANNOUNCED_AT] = now.isoformat().encode()
        return RotationPlan(data, _bundle(now, stored["ca.crt"], made["ca.crt"]), PROMOTE_AFTER, ends, "announce")
    bundle = _bundle(now, stored["ca.crt"], stored.get(PREVIOUS_CA))
    kept = {name: value for name, value in stored.items() if name not in (*NEXT, ANNOUNCED_AT)}
    if len(kept) < len(stored):
        return RotationPlan(kept, bundle, renew_at - now, ends, "drop a next certificate that cannot be used")
    return RotationPlan(None, bundle, renew_at - now, ends)


def _bundle(now: datetime, *cas: bytes | None) -> bytes:
    """CAs that are still valid, each once."""
    kept: dict[bytes, None] = {}
    for ca in cas:
        try:
            if ca and _validity(ca)[1] > now:
                kept[ca.strip() + b"\n"] = None
        except UNREADABLE:
            continue  # a foreign or broken CA is not worth trusting
    return b"".join(kept)


async def ensure_certificates(
    kube: KubeClient,
    *,
    namespace: str,
    secret: str,
    dns_names: tuple[str, ...],
    configurations: Iterable[tuple[Resource, str]],
    owner: Mapping[str, str],
    lifetime: timedelta,
    now: datetime,
) -> RotationPlan:
    """One pass of the leader: Secret and caBundle as planned."""
    found = await kube.get(SECRETS, secret, namespace)
    data = (found or {}).get("data") or {}
    stored = {key: base64.b64decode(value) for key, value in data.items()}
    plan = plan_rotation(stored, dns_names=dns_names, now=now, lifetime=lifetime)
    if plan.data is not None:
        logger.info("serving certificate: %s, valid until %s", plan.step, plan.expires_at.isoformat())
        encoded: dict[str, str | None] = {key: base64.b64encode(value).decode() for key, value in plan.data.items()}
        if found is None:
            await _require_owner(kube, owner, namespace)
            await kube.create(SECRETS, _secret(secret, namespace, owner) | {"data": encoded}, namespace)
        else:
            gone = dict.fromkeys(stored.keys() - plan.data.keys())
            await kube.merge_patch(SECRETS, secret, {"data": {**encoded, **gone}}, namespace=namespace)
    for resource, name in configurations:
        await ensure_bundle(kube, resource, name, plan.bundle)
    return plan


async def _require_owner(kube: KubeClient, owner: Mapping[str, str], namespace: str) -> None:
    """The Deployment that a Secret goes with is there and stays. One that is being deleted takes a new Secret along at
    once, and caBundle would name a certificate that nobody serves. Raises KVOffloadError."""
    metadata = (await kube.get(DEPLOYMENTS, owner["name"], namespace) or {}).get("metadata") or {}
    if metadata.get("uid") != owner["uid"] or "deletionTimestamp" in metadata:
        raise KVOffloadError(
            f"Deployment {namespace}/{owner['name']} is gone or goes: the webhook serves with what it has"
        )


def _secret(name: str, namespace: str, owner: Mapping[str, str]) -> dict[str, Any]:
    """The Secret's frame; it goes when the operator's Deployment goes."""
    owned_by = {"apiVersion": "apps/v1", "kind": "Deployment", "name": owner["name"], "uid": owner["uid"]}
    labels = {"app.kubernetes.io/name": "kvoffload", "app.kubernetes.io/component": "webhook"}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owned_by]},
        "type": "Opaque",
    }


async def ensure_bundle(kube: KubeClient, resource: Resource, name: str, bundle: bytes) -> None:
    """Set caBundle of every webhook of that configuration, and nothing else of it."""
    found = await kube.get(resource, name)
    configured = (found or {}).get("webhooks") or []  # somebody may have emptied it
    encoded = base64.b64encode(bundle).decode()
    if all(webhook["clientConfig"].get("caBundle") == encoded for webhook in configured):
        return
    webhooks = [{"name": webhook["name"], "clientConfig": {"caBundle": encoded}} for webhook in configured]
    await kube.apply(resource, {"metadata": {"name": name}, "webhooks": webhooks}, field_manager=OPERATOR_FIELD_MANAGER)


def load_context(certificate: bytes, key: bytes, context: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """A server context of this pair; a given context is reloaded in place, for handshakes from now on."""
    context = context or ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:  # OpenSSL's loader takes files only
        certificate_path, key_path = Path(folder, "tls.crt"), Path(folder, "tls.key")
        certificate_path.write_bytes(certificate)
        key_path.touch(mode=0o600)
        key_path.write_bytes(key)
        try:
            # with a password, OpenSSL asks nobody for one
            context.load_cert_chain(certificate_path, key_path, password="")
        except ssl.SSLError as error:
            raise CertificateUnusable(
                f"certificate and key do not load: {error}; needed a matching PEM pair"
            ) from error
    return context


class CertificateSource(Protocol):
    """Where the webhook reads its pair from."""

    async def read(self) -> tuple[bytes, bytes] | None:
        """Certificate and key in PEM, None if there are none yet."""


class SecretSource:
    """The leader's Secret, by the API server."""

    def __init__(self, kube: KubeClient, *, namespace: str, name: str) -> None:
        self._kube, self._namespace, self._name = kube, namespace, name

    async def read(self) -> tuple[bytes, bytes] | None:
        """Certificate and key."""
        secret = await self._kube.get(SECRETS, self._name, self._namespace)
        data = (secret or {}).get("data") or {}
        if "tls.crt" not in data or "tls.key" not in data:
            return None
        return base64.b64decode(data["tls.crt"]), base64.b64decode(data["tls.key"])


class FolderSource:
    """A mounted Secret: cert-manager's, or the administrator's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read(self) -> tuple[bytes, bytes] | None:
        """Certificate and key."""
        try:
            return (self._folder / "tls.crt").read_bytes(), (self._folder / "tls.key").read_bytes()
        except FileNotFoundError:
            return None


class CertificateWatch:
    """Keeps a server context at what the source holds."""

    def __init__(self, source: CertificateSource) -> None:
        self._source = source
        self._loaded: tuple[bytes, bytes] | None = None
        self._expires_at: datetime | None = None
        self.certificate: bytes | None = None
        """What is served now, in PEM, without what whoever gave it put beside it, its key perhaps; None before that."""

    def has_expired(self, now: datetime) -> bool:
        """Whether what is served has come to its end: the API server then calls nobody with it."""
        return self._expires_at is not None and now >= self._expires_at

    async def wait(self) -> ssl.SSLContext:
        """Wait for the first pair."""
        while True:
            context = await self.refresh(None)
            if context is not None:
                return context
            await asyncio.sleep(1.0)

    async def follow(self, context: ssl.SSLContext) -> None:
        """Reload in place whenever the source changes; runs until cancelled."""
        said: datetime | None = None
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            await self.refresh(context)
            if self.has_expired(utc_now()) and said != self._expires_at:
                said = self._expires_at
                logger.error("the serving certificate ended at %s: no pod is injected until its issuer renews it", said)

    async def refresh(self, context: ssl.SSLContext | None) -> ssl.SSLContext | None:
        """Load what the source holds now if it is new; a bad or unreachable source keeps what is served."""
        try:
            pair = await self._source.read()
            if pair is None or pair == self._loaded:
                return context
            context = load_context(*pair, context)
            begins, self._expires_at = _validity(pair[0])
            self.certificate = x509.load_pem_x509_certificate(pair[0]).public_bytes(serialization.Encoding.PEM)
        except Exception as error:  # noqa: BLE001 -- whatever the source holds, what is served stays served
            words = f"{type(error).__name__}: {error}"
            logger.warning("serving certificate not read, the present one stays: %.500s", words)
            return context
        self._loaded = pair
        metrics.certificate_expiry_timestamp_seconds.set(self._expires_at.timestamp())
        metrics.certificate_validity_seconds.set((self._expires_at - begins).total_seconds())
        logger.info("serving a certificate that is valid until %s", self._expires_at)
        return context


def utc_now() -> datetime:
    """The wall clock, which certificates are about."""
    return datetime.now(UTC)
