"""Objects as nobody expects them, by an older CRD, by hand or by another program: the operator says what is wrong with
each, goes on with all others, and its process lives."""

import base64
import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from e2e.control_plane import NAMESPACE, ControlPlane, free_port, wait_until
from e2e.operator_pools import QUICK, condition, events_of, leftovers, make_ready, pool_manifest
from e2e.operator_process import checked_metrics, running_operator
from kvoffload.api.schema import build_crds
from kvoffload_operator.events import EventRecorder, Regarding
from kvoffload_operator.kube import KubeClient
from kvoffload_operator.webhook.certificates import NEXT, make_certificate

pytestmark = pytest.mark.e2e

SECRET = "kvoffload-webhook-tls"
CONFIGURATION = "kvoffload-webhook-0"


@contextlib.contextmanager
def crds_without_rules(plane: ControlPlane) -> Iterator[None]:
    """The CRDs let everything in that has the right types; this version's come back afterwards."""

    def apply(crds: list[dict[str, Any]]) -> None:
        arguments = ["apply", "--server-side", "--force-conflicts", "--field-manager=kvoffload-operator", "-f", "-"]
        plane.kubectl(*arguments, stdin=yaml.safe_dump_all(json.loads(json.dumps(crds))))

    def without_rules(schema: Any) -> Any:
        if isinstance(schema, dict):
            return {k: without_rules(v) for k, v in schema.items() if k != "x-kubernetes-validations"}
        return [without_rules(one) for one in schema] if isinstance(schema, list) else schema

    apply([without_rules(crd) for crd in build_crds().values()])
    try:
        yield
    finally:
        apply(list(build_crds().values()))


def takes(plane: ControlPlane, manifest: dict[str, Any]) -> bool:
    """Whether the API server lets this object in."""
    said = plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    return "(server dry run)" in said


def test_pools_that_cannot_be_say_so_and_another_becomes_ready(control_plane: ControlPlane) -> None:
    """Of each the operator would write what the API server or its own models refuse."""
    odd: dict[str, tuple[dict[str, Any], str]] = {
        "too-large": ({"capacity": "4Ei"}, "more than 1152921504606846976 (1Ei)"),
        "o" * 41: ({}, "of at most 40 characters, it has 41"),
        "intolerant": ({"tolerations": [{"operator": "Exists", "value": "x"}]}, "spec.tolerations[0].value"),
    }
    port = free_port()
    with running_operator(control_plane, "odd-pools", apply_crds="false", metrics_port=str(port), **QUICK) as operator:
        with crds_without_rules(control_plane):
            too_large = pool_manifest("too-large", capacity="4Ei")
            wait_until(lambda: takes(control_plane, too_large), "the API server to know the CRD without rules")
            control_plane.apply(*(pool_manifest(name, **spec) for name, (spec, _) in odd.items()))
            control_plane.apply(pool_manifest("good"))
            make_ready(control_plane, "good")
            for name, (_, message) in odd.items():
                wait_until(
                    lambda name=name: condition(control_plane, name, "Ready")["reason"] == "InvalidSpec",  # type: ignore[misc]
                    f"{name} to be called invalid",
                )
                assert message in condition(control_plane, name, "Ready")["message"]
            control_plane.kubectl("delete", "kvpool", "good", *odd)
            wait_until(lambda: not leftovers(control_plane, ["good", *odd]), "everything of them to be gone")
        assert operator.process.poll() is None, operator.log.read_text()[-2000:]
        unexpected = [value for name, value in checked_metrics(port).items() if "unexpected_errors_total" in name]
        assert unexpected
        assert sum(unexpected) == 0


@pytest.mark.parametrize("capacity", ["4Ei", "9Ei", 2**62])
def test_the_api_server_refuses_a_capacity_that_no_region_can_hold(control_plane: ControlPlane, capacity: Any) -> None:
    manifest = yaml.safe_dump(pool_manifest("too-large", capacity=capacity))
    answer = control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=manifest, check=False)
    assert "is more than 1Ei, the most that a node can give: lower capacity" in answer


def test_the_largest_capacity_is_taken(control_plane: ControlPlane) -> None:
    for capacity in ("1Ei", 2**60):
        manifest = yaml.safe_dump(pool_manifest("largest", capacity=capacity))
        control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=manifest)


def test_a_secret_and_a_configuration_that_somebody_spoiled_are_mended_or_said(control_plane: ControlPlane) -> None:
    """The next certificate is garbage and has no time, the configuration has no webhook any more."""
    emptied = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": [],
    }
    names = tuple(
        f"{service}.{NAMESPACE}{suffix}"
        for service in ("kvoffload-webhook", "kvoffload-webhook-0", "kvoffload-webhook-1")
        for suffix in (".svc", "", ".svc.cluster.local")
    )
    present = make_certificate(names, now=datetime.now(UTC), lifetime=timedelta(days=90))
    data = present | dict.fromkeys(NEXT, b"junk")
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": NAMESPACE},
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }

    def injection() -> str:
        return str(condition(control_plane, "certified", "InjectionReady").get("message"))

    control_plane.kubectl("delete", "secret", SECRET, "-n", NAMESPACE, "--ignore-not-found")
    control_plane.apply(emptied, secret, pool_manifest("certified", nodeSelector={"nowhere": "yes"}))
    try:
        with running_operator(control_plane, "spoiled", **QUICK) as operator:
            wait_until(lambda: "no webhooks any more" in injection(), "the emptied configuration to be said")
            kept = control_plane.get("secret", SECRET, "-n", NAMESPACE)["data"]
            assert kept == {name: secret["data"][name] for name in present}  # type: ignore[index]
            assert operator.process.poll() is None, operator.log.read_text()[-2000:]
            control_plane.kubectl("delete", "kvpool", "certified")
            wait_until(lambda: not leftovers(control_plane, ["certified"]), "everything of the pool to go")
    finally:
        control_plane.kubectl("delete", "secret", SECRET, "-n", NAMESPACE, "--ignore-not-found")
        control_plane.kubectl("delete", "mutatingwebhookconfiguration", CONFIGURATION)


async def test_the_api_server_takes_events_of_long_names_and_long_notes(control_plane: ControlPlane) -> None:
    kube = await KubeClient.connect(user_agent="test", kubeconfig=str(control_plane.kubeconfig))
    try:
        for number, name in enumerate(("a" * 199 + "-b", "b" * 199 + ".c", "c" * 253)):
            regarding = Regarding.pod("default", name, f"uid-{number}")
            await EventRecorder(kube, instance="test").record(
                regarding, reason="Injected", note="€" * 2000, warning=False
            )
            assert events_of(control_plane, name)
    finally:
        await kube.close()
