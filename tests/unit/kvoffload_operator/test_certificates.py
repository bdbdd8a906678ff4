"""Rotation in two steps: at every moment, whatever is served is trusted."""

import asyncio
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from kvoffload_operator import metrics
from kvoffload_operator.webhook.certificates import (
    ANNOUNCED_AT,
    NEXT,
    PRESENT,
    PREVIOUS_CA,
    PROMOTE_AFTER,
    CertificateUnusable,
    CertificateWatch,
    FolderSource,
    load_context,
    make_certificate,
    plan_rotation,
)

NAMES = ("kvoffload-webhook.kvoffload-system.svc",)
LIFETIME = timedelta(days=90)
START = datetime.now(UTC)


def plan(stored: dict[str, bytes], now: datetime = START, lifetime: timedelta = LIFETIME):  # type: ignore[no-untyped-def]
    return plan_rotation(stored, dns_names=NAMES, now=now, lifetime=lifetime)


def trusts(bundle: bytes, pair: dict[str, bytes], prefix: str = "") -> bool:
    """A real handshake: does a client with this bundle accept a server with this pair?"""
    server = load_context(pair[f"{prefix}tls.crt"], pair[f"{prefix}tls.key"])
    client = ssl.create_default_context(cadata=bundle.decode())
    left, right = socket.socketpair()

    def serve() -> None:
        with left:
            try:
                with server.wrap_socket(left, server_side=True) as wrapped:
                    wrapped.recv(1)
            except OSError:
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with right, client.wrap_socket(right, server_hostname=NAMES[0]) as wrapped:
            wrapped.send(b"x")
        return True
    except ssl.SSLError:
        return False
    finally:
        right.close()
        thread.join()


def test_an_empty_secret_gets_a_certificate_that_its_bundle_trusts() -> None:
    made = plan({})
    assert made.step == "make"
    assert trusts(made.bundle, dict(made.data))


def test_a_certificate_in_its_first_two_thirds_stays() -> None:
    stored = dict(plan({}).data)
    kept = plan(stored, START + LIFETIME * 0.6)
    assert kept.data is None
    assert kept.bundle.strip() == stored["ca.crt"].strip()
    assert kept.recheck_after > timedelta()


def test_rotation_announces_waits_and_promotes_and_every_pair_is_trusted_all_the_while() -> None:
    # lifetimes long enough that real handshakes at the machine's clock hold in all steps
    stored = dict(plan({}, START - LIFETIME * 0.7).data)
    announced = plan(stored, START)
    assert announced.step == "announce"
    assert announced.data is not None
    assert {name: announced.data[name] for name in PRESENT} == stored, "what is served stays"
    both = dict(announced.data)
    assert trusts(announced.bundle, both)
    assert trusts(announced.bundle, both, "next-")

    waiting = plan(both, START + PROMOTE_AFTER / 2)
    assert (waiting.step, waiting.data) == ("announced", None)
    assert waiting.bundle == announced.bundle
    assert waiting.recheck_after == PROMOTE_AFTER / 2

    promoted = plan(both, START + PROMOTE_AFTER)
    assert promoted.step == "promote"
    assert promoted.data is not None
    assert {name: promoted.data[name] for name in PRESENT} == {name: both[f"next-{name}"] for name in PRESENT}
    assert not set(NEXT) & set(promoted.data)
    assert trusts(promoted.bundle, dict(promoted.data))
    assert trusts(promoted.bundle, stored), "a replica that has not read the new one yet is trusted still"
    assert promoted.data[PREVIOUS_CA] == stored["ca.crt"]


def test_a_previous_ca_is_trusted_until_it_expires() -> None:
    old = make_certificate(NAMES, now=START - LIFETIME, lifetime=timedelta(days=1))
    stored = dict(plan({}).data) | {PREVIOUS_CA: old["ca.crt"]}
    assert plan(stored).bundle.count(b"BEGIN CERTIFICATE") == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"tls.crt": b"junk", "tls.key": b"junk", "ca.crt": b"junk"},
        {"tls.crt": b"", "tls.key": b"", "ca.crt": b""},
        {**make_certificate(NAMES, now=START, lifetime=LIFETIME), "tls.key": b"junk"},
        make_certificate(("another.svc",), now=START, lifetime=LIFETIME),
        make_certificate(NAMES, now=START - timedelta(days=365), lifetime=LIFETIME),
    ],
    ids=["junk", "empty", "key", "name", "expired"],
)
def test_what_cannot_be_served_is_made_anew(broken: dict[str, bytes]) -> None:
    made = plan(broken)
    assert made.step == "make"
    assert trusts(made.bundle, dict(made.data))


def announced(at: bytes | None, **changes: bytes) -> dict[str, bytes]:
    """A pair and its next one, announced then; `changes` are of the next one."""
    following = make_certificate(NAMES, now=START, lifetime=LIFETIME)
    stored = dict(plan({}).data) | {f"next-{name}": value for name, value in following.items()}
    stored |= {f"next-{name.replace('_', '.')}": value for name, value in changes.items()}
    return stored if at is None else stored | {ANNOUNCED_AT: at}


