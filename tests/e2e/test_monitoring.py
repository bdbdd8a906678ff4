"""The labels by which alerts and dashboard ask, on the real pods' series: by the PodMonitor, and by the page's job."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.console import wait_until
from hack.demo.discovery import documented_job, pod_monitor_job
from hack.demo.installation import NAMESPACE, create_pool, delete_pool, render_pod_monitor
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import Prometheus, running_prometheus
from hack.demo.run import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

POOL = "watched"
MANIFEST = f"""\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {{name: {POOL}}}
spec: {{capacity: 64Mi, pageSize: 2Mi}}
"""


@pytest.fixture(scope="module")
def cluster(release: Stage) -> Iterator[Kubernetes]:
    """The release with a pool, and a daemon of it."""
    create_pool(release.kubernetes, MANIFEST, name=POOL)
    yield release.kubernetes
    delete_pool(release.kubernetes, name=POOL)


@pytest.fixture(scope="module", params=["PodMonitor", "page"])
def prometheus(
    request: pytest.FixtureRequest, cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """One that reads the chart's PodMonitor, and one with the job that docs/monitoring.md has."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    job = pod_monitor_job(render_pod_monitor(cluster)) if request.param == "PodMonitor" else documented_job()
    with running_prometheus(cluster, folder, job=job) as running:
        running.wait_scraped()
        yield running


def test_every_pod_of_ours_is_scraped_once_as_what_it_is_and_where(cluster: Kubernetes, prometheus: Prometheus) -> None:
    pods = {
        pod["metadata"]["name"]: (
            pod["metadata"]["labels"]["app.kubernetes.io/component"],
            pod["spec"]["nodeName"],
            pod["metadata"]["labels"].get("kvoffload.io/daemon-of"),
            NAMESPACE,
        )
        for pod in cluster.pods(namespace=NAMESPACE)
    }
    assert {component for component, *_ in pods.values()} == {"operator", "webhook", "node"}
    wait_until(
        "every pod to answer, on one port",
        lambda: len(prometheus.query("up == 1")) == len(pods),
        timeout_seconds=30,
        explain=lambda: f"{prometheus.query('up')}",
    )
    found = {
        labels["pod"]: (labels["component"], labels["node"], labels.get("pool"), labels["namespace"])
        for labels, value in prometheus.query("up == 1")
    }
    assert found == pods


def test_series_of_daemon_and_operator_have_the_pool_and_the_daemon_s_its_node(
    cluster: Kubernetes, prometheus: Prometheus
) -> None:
    node = cluster.settings.node_name
    assert prometheus.value(f'kvoffload_pool_capacity_bytes{{pool="{POOL}",node="{node}",component="node"}}') == 1 << 26
    # the operator's own label, which no target label covers
    ready = f'kvoffload_operator_pool_nodes{{pool="{POOL}",state="ready",component="operator"}}'
    assert prometheus.value(f"{ready} == 1") == 1, "waited for: the last scrape may be older than the pool"


def test_no_label_of_ours_is_renamed_by_a_target_s(prometheus: Prometheus) -> None:
    names = {name for labels, _ in prometheus.query('{__name__=~"kvoffload_.+"}') for name in labels}
    assert {"pool", "node", "component"} <= names
    assert not [name for name in names if name.startswith("exported_")]
