"""The chart's life on the real cluster, with a pool and an attached pod all along; runs first.

```
 as it was before ── upgrade, monitoring ── rollback ── uninstall ── other name, namespace, certificate ── the end
 pool, pod           serves                 serves      pod serves   pool serves, new pods are injected    nothing left
```
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.foreign_kinds import define, remove
from e2e.light_pod import assert_serves, attached_engine, is_injected, make_pod, wait_asked
from hack.cache import REPOSITORY
from hack.cluster import machine
from hack.console import StepError, step, wait_until
from hack.demo import run as demo
from hack.demo.installation import DAEMON_SELECTOR, create_pool, delete_pool, install_chart, uninstall_chart
from hack.demo.kubernetes import Kubernetes, condition_status
from hack.demo.run import Stage
from hack.demo.servers import NAMESPACE as USERS
from hack.shell import run
from kvoffload.api.keys import DAEMON_NODE_LABEL_PREFIX, READY_NODE_LABEL_PREFIX, daemonset_name
from kvoffload.api.schema import build_crds
from kvoffload_operator.webhook.certificates import make_certificate, utc_now

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.runs_first]

POOL = "life"
POOL_MANIFEST = f"""\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {{name: {POOL}}}
spec: {{capacity: 64Mi, pageSize: 2Mi}}
"""
ONE_EACH = ("operator.replicas=1", "webhook.replicas=1")
CLUSTER_KINDS = (
    "clusterroles,clusterrolebindings,priorityclasses,mutatingwebhookconfigurations,validatingwebhookconfigurations,"
    "validatingadmissionpolicies,validatingadmissionpolicybindings"
)
MONITORING = tuple(f"monitoring.{part}.enabled=true" for part in ("podMonitor", "prometheusRule", "dashboard"))
MONITORING_KINDS = ("PodMonitor", "PrometheusRule")
"""Of the Prometheus operator, whose CRDs are there between the upgrade and the rollback."""
NAMESPACED_KINDS = (
    "deployments,daemonsets,controllerrevisions,jobs,pods,services,endpointslices,secrets,leases,roles,rolebindings,"
    "serviceaccounts,networkpolicies,poddisruptionbudgets,configmaps"
)


@dataclass(frozen=True, slots=True)
class Release:
    """A name of the release, and its namespace."""

    release: str
    namespace: str


FIRST = Release("life", "life-system")
SECOND = Release("afterlife", "afterlife-system")


def previous_chart(folder: Path) -> Path:
    """The chart of the release before this commit; without one, as it was before the last commit that changed it."""
    git: list[str | Path] = ["git", "-C", REPOSITORY]
    parts = [f"charts/kvoffload/{part}" for part in ("Chart.yaml", "values.yaml", "templates", "crds")]
    try:
        tag = run([*git, "describe", "--tags", "--abbrev=0", "--match=v*", "HEAD^"], accepted_statuses=(0, 128)).strip()
        last = run([*git, "rev-list", "--max-count=1", "HEAD", "--", *parts]).strip()
        run([*git, "archive", f"--output={folder}/chart.tar", tag or f"{last}^", "charts/kvoffload"])
    except StepError as error:
        pytest.skip(f"needs the repository's history for the chart to upgrade from: {error}")
    run(["tar", "-xf", folder / "chart.tar", "-C", folder])
    return folder / "charts" / "kvoffload"


def wait_converged(kubernetes: Kubernetes, release: Release, *, log_level: str) -> None:
    """Wait until the daemon runs as this release wants it and the pool is Ready."""

    def is_converged() -> bool:
        daemons = kubernetes.find("daemonset", daemonset_name(POOL), namespace=release.namespace)
        pool = kubernetes.get("kvpool", POOL)
        if daemons is None or condition_status(pool, "Ready") != "True":
            return False
        environment = daemons["spec"]["template"]["spec"]["containers"][0]["env"]
        status = daemons["status"]
        return (
            {"name": "KVOFFLOAD_LOG_LEVEL", "value": log_level} in environment
            and status.get("observedGeneration") == daemons["metadata"]["generation"]
            and status.get("updatedNumberScheduled") == status.get("numberReady") == 1
        )

    wait_until(f"release {release.release} to serve the pool", is_converged, timeout_seconds=90, poll_seconds=0.5)


def wait_crds_are_current(kubernetes: Kubernetes) -> None:
    """Wait until the leader has brought the CRDs to its version: applying that would make no new generation."""
    generation = "--output=jsonpath={.metadata.generation}"
    apply = ["apply", "--server-side", "--force-conflicts", "--field-manager=kvoffload-operator", "--dry-run=server"]

    def are_current() -> bool:
        return all(
            kubernetes.kubectl(*apply, generation, "-f", "-", stdin=json.dumps(crd))
            == kubernetes.kubectl("get", "crd", crd["metadata"]["name"], generation)
            for crd in build_crds().values()
        )

    wait_until("the CRDs to be of this version", are_current, timeout_seconds=30, poll_seconds=0.5)


def wait_gone(kubernetes: Kubernetes, release: Release) -> None:
    """Wait until nothing of a release is left: no cluster-wide object of ours, nothing in its namespace."""

    def find_left() -> list[str]:
        ours = ["--selector=app.kubernetes.io/name=kvoffload", "--output=name"]
        inside = kubernetes.kubectl("get", NAMESPACED_KINDS, f"--namespace={release.namespace}", "--output=name")
        return [*kubernetes.kubectl("get", CLUSTER_KINDS, *ours).split(), *inside.split()]

    wait_until(
        f"everything of release {release.release} to go",
        lambda: sorted(find_left()) == ["configmap/kube-root-ca.crt", "serviceaccount/default"],
        timeout_seconds=60,
        explain=lambda: "\n".join(find_left()),
    )


def monitoring_objects(kubernetes: Kubernetes, release: Release) -> dict[str, dict[str, Any]]:
    """What the release has of monitoring, by kind, as the API server holds it."""
    kinds = ",".join((*MONITORING_KINDS, "ConfigMap"))
    ours = "app.kubernetes.io/component=monitoring"
    return {one["kind"]: one for one in kubernetes.get(kinds, namespace=release.namespace, selector=ours)["items"]}


def assert_monitoring_is_stored_as_rendered(kubernetes: Kubernetes, release: Release) -> None:
    """No field of the PodMonitor, of a rule and of the dashboard was dropped on the way."""
    held = monitoring_objects(kubernetes, release)
    text = kubernetes.helm("get", "manifest", release.release, f"--namespace={release.namespace}")
    rendered = {one["kind"]: one for one in yaml.safe_load_all(text) if one and one["kind"] in held}
    assert set(rendered) == {*MONITORING_KINDS, "ConfigMap"}
    for kind in MONITORING_KINDS:
        assert is_within(rendered[kind]["spec"], held[kind]["spec"]), held[kind]
    assert held["ConfigMap"]["data"] == rendered["ConfigMap"]["data"]


def is_within(wanted: Any, held: Any) -> bool:
    """All that was wanted is held, defaults may be beside it."""
    if isinstance(wanted, dict) and isinstance(held, dict):
        return all(is_within(value, held.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(held, list):
        return len(wanted) == len(held) and all(map(is_within, wanted, held))
    return bool(wanted == held)


def node_labels(kubernetes: Kubernetes) -> list[str]:
    """Labels of ours on the node."""
    labels = kubernetes.get("node", kubernetes.settings.node_name)["metadata"]["labels"]
    return [label for label in labels if label.startswith((DAEMON_NODE_LABEL_PREFIX, READY_NODE_LABEL_PREFIX))]


def wait_pages_free(before: int) -> None:
    wait_until(
        f"{before} pages to be free again",
        lambda: machine.read_hugepages("free") == before,
        timeout_seconds=30,
        explain=lambda: f"{machine.read_hugepages('free')} are free",
    )


def give_certificate(kubernetes: Kubernetes, release: Release) -> tuple[str, ...]:
    """Store a certificate of the user's own for the webhook; returns the values that name it."""
    services = (f"{release.release}-webhook", f"{release.release}-webhook-0")
    names = tuple(f"{service}.{release.namespace}.svc" for service in services)
    parts = make_certificate(names, now=utc_now(), lifetime=timedelta(days=1))
    data = {file: base64.b64encode(content).decode() for file, content in parts.items()}
    kubernetes.ensure_namespace(release.namespace)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "given", "namespace": release.namespace},
        "data": data,
    }
    kubernetes.apply(json.dumps(secret))
    values = {"mode": "provided", "secretName": "given", "caBundle": data["ca.crt"]}
    return tuple(f"webhook.certificates.{key}={value}" for key, value in values.items())


