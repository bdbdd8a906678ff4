"""Every finding of doctor, caused on the real node, and ended by what its remedy says where that is a command.

Several causes stand at once, as far as none hides another. The last test holds what was found against the closed set of
checks: a new check needs its cause here.

```
 served: a pool that works ── pools and pods ── kubelet ── release, operator away ── rights ── values of the chart
```
"""

import base64
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e.control_plane import free_port
from e2e.faulty_proxy import FaultyProxy
from e2e.light_pod import attached_engine, daemon_socket, is_injected, light_pod
from e2e.provocation import (
    Doctor,
    allocatable_pages,
    applied,
    command_in,
    hugetlbfs_covered,
    kubelet_away,
    pages_held,
    pod_network_away,
    write_kubeconfig,
)
from hack.cache import REPOSITORY
from hack.demo.installation import (
    DAEMON_SELECTOR,
    NAMESPACE,
    RELEASE,
    create_pool,
    delete_pool,
    install_chart,
    uninstall_chart,
)
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage
from hack.demo.servers import NAMESPACE as USERS
from kvoffload_cli.checks import CHECKS
from kvoffload_operator.webhook.certificates import make_certificate, utc_now

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

POOL = "served"
POOL_PAGES = 32
COVERED_PAGES = 8
POOL_CRD = "kvoffloadpools.kvoffload.io"
ELSEWHERE = {
    "daemon_pods_are_refused": (
        "test_cli_doctor.py::test_doctor_finds_that_pod_security_refuses_the_daemons_and_its_remedy_helps"
    ),
    "rollout_is_unfinished": (
        "test_cli_doctor.py::test_doctor_names_an_upgrade_whose_image_is_missing_and_its_way_back_is_one"
    ),
}
"""Checks that another test of this cluster provokes, and which."""
LEFT_ALONE = """\
import logging, signal, sys
from kvoffload_engine.plugin import leave_alone
logging.basicConfig(stream=sys.stderr)
leave_alone("UnsupportedVersion", "vLLM 0.1 is installed", socket_path="daemon.sock")
signal.pause()
"""
"""What the plugin does in an engine that it leaves alone, by the plugin itself."""


def pool(name: str, num_pages: int, **spec: Any) -> str:
    """The manifest of a pool of 2 MiB pages."""
    metadata = {"name": name}
    spec = {"capacity": f"{num_pages * 2}Mi", "pageSize": "2Mi", **spec}
    return json.dumps(
        {"apiVersion": "kvoffload.io/v1alpha1", "kind": "KVOffloadPool", "metadata": metadata, "spec": spec}
    )


@contextlib.contextmanager
def made_pool(kubernetes: Kubernetes, name: str, num_pages: int, **spec: Any) -> Iterator[None]:
    """A pool that is gone at the end, with its daemon."""
    kubernetes.apply(pool(name, num_pages, **spec))
    try:
        yield
    finally:
        delete_pool(kubernetes, name=name)


@contextlib.contextmanager
def made_pod(stage: Stage, name: str, *, of_pool: str = POOL, **more: Any) -> Iterator[dict[str, Any]]:
    """A light pod that is ready; gone at the end."""
    manifest = light_pod(name, pool=of_pool, image=stage.images.python, **more)
    with applied(stage.kubernetes, "pod", name, manifest, namespace=USERS):
        yield stage.kubernetes.wait_ready_pod(namespace=USERS, selector=f"app={name}", timeout_seconds=120)


@contextlib.contextmanager
def engine_left_alone(kubernetes: Kubernetes, pod: dict[str, Any]) -> Iterator[None]:
    """A process in which our plugin found a reason to stay out, beside the pod's socket."""
    with daemon_socket(kubernetes, pod) as path:
        folder = path.parent.readlink()
    with subprocess.Popen([sys.executable, "-c", LEFT_ALONE], cwd=folder) as engine:
        try:
            yield
        finally:
            engine.terminate()


