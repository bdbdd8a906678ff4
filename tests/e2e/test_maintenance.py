"""Case 27 on the node: a drain, and parts that go or stay away in the wrong order, with an engine attached; runs early.

Each test begins with the release, its pool and a pod whose engine has stored chunks, whatever the one before took away.
"""

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from byte_engine import ByteEngine
from e2e.light_pod import assert_serves, daemon_socket, is_injected, light_pod, make_pod, wait_asked
from e2e.own_release import OwnRelease, own_release
from hack.cluster import lifecycle, machine, processes
from hack.cluster.settings import ClusterSettings
from hack.console import StepError, wait_until
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage
from hack.demo.servers import NAMESPACE as USERS
from hack.demo.servers import find_pod_processes
from kvoffload.errors import DaemonUnavailable
from small_pool import attach, fill, hits

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.runs_first]

NAME = "upkeep"
ONE_EACH = ("operator.replicas=1", "webhook.replicas=1")
NUM_CHUNKS = 32
SALTS = itertools.count()
"""Other chunks in each test."""


@pytest.fixture(scope="module")
def release(stage: Stage) -> Iterator[OwnRelease]:
    with own_release(stage, NAME) as release:
        try:
            yield release
        finally:
            release.kubernetes.kubectl("uncordon", release.kubernetes.settings.node_name)


@dataclass
class Serving:
    """The release at work."""

    release: OwnRelease
    pod: dict[str, Any]
    """Of a Deployment; it opted in and serves."""
    engine: ByteEngine
    """Attached by the pod's socket."""
    keys: list[bytes]
    """What it stored."""


def deployment(stage: Stage) -> str:
    """The light pod as a workload: what is evicted comes back."""
    pod = json.loads(light_pod(NAME, pool=NAME, image=stage.images.python))
    metadata = pod["metadata"]
    template = {"metadata": {key: metadata[key] for key in ("labels", "annotations")}, "spec": pod["spec"]}
    template["spec"] |= {"restartPolicy": "Always"}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": NAME}}, "template": template}
    return json.dumps({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})


@pytest.fixture
def serving(release: OwnRelease) -> Iterator[Serving]:
    release.install(*ONE_EACH)
    release.make_pool()
    kubernetes = release.kubernetes
    kubernetes.apply(deployment(release.stage))
    try:
        pod = kubernetes.wait_ready_pod(namespace=USERS, selector=f"app={NAME}", timeout_seconds=120)
        with daemon_socket(kubernetes, pod) as path, contextlib.closing(attach(path, "stores")) as engine:
            yield Serving(release, pod, engine, fill(engine, NUM_CHUNKS, salt=next(SALTS)))
    finally:
        # each kind by itself: a garbage collector that has just lost the API server may miss that an owner went
        kinds = "deployments,replicasets,pods"
        kubernetes.kubectl("delete", kinds, f"--namespace={USERS}", f"--selector=app={NAME}", "--wait=true")


