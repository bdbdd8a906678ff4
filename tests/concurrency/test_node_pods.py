"""The attacher's list of pods beside an API server that is silent, or says what the attacher does not know."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.config import load_kube_config

from daemon_process import wait_until
from kvoffload_node.attach import pods as node_pods
from kvoffload_node.attach.pods import NodePods
from scripted_api_server import ScriptedApiServer


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedApiServer]:
    """An API server whose watches say nothing."""
    server = ScriptedApiServer(
        tmp_path, {"poolName": "p", "nodeName": "n", "capacityBytes": 1 << 30, "pageSizeBytes": 2 << 20}
    )
    server.make_region("uid")
    server.watch_seconds = 600
    server.start()
    monkeypatch.setattr(node_pods.config, "load_config", lambda: load_kube_config(server.kubeconfig))
    yield server
    server.stop()


def listed_pod(uid: str, phase: str = "Running", namespace: str = "default") -> dict[str, object]:
    return {"metadata": {"uid": uid, "name": "stateful-0", "namespace": namespace}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("selector", "seen"),
    [(None, {"default"}), ({}, {"default", "kube-system", "own"}), ({"matchLabels": {"gpu": "yes"}}, set())],
    ids=["none", "all", "label"],
)
def test_pods_of_the_namespaces_that_the_webhook_allows_are_attached(
    api: ScriptedApiServer, selector: dict[str, object] | None, seen: set[str]
) -> None:
    """The namespaces have no labels here."""
    api.make_region("r", namespaceSelector=selector)
    api.pods = [listed_pod(namespace, namespace=namespace) for namespace in ("default", "kube-system", "own")]
    pods = NodePods(pool="p", node_name="n", own_namespace="own")
    pods._list()
    assert set(pods.current) == seen


def test_a_pod_that_a_silent_watch_does_not_tell_of_is_found_by_asking(
    api: ScriptedApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pods, "MIN_REFRESH_SECONDS", 60.0)  # more than this test takes
    api.pods = [listed_pod("first"), listed_pod("evicted", "Failed")]
    pods = NodePods(pool="p", node_name="n", own_namespace="own")
    pods.start()
    wait_until(lambda: set(pods.current) == {"first"})
    api.pods = [listed_pod("second")]
    assert pods.refresh()
    wait_until(lambda: set(pods.current) == {"second"})
    assert not pods.refresh(), "a node of many pods would ask without end"
    pods.watching.stop()


def test_a_region_of_a_newer_operator_is_said_and_does_not_deafen_the_attacher(
    api: ScriptedApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_pods, "RETRY_SECONDS", 0.01)
    api.make_region("uid", numaPolicy="OfTomorrow")
    api.pods = [listed_pod("first")]
    pods = NodePods(pool="p", node_name="n", own_namespace="own")
    assert not pods.watching.is_alive
    pods.start()
    wait_until(lambda: "no new pod is attached" in caplog.text or not pods.watching.is_alive)
    assert "update the node's image to the operator's version" in caplog.text
    pods.refresh()
    api.make_region("uid")
    wait_until(lambda: set(pods.current) == {"first"})
    assert pods.watching.is_alive
    pods.watching.stop()


def test_a_silent_watch_is_given_up(api: ScriptedApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pods, "RESYNC_SECONDS", 0)
    monkeypatch.setattr(node_pods, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(node_pods, "RETRY_SECONDS", 0.01)
    pods = NodePods(pool="p", node_name="n", own_namespace="own")
    pods.start()
    api.pods = [listed_pod("first")]
    wait_until(lambda: set(pods.current) == {"first"})
    api.pods = []
    wait_until(lambda: not pods.current)
    pods.watching.stop()