@pytest.fixture
def bare(stage: Stage) -> Iterator[Stage]:
    """The cluster without anything of ours, not even the CRDs; also afterwards."""

    kubernetes = stage.kubernetes
    crds = [crd["metadata"]["name"] for crd in build_crds().values()]

    def clean() -> None:
        kubernetes.kubectl("delete", "pods", f"--namespace={USERS}", f"--selector=kvoffload.io/pool={POOL}")
        for release in (FIRST, SECOND):
            uninstall_chart(kubernetes, release=release.release, namespace=release.namespace)
        daemons = [f"--selector={DAEMON_SELECTOR}", "--all-namespaces"]
        kubernetes.kubectl("wait", "--for=delete", "pods", *daemons, "--timeout=90s")
        for release in (FIRST, SECOND):
            kubernetes.delete("namespace", release.namespace)
        kubernetes.kubectl("delete", "crd", "--ignore-not-found", *crds)
        remove(kubernetes, *MONITORING_KINDS)
        for label in node_labels(kubernetes):
            kubernetes.kubectl("label", "node", kubernetes.settings.node_name, f"{label}-")

    demo.remove_leftovers(stage)
    uninstall_chart(kubernetes)
    clean()
    yield stage
    clean()


def test_a_pool_and_its_pods_live_through_the_chart_s_whole_life_and_nothing_is_left_at_its_end(
    bare: Stage, tmp_path: Path
) -> None:
    kubernetes, images = bare.kubernetes, bare.images
    first: dict[str, Any] = {"release": FIRST.release, "namespace": FIRST.namespace}
    second: dict[str, Any] = {"release": SECOND.release, "namespace": SECOND.namespace}
    free_before = machine.read_hugepages("free")

    with step("Installing the chart as it was before"):
        install_chart(kubernetes, images, *ONE_EACH, **first, chart=previous_chart(tmp_path))
        create_pool(kubernetes, POOL_MANIFEST, name=POOL)
        wait_asked(bare, pool=POOL)
        pod = make_pod(bare, "life-a", pool=POOL)
    assert is_injected(pod)

    with step("Upgrading to this one, with monitoring"):
        with pytest.raises(StepError, match=r"no kind PodMonitor .*: install the Prometheus operator's CRDs first"):
            install_chart(kubernetes, images, *ONE_EACH, *MONITORING, **first)
        define(kubernetes, *MONITORING_KINDS)
        install_chart(kubernetes, images, *ONE_EACH, "logLevel=DEBUG", *MONITORING, **first)
        wait_converged(kubernetes, FIRST, log_level="DEBUG")
    wait_crds_are_current(kubernetes)
    assert_monitoring_is_stored_as_rendered(kubernetes, FIRST)
    assert_serves(kubernetes, pod)

    with step("Rolling back"):
        kubernetes.helm("rollback", FIRST.release, "1", f"--namespace={FIRST.namespace}", "--wait", "--timeout=120s")
        wait_converged(kubernetes, FIRST, log_level="INFO")
    wait_crds_are_current(kubernetes)
    assert not monitoring_objects(kubernetes, FIRST)
    assert_serves(kubernetes, pod)

    with attached_engine(kubernetes, pod), step("Uninstalling while an engine is attached"):
        uninstall_chart(kubernetes, **first)
        wait_gone(kubernetes, FIRST)
        assert_serves(kubernetes, pod)
        assert not is_injected(make_pod(bare, "life-b", pool=POOL))
    wait_pages_free(free_before)
    assert kubernetes.get("kvpool", POOL)["spec"]["capacity"] == "64Mi"

    with step("Installing under another name and namespace, with a certificate of the user's own"):
        install_chart(kubernetes, images, *ONE_EACH, *give_certificate(kubernetes, SECOND), **second)
        wait_converged(kubernetes, SECOND, log_level="INFO")
        wait_asked(bare, pool=POOL)
        newcomer = make_pod(bare, "life-c", pool=POOL)
    assert is_injected(newcomer)
    assert_serves(kubernetes, pod)
    for one in (pod, newcomer):  # the pod that was attached to the release before finds this one's daemon
        with attached_engine(kubernetes, one) as engine:
            assert engine.scheduler.is_open
    assert node_labels(kubernetes)

    with step("Deleting the pool, then the release"):
        delete_pool(kubernetes, name=POOL, namespace=SECOND.namespace)
        wait_until(
            "the operator to take its labels off the node", lambda: not node_labels(kubernetes), timeout_seconds=30
        )
        wait_pages_free(free_before)
        uninstall_chart(kubernetes, **second)
        kubernetes.delete("secret", "given", namespace=SECOND.namespace)
        wait_gone(kubernetes, SECOND)
    for one in (pod, newcomer):
        assert_serves(kubernetes, one)
