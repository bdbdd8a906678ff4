"""`kubectl kvoffload doctor` and the chart's roles for people, on a real API server that holds the unit tests' fixture.

What is found through the API server must be what is found in the fixture itself, so the fixture says what is real. On
a real node `test_doctor_on_the_node.py` causes every finding.
"""

import contextlib
import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.control_plane import ControlPlane, render_chart, running_control_plane
from e2e.operator_pools import pool_manifest
from e2e.webhook_replicas import host_address
from fixtures.cli.cluster import ailing
from fixtures.cli.pods import pod as fixture_pod
from fixtures.cli.reader import FixtureReader
from fixtures.cli.release import CERTIFICATE, WEBHOOK_POD
from fixtures.cli.scene import SYSTEM, Object
from kvoffload.api.keys import CERTIFICATE_PATH
from kvoffload.api.schema import build_crds
from kvoffload_cli.checks import run_checks
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observation import POOLS, REGIONS
from kvoffload_cli.observe import ADMISSION, observe_cluster, serves_pools

pytestmark = pytest.mark.e2e

KINDS = {
    "/api/v1/nodes": ("v1", "Node"),
    POOLS: ("kvoffload.io/v1alpha1", "KVOffloadPool"),
    REGIONS: ("kvoffload.io/v1alpha1", "KVOffloadRegion"),
    "/api/v1/pods": ("v1", "Pod"),
    f"/api/v1/namespaces/{SYSTEM}/events": ("v1", "Event"),
    "/apis/apps/v1/deployments": ("apps/v1", "Deployment"),
    f"{ADMISSION}/mutatingwebhookconfigurations": (
        "admissionregistration.k8s.io/v1",
        "MutatingWebhookConfiguration",
    ),
}
OF_THE_SERVER = {"cluster", "crd/kvoffloadregions.kvoffload.io"}
"""The fixture is an old server without the regions' CRD; here they must be there to hold the regions."""


COMPONENT = "app.kubernetes.io/component"
PEOPLE = ("viewer", "editor", "doctor")
"""Components of the chart whose roles are for people."""


def older_crds() -> list[Object]:
    """CRDs of an older and of a newer release at once: no quotas, and any word for sharing."""
    crds = copy.deepcopy(list(build_crds().values()))
    spec = crds[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["x-kubernetes-validations"], spec["properties"]["quotas"]
    del spec["properties"]["sharing"]["enum"]
    return [json.loads(json.dumps(crd)) for crd in crds]


def complete(one: Object, api_version: str, kind: str) -> Object:
    """The object with what an API server asks for beside what doctor looks at."""
    manifest = {**copy.deepcopy(one), "apiVersion": api_version, "kind": kind}
    spec = manifest.get("spec", {})
    for field in ("uid", "creationTimestamp", "generation"):
        manifest["metadata"].pop(field, None)
    if kind == "Pod":
        spec["terminationGracePeriodSeconds"] = 0
        for volume in spec["volumes"]:
            volume["emptyDir"] = {}
        for container in spec["containers"]:
            container["image"] = "none"
            if "resources" in container:
                container["resources"]["requests"]["memory"] = "64Mi"
    elif kind == "Deployment":
        labels = manifest["metadata"]["labels"]
        spec |= {"selector": {"matchLabels": labels}}
        spec["template"]["metadata"] = {"labels": labels}
        for container in spec["template"]["spec"]["containers"]:
            container["image"] = "none"
    elif kind == "MutatingWebhookConfiguration":
        for webhook in manifest["webhooks"]:
            webhook |= {"admissionReviewVersions": ["v1"], "sideEffects": "None"}
    return manifest


def complete_status(kind: str, status: Object) -> Object:
    """A pod's container statuses with every required field."""
    status = copy.deepcopy(status)
    for container in status.get("containerStatuses", []):
        container |= {"image": "none", "imageID": "", "ready": "running" in container["state"]}
        for state in container["state"].values():
            state.setdefault("startedAt", "2026-11-29T16:00:00Z") if "reason" not in state else None
    if kind == "Node":
        for condition in status["conditions"]:
            condition.setdefault("reason", "Test")
            condition.setdefault("message", "")
    return status


def create_all(plane: ControlPlane, objects: dict[str, Any]) -> None:
    """Create the fixture's objects, their statuses by the status subresource."""
    namespaces = {one["metadata"]["namespace"] for one in objects["/api/v1/pods"]} | {SYSTEM}
    plane.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in namespaces))
    for path, (api_version, kind) in KINDS.items():
        for one in objects[path]:
            manifest = complete(one, api_version, kind)
            status = complete_status(kind, manifest.pop("status", {}))
            plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(manifest))
            if status and kind != "Deployment":
                where = [f"--namespace={one['metadata']['namespace']}"] if "namespace" in one["metadata"] else []
                plane.kubectl(
                    *("patch", f"{kind.lower()}/{one['metadata']['name']}", *where),
                    *("--subresource=status", "--type=merge", "-p", json.dumps({"status": status})),
                )