def evict(kubernetes: Kubernetes, pod: dict[str, Any]) -> None:
    """As a drain does it. Raises StepError with the API server's words where it is refused."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    kubernetes.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def wait_running(release: OwnRelease) -> None:
    """Wait until operator and webhook are back, and a pod that is created now would meet the webhook."""
    kubernetes = release.kubernetes
    kubernetes.kubectl(
        "wait", "--for=condition=Available", "deployments", "--all", f"--namespace={release.namespace}", "--timeout=90s"
    )
    wait_asked(release.stage, pool=NAME)


def settled_free_pages() -> int:
    """Free pages of the node, once the daemon has allocated what it wants ahead of demand."""
    seen: list[int] = []

    def stand_still() -> bool:
        seen.append(machine.read_hugepages("free"))
        return len(seen) >= 4 and len(set(seen[-4:])) == 1

    wait_until("the number of free pages to stand still", stand_still, timeout_seconds=60, poll_seconds=0.5)
    return seen[-1]


def wait_given_back(serving: Serving) -> None:
    """Wait until the daemon's files are gone and the node's pages are free as before, while the engine still runs."""

    def are_free() -> bool:
        with contextlib.suppress(DaemonUnavailable):
            serving.engine.acknowledge_revocations()
        return (
            machine.read_hugepages("free") == serving.release.free_pages_before and not serving.release.files.exists()
        )

    wait_until(
        "the pages to be free again and the daemon's files gone",
        are_free,
        timeout_seconds=60,
        explain=lambda: f"{machine.read_hugepages('free')} of {serving.release.free_pages_before} are free",
    )


def assert_holds_up_nothing(serving: Serving, *, newcomer: str) -> None:
    """No object of ours waits for anybody; the pod serves, and a new labelled one does too."""
    kubernetes = serving.release.kubernetes
    for kind in ("kvpool", "kvregion"):
        assert [one["metadata"].get("finalizers") for one in kubernetes.get(kind)["items"]] == [None]
    assert_serves(kubernetes, serving.pod)
    make_pod(serving.release.stage, newcomer, pool=NAME)


# --- drain ------------------------------------------------------------------------------------------------------------


def test_an_eviction_that_would_leave_no_webhook_is_refused_and_one_of_a_webhook_that_does_not_answer_is_not(
    release: OwnRelease,
) -> None:
    kubernetes = release.kubernetes
    release.install("webhook.replicas=2")
    kubernetes.kubectl("cordon", kubernetes.settings.node_name)
    try:
        first, last = release.pods("webhook")
        evict(kubernetes, first)
        with pytest.raises(StepError, match="disruption budget"):
            evict(kubernetes, last)
        (process,) = [pid for pid, line in find_pod_processes(last).items() if "kvoffload_operator" in line]
        os.kill(process, signal.SIGSTOP)
        try:
            name = f"pod/{last['metadata']['name']}"
            kubernetes.kubectl("wait", "--for=condition=Ready=false", name, f"--namespace={release.namespace}")
            evict(kubernetes, last)
        finally:
            os.kill(process, signal.SIGCONT)
    finally:
        kubernetes.kubectl("uncordon", kubernetes.settings.node_name)


def test_a_node_is_drained_with_its_daemon_in_place_and_is_warm_when_it_is_back(serving: Serving) -> None:
    release, kubernetes = serving.release, serving.release.kubernetes
    node = kubernetes.settings.node_name
    daemon, epoch, free = release.daemon(), release.region()["status"]["epoch"], settled_free_pages()
    try:
        with pytest.raises(StepError, match="local storage"):
            kubernetes.kubectl("drain", node, "--ignore-daemonsets")
        kubernetes.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
        on_node = kubernetes.kubectl(
            "get", "pods", "--all-namespaces", f"--field-selector=spec.nodeName={node}", "--output=name"
        )
        assert on_node.split() == [f"pod/{daemon['metadata']['name']}"]
        kubernetes.apply(light_pod("upkeep-meanwhile", pool=NAME, image=release.stage.images.python))
        assert not is_injected(kubernetes.get("pod", "upkeep-meanwhile", namespace=USERS)), "nobody could"
    finally:
        kubernetes.kubectl("uncordon", node)
    serving.engine.close()
    wait_running(release)
    newcomer = make_pod(release.stage, "upkeep-newcomer", pool=NAME)
    with daemon_socket(kubernetes, newcomer) as path, contextlib.closing(attach(path, "finds")) as engine:
        assert hits(engine, serving.keys) == NUM_CHUNKS
    assert release.daemon()["metadata"]["uid"] == daemon["metadata"]["uid"]
    assert release.region()["status"]["epoch"] == epoch
    assert settled_free_pages() == free
    kubernetes.wait_ready_pod(namespace=USERS, selector="app=upkeep-meanwhile", timeout_seconds=120)


# --- parts that are away ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def api_server_away(settings: ClusterSettings) -> Iterator[None]:
    """No API server for a while; what runs on the node runs on. The controllers start anew with it: their watches come
    back one after another, and one that sees a ReplicaSet go before its Deployment makes it again, owned by nobody."""
    for name in ("controller-manager", "apiserver"):
        processes.stop(name, settings)
    try:
        yield
    finally:
        lifecycle.up(settings)


def test_a_daemon_that_ends_while_the_api_server_is_away_keeps_its_files_and_its_successor_serves_them_at_once(
    serving: Serving,
) -> None:
    release, kubernetes = serving.release, serving.release.kubernetes
    ended, epoch, free = release.daemon_process(), release.region()["status"]["epoch"], settled_free_pages()
    daemon = release.daemon()
    with api_server_away(kubernetes.settings):
        os.kill(ended, signal.SIGTERM)
        wait_until("the daemon to end", lambda: processes.read_start_time(ended) is None, timeout_seconds=120)
        assert list(release.files.glob("*.region"))
        wait_until("its successor to take the engine", lambda: reattaches(serving.engine), timeout_seconds=120)
        assert hits(serving.engine, serving.keys) == NUM_CHUNKS
    wait_until(
        "the successor's epoch to be reported",
        lambda: release.region()["status"]["epoch"] == epoch + 1,
        timeout_seconds=60,
    )
    assert release.daemon()["metadata"]["uid"] == daemon["metadata"]["uid"]
    assert hits(serving.engine, serving.keys) == NUM_CHUNKS
    assert settled_free_pages() == free
    assert_serves(kubernetes, serving.pod)


def reattaches(engine: ByteEngine) -> bool:
    """Whether a daemon takes the engine again."""
    with contextlib.suppress(DaemonUnavailable):
        engine.connect()
        return True
    return False


def test_the_operator_deleted_first_takes_its_daemons_along_and_holds_up_no_pod(serving: Serving) -> None:
    release, kubernetes = serving.release, serving.release.kubernetes
    kubernetes.delete("deployment", f"{NAME}-operator", namespace=release.namespace)
    wait_given_back(serving)
    assert kubernetes.get("daemonsets", namespace=release.namespace)["items"] == []
    assert_holds_up_nothing(serving, newcomer="upkeep-without-operator")
    wait_asked(release.stage, pool=NAME)
    serving.engine.close()
    release.install(*ONE_EACH)
    with daemon_socket(kubernetes, serving.pod) as path, contextlib.closing(attach(path, "again")) as engine:
        assert hits(engine, serving.keys) == 0, "a new region"


def test_a_daemon_whose_rights_are_gone_before_it_ends_gives_its_pages_back(serving: Serving) -> None:
    release, kubernetes = serving.release, serving.release.kubernetes
    ours = f"--selector=app.kubernetes.io/instance={NAME}"
    kubernetes.kubectl("delete", "roles,rolebindings", ours, f"--namespace={release.namespace}")
    kubernetes.kubectl("delete", "clusterroles,clusterrolebindings", ours)
    assert "kvoffload.io" not in kubernetes.kubectl(
        "auth", "can-i", "--list", f"--as=system:serviceaccount:{release.namespace}:{NAME}-node"
    )
    kubernetes.delete("deployment", f"{NAME}-operator", namespace=release.namespace)
    wait_given_back(serving)
    assert_holds_up_nothing(serving, newcomer="upkeep-without-rights")
