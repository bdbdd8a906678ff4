"""An opted-in pod starts and serves when the webhook, the pool, the pages or the daemon are missing."""

import urllib.request
from typing import Any

import pytest

from e2e.light_pod import is_injected, light_pod, skip_reason, wait_asked
from hack.console import wait_until
from hack.demo import servers
from hack.demo.installation import NAMESPACE, delete_pool, describe_pool
from hack.demo.kubernetes import condition_status
from hack.demo.servers import demo_prompts, start_servers, stop_servers

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

MIB = 1 << 20
POOL = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {{name: {name}}}
spec: {{capacity: {capacity}, pageSize: 2Mi}}
"""


@pytest.fixture
def opted_in_pod(release):
    """Makes a light opted-in pod that must become Ready and serve; returns it as the API server holds it."""
    made = []

    def make(name: str, *, pool: str) -> dict[str, Any]:
        made.append(name)
        release.kubernetes.apply(light_pod(name, pool=pool, image=release.images.python))
        pod = release.kubernetes.wait_ready_pod(namespace="demo", selector=f"app={name}", timeout_seconds=120)
        with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/", timeout=5) as response:
            assert response.status == 200
        return pod

    yield make
    for name in made:
        release.kubernetes.delete("pod", name, namespace="demo")


@pytest.fixture
def pool_without_pages(release):
    """A pool that asks for more than the node has; its name."""
    kubernetes, name = release.kubernetes, "too-large"
    kubernetes.apply(POOL.format(name=name, capacity="64Gi"))
    yield name
    delete_pool(kubernetes, name=name)


def test_without_the_webhook_the_pod_is_created_as_it_was(release, opted_in_pod):
    kubernetes = release.kubernetes
    deployments = kubernetes.get("deployments", namespace=NAMESPACE, selector="app.kubernetes.io/component=webhook")
    names = [f"deployment/{one['metadata']['name']}" for one in deployments["items"]]

    def scale(number: int) -> None:
        kubernetes.kubectl("scale", *names, f"--replicas={number}", f"--namespace={NAMESPACE}")
        for name in names:
            kubernetes.kubectl("rollout", "status", name, f"--namespace={NAMESPACE}", "--timeout=90s")
        if number:
            wait_asked(release, pool="nowhere", answers=skip_reason)

    scale(0)
    try:
        wait_until(
            "the webhook's pods to be gone",
            lambda: not kubernetes.pods(namespace=NAMESPACE, selector="app.kubernetes.io/component=webhook"),
            timeout_seconds=60,
        )
        assert not is_injected(opted_in_pod("no-webhook", pool="demo"))
    finally:
        scale(1)


def test_without_the_pool_the_pod_starts_and_says_why(release, opted_in_pod):
    pod = opted_in_pod("no-pool", pool="nowhere")
    assert not is_injected(pod)
    assert skip_reason(pod) == "PoolNotFound"


def test_without_pages_the_pool_says_how_many_are_missing(release, pool_without_pages, opted_in_pod):
    kubernetes = release.kubernetes

    def message() -> str:
        pool = kubernetes.get("kvpool", pool_without_pages)
        conditions = pool.get("status", {}).get("conditions", [])
        missing = [c for c in conditions if c["type"] == "HugepagesAvailable" and c["status"] == "False"]
        return missing[0]["message"] if missing else ""

    wait_until(
        "the pool to say that pages are missing",
        lambda: bool(message()),
        timeout_seconds=60,
        explain=lambda: describe_pool(kubernetes, name=pool_without_pages),
    )
    assert condition_status(kubernetes.get("kvpool", pool_without_pages), "Ready") == "False"
    opted_in_pod("no-pages", pool=pool_without_pages)


def test_without_a_daemon_a_real_vllm_serves_without_offload(release, pool_without_pages):
    kubernetes = release.kubernetes
    (server,) = start_servers(kubernetes, release.files, names=["vllm-b"], pool=pool_without_pages)
    try:
        assert is_injected(server.pod)
        prompt = demo_prompts()[0]
        first, second = server.complete(prompt), server.complete(prompt)
        assert (first.cached_tokens, second.cached_tokens) == (0, 0)
        assert first.text_tokens == second.text_tokens
        assert servers.read_region_page_sizes(server.pod) == {}
    finally:
        stop_servers(kubernetes, names=["vllm-b"])