@contextlib.contextmanager
def webhook_listening(objects: dict[str, Any]) -> Iterator[None]:
    """The fixture's webhook pod as one that can be asked: at an address of this machine, where its certificate is."""
    certificate = objects.pop(CERTIFICATE).encode()

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == CERTIFICATE_PATH else 404)
            self.end_headers()
            self.wfile.write(certificate)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer((host_address(), 0), Pages) as server:
        address, port = server.server_address[:2]
        (pod,) = (one for one in objects["/api/v1/pods"] if one["metadata"]["name"] == WEBHOOK_POD)
        pod["spec"]["containers"][0]["ports"][0]["containerPort"] = port
        pod["status"] |= {"podIP": address, "podIPs": [{"ip": address}]}
        objects[CERTIFICATE.replace(":9422", f":{port}")] = certificate.decode()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def ailing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ControlPlane, dict[str, Any]]]:
    """An API server that holds the ailing cluster, and the objects."""
    objects = ailing()
    elsewhere = {"metadata": {"name": "cpu-9", "labels": {}}, "spec": {}, "status": {"conditions": []}}
    objects["/api/v1/nodes"].append(elsewhere | {"status": {**objects["/api/v1/nodes"][0]["status"]}})
    with running_control_plane(tmp_path_factory.mktemp("doctor")) as plane:
        plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(older_crds()))
        names = [f"crd/{crd['metadata']['name']}" for crd in older_crds()]
        plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", *names)
        with webhook_listening(objects):
            create_all(plane, objects)
            yield plane, objects


def run_doctor(kubeconfig: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "kvoffload_cli", "doctor", "-o", "json"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_what_is_found_through_the_api_server_is_what_the_fixture_holds(
    ailing_server: tuple[ControlPlane, dict[str, Any]],
) -> None:
    plane, objects = ailing_server
    status, document = run_doctor(plane.kubeconfig)
    found = {(one["check"], one["subject"]) for one in document["findings"]}
    fixture = run_checks(observe_cluster(FixtureReader(objects), now=datetime.now(UTC)))
    expected = {(one.check, one.subject) for one in fixture if one.subject not in OF_THE_SERVER}
    assert found == expected
    assert status == 1


def test_a_user_who_may_read_little_is_told_what_was_not_checked(
    ailing_server: tuple[ControlPlane, dict[str, Any]],
) -> None:
    plane, _ = ailing_server
    plane.kubectl("create", "serviceaccount", "viewer")
    plane.kubectl("create", "clusterrole", "pools", "--verb=list", "--resource=kvoffloadpools.kvoffload.io")
    plane.kubectl("create", "clusterrolebinding", "pools", "--clusterrole=pools", "--serviceaccount=default:viewer")
    token = plane.kubectl("create", "token", "viewer").strip()
    _, document = run_doctor(plane.write_kubeconfig("viewer", token))
    assert document["checked"]["pools"] == 3
    assert document["checked"]["nodes"] == 0
    assert any("/api/v1/nodes is not allowed (403)" in sentence for sentence in document["notChecked"])
    assert {one["check"] for one in document["findings"]} <= {
        *("something_is_not_readable", "object_is_unreadable", "pool_is_not_ready")
    }


def run_plugin(kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "kvoffload_cli", *arguments]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_rights_in_one_namespace_make_nothing_absent(ailing_server: tuple[ControlPlane, dict[str, Any]]) -> None:
    plane, _ = ailing_server
    plane.kubectl("create", "serviceaccount", "one", "-n", "team-a")
    rights = ["--clusterrole=view", "--serviceaccount=team-a:one"]
    plane.kubectl("create", "rolebinding", "one", "-n", "team-a", *rights)
    kubeconfig = plane.write_kubeconfig("one", plane.kubectl("create", "token", "one", "-n", "team-a").strip())
    status, document = run_doctor(kubeconfig)
    assert [one["check"] for one in document["findings"]] == ["something_is_not_readable"]
    assert status == 2
    done = run_plugin(kubeconfig, "status")
    assert (done.returncode, done.stdout) == (2, "")
    assert "kvoffloadpools is not allowed (403)" in done.stderr
    assert serves_pools(ClusterReader(kubeconfig=str(kubeconfig))), "everybody may ask which kinds there are"


def test_a_label_on_a_pod_that_runs_is_not_laid_to_the_webhook(
    ailing_server: tuple[ControlPlane, dict[str, Any]],
) -> None:
    plane, _ = ailing_server
    for name in ("late", "early"):
        one = fixture_pod(name, injected=False, labels={} if name == "late" else None)
        plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(complete(one, "v1", "Pod")))
        try:
            plane.kubectl("label", "pod", name, "-n", "team-a", "--overwrite", "kvoffload.io/pool=llm")
            document = json.loads(run_plugin(plane.kubeconfig, "explain", "pod", f"team-a/{name}", "-o", "json").stdout)
            expected = "came after the pod was created, and" if name == "late" else "no webhook answered"
            assert expected in document["injected"][0]
        finally:
            plane.kubectl("delete", "pod", name, "-n", "team-a", "--wait=false")