@pytest.fixture(scope="module")
def served(release: Stage) -> Iterator[Stage]:
    """The release with a pool that serves."""
    kubernetes = release.kubernetes
    with made_pool(kubernetes, POOL, POOL_PAGES):
        create_pool(kubernetes, pool(POOL, POOL_PAGES), name=POOL)
        yield release


@pytest.fixture(scope="module")
def doctor(served: Stage) -> Doctor:
    """Doctor, which finds nothing before anything is provoked."""
    doctor = Doctor(served.kubernetes)
    doctor.wait_gone()
    return doctor


@pytest.fixture
def speaker(served: Stage) -> Iterator[dict[str, Any]]:
    """A pod of two ranks of a model with multi-head latent attention, as far as its manifest tells."""
    annotations = {"kvoffload.io/container": "main", "kvoffload.io/model-architecture": "DeepseekV3ForCausalLM"}
    arguments = ["vllm", "serve", "/model", "--tensor-parallel-size", "2"]
    with made_pod(served, "speaks", annotations=annotations, arguments=arguments) as pod:
        assert pod["metadata"]["annotations"]["kvoffload.io/replicated-layout"].startswith("replicated")
        yield pod


def test_pools_pages_and_engines(served: Stage, doctor: Doctor, speaker: dict[str, Any]) -> None:
    kubernetes = served.kubernetes
    node = f"node/{kubernetes.settings.node_name}"
    pages = allocatable_pages(kubernetes)
    rest = pages - POOL_PAGES - COVERED_PAGES
    with contextlib.ExitStack() as made:
        for cause in (
            made_pool(kubernetes, "nowhere", 8, nodeSelector={"zone": "nowhere"}),
            made_pod(served, "stray", of_pool="never-made"),
            engine_left_alone(kubernetes, speaker),
            attached_engine(
                kubernetes, speaker, replicated=False, reason="NotMLA", message="Qwen3 divides KV heads over the ranks"
            ),
        ):
            made.enter_context(cause)
        held = made.enter_context(contextlib.ExitStack())
        held.enter_context(pages_held(leaving=rest - 1))
        made.enter_context(made_pool(kubernetes, "large", rest))
        (missing,) = doctor.wait_found(("kubelet_counts_missing_pages", node))
        overlap = made.enter_context(contextlib.ExitStack())
        overlap.enter_context(made_pool(kubernetes, "large-too", pages * 3 // 4))
        cover = made.enter_context(contextlib.ExitStack())
        cover.enter_context(hugetlbfs_covered())
        made.enter_context(made_pool(kubernetes, "covered", COVERED_PAGES))
        _, overlapping, short, nowhere, uninjected, declined, differs, covered = doctor.wait_found(
            ("kubelet_counts_missing_pages", node),
            ("pools_overlap", node),
            ("node_is_short_of_pages", node),
            ("pool_matches_no_node", "pool/nowhere"),
            ("pod_is_not_injected", f"pod/{USERS}/stray"),
            ("engine_declined_offload", f"pod/{USERS}/speaks"),
            ("layout_differs_from_prediction", f"pod/{USERS}/speaks"),
            ("region_does_not_serve", f"region/covered.{kubernetes.settings.node_name}", "NoHugetlbfs: *"),
        )
        assert "end what holds them outside of pods" in missing["remedy"]
        assert re.search(rf"pool large's {rest * 2}Mi", missing["message"])
        assert {"served", "large", "large-too"} <= set(re.findall(r"[\w-]+", overlapping["message"]))
        assert "are requested by other pods, pool large-too needs" in short["message"]
        assert "zone=nowhere" in nowhere["remedy"]
        assert "'never-made', which does not exist" in uninjected["message"]
        assert declined["message"] == "serves without offload: UnsupportedVersion: vLLM 0.1 is installed"
        assert "`UnsupportedVersion`" in (REPOSITORY / declined["remedy"].split()[0]).read_text()
        assert "predicted replicated, confirmed per-rank (NotMLA): Qwen3 divides" in differs["message"]
        assert "hugetlbfsMount: Managed" in doctor.follow(covered["remedy"])

        held.close()  # as the remedies say: end what holds the pages, take a pool away, mount a hugetlbfs
        overlap.close()
        cover.close()
        assert "delete this daemon's pod" in covered["message"]
        selector = f"--selector={DAEMON_SELECTOR}=covered"
        kubernetes.kubectl("delete", "pods", selector, f"--namespace={NAMESPACE}", "--wait=false")
        doctor.wait_gone(
            *("kubelet_counts_missing_pages", "pools_overlap", "node_is_short_of_pages", "region_does_not_serve")
        )
        kubernetes.kubectl("patch", "kvpool", POOL, "--type=merge", '--patch={"spec": {"mode": "Paused"}}')
        (paused,) = doctor.wait_found(("pool_is_not_ready", f"pool/{POOL}"))
        doctor.follow(paused["remedy"])
        doctor.wait_gone("pool_is_not_ready")
    with attached_engine(kubernetes, speaker):
        doctor.wait_gone()


def test_a_kubelet_away_and_a_pod_that_never_attached(served: Stage, doctor: Doctor) -> None:
    kubernetes = served.kubernetes
    never = ("pod_is_not_attached", f"pod/{USERS}/waits")
    with made_pod(served, "waits", annotations={"kvoffload.io/container": "main"}) as pod:
        assert is_injected(pod)
        with kubelet_away(kubernetes.settings):
            kubernetes.kubectl("rollout", "restart", f"daemonset/kvoffload-{POOL}", f"--namespace={NAMESPACE}")
            replaced, _ = doctor.wait_found(("daemons_are_replaced", f"daemonset/{NAMESPACE}/kvoffload-{POOL}"), never)
        doctor.follow(replaced["remedy"])
        doctor.wait_gone("daemons_are_replaced")
        doctor.wait_found(never)
        with attached_engine(kubernetes, pod):
            doctor.wait_gone()


def put_old_certificate_of_another_authority(kubernetes: Kubernetes) -> None:
    """Replace the webhook's own certificate by one of which a tenth of its time is left, as out of a backup."""
    name = f"{RELEASE}-webhook"
    names = tuple(f"{service}.{NAMESPACE}.svc" for service in (name, f"{name}-0", f"{name}-1"))
    parts = make_certificate(names, now=utc_now() - timedelta(days=9), lifetime=timedelta(days=10))
    data = {file: base64.b64encode(content).decode() for file, content in parts.items()}
    kubernetes.kubectl(
        *("patch", "secret", f"{name}-tls", f"--namespace={NAMESPACE}", "--type=merge"),
        f"--patch={json.dumps({'data': data})}",
    )


def loosen_and_age_crd(kubernetes: Kubernetes) -> None:
    """The pool's CRD without one field, as an older release has it, and with any word for a mode, as a newer may."""
    spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"
    changes = [{"op": "remove", "path": f"{spec}/{field}"} for field in ("numaPolicy", "mode/enum")]
    kubernetes.kubectl("patch", "crd", POOL_CRD, "--type=json", f"--patch={json.dumps(changes)}")


@pytest.fixture
def second_release(served: Stage) -> Iterator[None]:
    """The chart a second time, without anything that runs."""
    namespace, kubernetes = "second-system", served.kubernetes
    install_chart(
        *(kubernetes, served.images, "operator.replicas=0", "webhook.replicas=0"),
        release="second", namespace=namespace,
    )  # fmt: skip
    yield
    uninstall_chart(kubernetes, release="second", namespace=namespace)
    kubernetes.delete("namespace", namespace)


@pytest.fixture
def no_operator(served: Stage) -> Iterator[None]:
    """The operator at no replica; at its end it runs, and has mended what it looks after."""
    kubernetes, operator = served.kubernetes, f"deployment/{RELEASE}-operator"
    in_namespace = f"--namespace={NAMESPACE}"
    kubernetes.kubectl("scale", operator, "--replicas=0", in_namespace)
    component = "app.kubernetes.io/component=operator"
    kubernetes.kubectl("wait", "--for=delete", "pods", f"--selector={component}", in_namespace, "--timeout=60s")
    yield
    kubernetes.kubectl("apply", "--server-side", "--force-conflicts", "-f", REPOSITORY / "crds")
    kubernetes.kubectl("scale", operator, "--replicas=1", in_namespace)
    kubernetes.kubectl("rollout", "status", operator, in_namespace, "--timeout=90s")


def test_the_release_and_the_node(served: Stage, doctor: Doctor, second_release: None, no_operator: None) -> None:
    kubernetes = served.kubernetes
    put_old_certificate_of_another_authority(kubernetes)
    webhooks = "--selector=app.kubernetes.io/component=webhook"  # the API server keeps its connections to them
    kubernetes.kubectl("delete", "pods", webhooks, f"--namespace={NAMESPACE}", "--wait=false")
    doctor.wait_found(("webhook_is_not_asked", "webhook"))
    loosen_and_age_crd(kubernetes)
    configuration = f"webhookconfiguration/{RELEASE}-webhook"
    odd = pool("odd", 8, mode="Sometimes", nodeSelector={"zone": "nowhere"})
    with applied(kubernetes, "kvpool", "odd", odd):
        with pod_network_away(kubernetes.settings):
            outdated, unreadable, several, operator, *_, expiring, unready = doctor.wait_found(
                ("crd_is_missing_or_outdated", f"crd/{POOL_CRD}"),
                ("object_is_unreadable", "api"),
                ("several_releases_are_installed", "releases"),
                ("release_is_incomplete", f"deployment/{NAMESPACE}/{RELEASE}-operator"),
                *(("webhook_is_not_trusted", f"mutating{configuration}-{replica}") for replica in (0, 1)),
                ("webhook_is_not_trusted", f"validating{configuration}"),
                ("webhook_is_not_asked", "webhook"),
                ("certificate_expires", f"webhook/{NAMESPACE}/{RELEASE}"),
                ("node_is_not_ready", f"node/{kubernetes.settings.node_name}"),
            )
        assert "spec.numaPolicy" in outdated["message"]
        assert unreadable["message"].startswith("KVOffloadPool odd: mode: ")
        assert "second in namespace second-system" in several["message"]
        assert "pools are not reconciled" in operator["message"]
        assert expiring["message"].startswith("expires ")
        assert "network" in unready["message"].lower()
        assert "journalctl -u kubelet" in unready["remedy"]
        doctor.follow(command_in(outdated, r"kubectl apply .*-f crds/"))
        doctor.follow(command_in(several, r"helm uninstall second -n \S+"))
    doctor.wait_gone(
        *("crd_is_missing_or_outdated", "object_is_unreadable", "several_releases_are_installed", "node_is_not_ready")
    )
    doctor.follow(operator["remedy"])  # which renews the certificate, and so ends the rest
    doctor.wait_gone(timeout_seconds=90)


@pytest.fixture
def reader(served: Stage, tmp_path: Path) -> Iterator[list[str]]:
    """Arguments of a user who may read pools and regions, and asks through a proxy before an older API server."""
    kubernetes = served.kubernetes
    server = f"https://{kubernetes.settings.node_address}:6443"
    version = json.loads(kubernetes.kubectl("get", "--raw", "/version"))
    proxy = FaultyProxy(server, free_port())
    proxy.stand_ins["/version"] = {**version, "minor": "31", "gitVersion": "v1.31.9"}
    proxy.start()
    names = ("clusterrolebinding/reader-sees", "clusterrolebinding/reader-doctors", "clusterrole/pod-maker")
    account = f"--serviceaccount={USERS}:reader"
    try:
        kubernetes.kubectl("create", "serviceaccount", "reader", f"--namespace={USERS}")
        kubernetes.kubectl("create", "clusterrolebinding", "reader-sees", f"--clusterrole={RELEASE}-viewer", account)
        token = kubernetes.kubectl("create", "token", "reader", f"--namespace={USERS}").strip()
        yield ["--kubeconfig", str(write_kubeconfig(tmp_path / "reader", server=proxy.url, token=token))]
    finally:
        proxy.stop()
        kubernetes.delete("serviceaccount", "reader", namespace=USERS)
        kubernetes.kubectl("delete", "--ignore-not-found", *names)
        for namespace in (NAMESPACE, "default"):
            kubernetes.delete("rolebinding", "reader", namespace=namespace)


def test_rights_and_the_server_s_version(served: Stage, doctor: Doctor, reader: list[str]) -> None:
    kubernetes = served.kubernetes
    unreadable, old = doctor.wait_found(
        ("something_is_not_readable", "access"), ("kubernetes_is_too_old", "cluster"), arguments=reader
    )
    assert old["message"] == "Kubernetes 1.31, needed 1.32 or newer"
    assert "the ClusterRole and the Role RELEASE-doctor (RELEASE: the helm release's name)" in unreadable["remedy"]
    account = f"--serviceaccount={USERS}:reader"
    role = f"{RELEASE}-doctor"
    kubernetes.kubectl("create", "clusterrolebinding", "reader-doctors", f"--clusterrole={role}", account)
    kubernetes.kubectl("create", "rolebinding", "reader", f"--role={role}", account, f"--namespace={NAMESPACE}")
    (left,) = (one for one in doctor.run(*reader) if one["check"] == "something_is_not_readable")
    assert left["remedy"].endswith("ask for the right to create pods in the namespace default, to try the webhook")
    kubernetes.kubectl("create", "clusterrole", "pod-maker", "--verb=create", "--resource=pods")
    kubernetes.kubectl("create", "rolebinding", "reader", "--clusterrole=pod-maker", account, "--namespace=default")
    assert {one["check"] for one in doctor.run(*reader)} == {"kubernetes_is_too_old"}


@pytest.fixture
def wrong_values(served: Stage) -> Iterator[None]:
    """The chart with a folder that is not the kubelet's, and with a tag that no image has."""
    wrong = (f"kubeletRootDir={served.kubernetes.settings.state}", "image.node.tag=mistyped")
    try:
        install_chart(served.kubernetes, served.images, *wrong)
        yield
    finally:
        install_chart(served.kubernetes, served.images)


def test_values_of_the_chart(served: Stage, doctor: Doctor, wrong_values: None) -> None:
    daemon = f"pod/{NAMESPACE}/kvoffload-{POOL}-*"
    (folder,) = doctor.wait_found(("kubelet_root_dir_is_wrong", daemon))
    listed = doctor.follow(command_in(folder, r"ps -efww \| grep -e --root-dir"))
    (root,) = set(re.findall(r"kubelet .*--root-dir=(\S+)", listed))
    doctor.follow(command_in(folder, r"helm upgrade .*").replace("FOLDER", root))
    (image,) = doctor.wait_found(("daemon_does_not_run", daemon))
    assert "ErrImageNeverPull" in image["message"]
    assert "push that image" in image["remedy"]
    assert "mistyped" in doctor.follow(command_in(image, r"kubectl -n \S+ describe pod \S+"))
    install_chart(served.kubernetes, served.images)
    doctor.wait_gone(timeout_seconds=90)


def test_every_check_was_provoked(request: pytest.FixtureRequest, doctor: Doctor) -> None:
    chosen = {item.name for item in request.session.items if item.path == request.path}
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE))
    if chosen < here:
        pytest.skip(f"needs this whole module; this run leaves out {', '.join(sorted(here - chosen))}")
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        text = (Path(__file__).parent / file).read_text()
        assert "pytest.mark.cluster" in text
        assert f"def {test}(" in text
    assert doctor.found | ELSEWHERE.keys() == {check.__name__ for check in CHECKS}