THEN = START.isoformat().encode()


@pytest.mark.parametrize(
    "stored",
    [
        announced(None),
        announced(b"yesterday"),
        announced(b"\xff"),
        announced(START.replace(tzinfo=None).isoformat().encode()),
        announced(b"9999-12-31T23:59:59+00:00"),
        announced(THEN, tls_crt=b"junk"),
        announced(THEN, tls_key=b"junk"),
        announced(THEN, ca_crt=b"junk"),
        announced(THEN, **{"tls_crt": make_certificate(("other.svc",), now=START, lifetime=LIFETIME)["tls.crt"]}),
    ],
    ids=["no time", "text", "bytes", "no zone", "never", "certificate", "key", "ca", "name"],
)
@pytest.mark.parametrize("after", [timedelta(), PROMOTE_AFTER * 2])
def test_a_next_pair_that_cannot_be_used_is_dropped_and_the_present_one_stays(
    stored: dict[str, bytes], after: timedelta
) -> None:
    made = plan(stored, START + after)
    assert made.data == {name: stored[name] for name in PRESENT}
    assert made.step == "drop a next certificate that cannot be used"
    assert trusts(made.bundle, stored)
    assert plan(dict(made.data), START + after).step == "keep"
    renewed = plan(stored, START + LIFETIME * 0.7)
    assert renewed.step == "announce", "a new one in its place"


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it() -> None:
    pair = make_certificate(NAMES, now=START, lifetime=LIFETIME)
    key = serialization.load_pem_private_key(pair["tls.key"], None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    with pytest.raises(CertificateUnusable, match="do not load"):
        load_context(pair["tls.crt"], locked)


def test_a_key_of_another_certificate_is_refused() -> None:
    first, second = (make_certificate(NAMES, now=START, lifetime=LIFETIME) for _ in range(2))
    with pytest.raises(CertificateUnusable, match="do not load"):
        load_context(first["tls.crt"], second["tls.key"])


def test_a_changed_folder_is_served_without_a_restart_and_a_broken_one_is_not(tmp_path: Path) -> None:
    first, second = (make_certificate(NAMES, now=START, lifetime=LIFETIME) for _ in range(2))

    def write(pair: dict[str, bytes]) -> None:
        (tmp_path / "tls.crt").write_bytes(pair["tls.crt"])
        (tmp_path / "tls.key").write_bytes(pair["tls.key"])

    async def run() -> None:
        watch = CertificateWatch(FolderSource(tmp_path))
        assert await watch.refresh(None) is None, "nothing there yet"
        write(first)
        context = await watch.wait()
        assert peer_of(context) == der(first)
        write(second)
        assert await watch.refresh(context) is context, "reloaded in place"
        assert peer_of(context) == der(second)
        (tmp_path / "tls.key").write_bytes(b"junk")
        await watch.refresh(context)
        assert peer_of(context) == der(second), "what worked stays"

    asyncio.run(run())


async def test_what_is_served_is_watched_whoever_made_it(tmp_path: Path) -> None:
    """By the metrics that the alert reads, and by the pod's readiness once it has ended."""
    pair = make_certificate(NAMES, now=START, lifetime=LIFETIME)
    (tmp_path / "tls.crt").write_bytes(pair["tls.crt"])
    (tmp_path / "tls.key").write_bytes(pair["tls.key"])
    watch = CertificateWatch(FolderSource(tmp_path))
    assert not watch.has_expired(START), "there is none"
    await watch.wait()
    (end,) = metrics.certificate_expiry_timestamp_seconds.collect()[0].samples
    (validity,) = metrics.certificate_validity_seconds.collect()[0].samples
    assert end.value == int((START + LIFETIME).timestamp())
    assert validity.value == pytest.approx((LIFETIME + timedelta(minutes=5)).total_seconds(), abs=1)
    assert not watch.has_expired(START + LIFETIME - timedelta(seconds=2))
    assert watch.has_expired(START + LIFETIME)


@pytest.mark.parametrize("order", [("tls.crt", "ca.crt", "tls.key"), ("tls.key", "tls.crt", "ca.crt")])
async def test_what_is_told_to_everybody_is_the_certificate_alone(tmp_path: Path, order: tuple[str, ...]) -> None:
    pair = make_certificate(NAMES, now=START, lifetime=LIFETIME)
    (tmp_path / "tls.crt").write_bytes(b"".join(pair[part] for part in order))  # as who keeps all in one file gives it
    (tmp_path / "tls.key").write_bytes(pair["tls.key"])
    watch = CertificateWatch(FolderSource(tmp_path))
    assert watch.certificate is None
    await watch.wait()
    assert watch.certificate == pair["tls.crt"]


def der(pair: dict[str, bytes]) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair["tls.crt"].decode())


def peer_of(server: ssl.SSLContext) -> bytes | None:
    """The certificate that a new client sees."""
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    there, back = client.wrap_bio(incoming, outgoing), server.wrap_bio(outgoing, incoming, server_side=True)
    for side in (there, back, there, back):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return there.getpeercert(binary_form=True)