@pytest.fixture(scope="module")
def roles(ailing_server: tuple[ControlPlane, dict[str, Any]]) -> None:
    """The chart's roles for people."""
    plane, _ = ailing_server
    plane.apply(*(one for one in render_chart() if one["metadata"].get("labels", {}).get(COMPONENT) in PEOPLE))


def test_the_doctor_roles_are_what_doctor_and_top_need_and_change_nothing(
    ailing_server: tuple[ControlPlane, dict[str, Any]], roles: None
) -> None:
    """The one thing that is not read is tried: a pod is created in a dry run, which is a right to create pods."""
    plane, _ = ailing_server
    plane.kubectl("create", "serviceaccount", "doctor")
    for kind, where in (("clusterrole", []), ("role", ["-n", SYSTEM])):
        binding = [f"{kind}binding", "doctor", f"--{kind}=kvoffload-doctor", "--serviceaccount=default:doctor", *where]
        plane.kubectl("create", *binding)
    _, by_admin = run_doctor(plane.kubeconfig)
    _, document = run_doctor(plane.write_kubeconfig("doctor", plane.kubectl("create", "token", "doctor").strip()))
    (sentence,) = document["notChecked"]
    assert "a dry run of creating in /api/v1/namespaces/default/pods is not allowed (403)" in sentence
    assert document["checked"] == by_admin["checked"]
    about_the_try = ("webhook_is_not_asked", "something_is_not_readable")
    by_doctor, by_admin_too = (
        [one for one in findings["findings"] if one["check"] not in about_the_try] for findings in (document, by_admin)
    )
    assert by_doctor == by_admin_too
    assert can(plane, "doctor", "get", "pods/proxy", "-n", SYSTEM), "top reads the daemons' metrics"
    for verb in ("create", "update", "patch", "delete"):
        for kind in ("kvpool", "kvregion", "pods", "nodes", "deployments", "secrets", "events"):
            assert not can(plane, "doctor", verb, kind, "-n", SYSTEM), f"{verb} {kind}"
    for secret in ("secrets", "secrets/kvoffload-webhook-tls"):
        assert not can(plane, "doctor", "get", secret, "-n", SYSTEM)


def test_the_editor_role_makes_pools_and_only_reads_regions(
    ailing_server: tuple[ControlPlane, dict[str, Any]], roles: None
) -> None:
    plane, _ = ailing_server
    plane.kubectl("create", "serviceaccount", "editor")
    plane.kubectl(
        "create", "clusterrolebinding", "e", "--clusterrole=kvoffload-editor", "--serviceaccount=default:editor"
    )
    token = plane.kubectl("create", "token", "editor").strip()
    manifest = pool_manifest("edited", nodeSelector={"nowhere": "yes"})
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(manifest), token=token)
    plane.kubectl("patch", "kvpool", "edited", "--type=merge", "-p", '{"spec":{"mode":"Paused"}}', token=token)
    assert plane.get("kvpool", "edited")["spec"]["mode"] == "Paused"
    plane.kubectl("delete", "kvpool", "edited", token=token)
    assert "llm.gpu-1" in plane.kubectl("get", "kvregion", token=token)
    assert not can(plane, "editor", "patch", "kvregion")
    assert not can(plane, "editor", "patch", "kvpool", "--subresource=status")


def can(plane: ControlPlane, account: str, *what: str) -> bool:
    """Whether a service account of the namespace `default` may do that."""
    who = f"--as=system:serviceaccount:default:{account}"
    return plane.kubectl("auth", "can-i", *what, who, check=False).split()[0] == "yes"


def test_an_application_owner_may_ask_why_with_rights_in_the_namespace_and_the_viewer_role(
    ailing_server: tuple[ControlPlane, dict[str, Any]], roles: None
) -> None:
    plane, _ = ailing_server
    plane.kubectl("create", "serviceaccount", "owner", "-n", "team-b")
    plane.kubectl(
        "create", "rolebinding", "owner", "-n", "team-b", "--clusterrole=view", "--serviceaccount=team-b:owner"
    )
    token = plane.kubectl("create", "token", "owner", "-n", "team-b").strip()
    kubeconfig = plane.write_kubeconfig("owner", token)
    content = yaml.safe_load(kubeconfig.read_text())
    content["contexts"][0]["context"]["namespace"] = "team-b"
    kubeconfig.write_text(yaml.safe_dump(content))

    def explain() -> dict[str, list[str]]:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "kvoffload_cli",
            "explain",
            "pod",
            "vllm-b",  # of the context's namespace
            "-o",
            "json",
        ]
        environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    alone = explain()
    assert alone["injected"][0].startswith("yes")
    assert "attached" not in alone
    assert "RELEASE-viewer" in alone["not read"][-1]
    plane.kubectl(
        "create", "clusterrolebinding", "v", "--clusterrole=kvoffload-viewer", "--serviceaccount=team-b:owner"
    )
    informed = explain()
    assert "not read" not in informed
    assert informed["attached"]
