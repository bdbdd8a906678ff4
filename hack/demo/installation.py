"""Install the chart and make pools on the local cluster; read what they say of themselves."""

from pathlib import Path
from typing import Any

import yaml

from hack.cache import REPOSITORY
from hack.cluster.settings import KUBERNETES_VERSION
from hack.console import StepError, wait_until
from hack.demo.kubernetes import Kubernetes, condition_status, describe_conditions
from hack.images.build import NODE, OPERATOR, BuiltImages

RELEASE = "kvoffload"
NAMESPACE = "kvoffload-system"
CHART = REPOSITORY / "charts" / "kvoffload"
DAEMON_SELECTOR = "kvoffload.io/daemon-of"


def install_chart(
    kubernetes: Kubernetes,
    images: BuiltImages,
    *values: str,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    chart: Path = CHART,
) -> None:
    """Install or upgrade the chart with our images; returns when operator and webhook are ready."""
    chosen = [
        f"image.operator.repository={OPERATOR.repository}",
        f"image.operator.tag={images.tag}",
        f"image.node.repository={NODE.repository}",
        f"image.node.tag={images.tag}",
        "image.pullPolicy=Never",
        f"kubeletRootDir={kubernetes.settings.kubelet_root}",
        "node.resources.requests.cpu=500m",
        *values,
    ]
    # Two cores for a control plane, two engines with spinning ranks and the daemon that they ask: 2 ms are too few. The
    # servers' CPU limits belong to this: under Linux 6.18 ranks that spin otherwise keep others waiting for up to 3 s.
    sets = ["--set-json", "engine.stepDeadlineSeconds=0.25"]
    sets += [argument for value in chosen for argument in ("--set", value)]
    try:
        kubernetes.helm(
            "upgrade", "--install", release, chart, f"--namespace={namespace}", "--create-namespace", "--wait",
            "--timeout=120s", *sets,
        )  # fmt: skip
    except StepError as failure:
        pods = kubernetes.describe_pods(namespace=namespace, selector="app.kubernetes.io/name=kvoffload")
        raise StepError(f"{failure}\n{pods}", log=kubernetes.settings.logs / "pods") from None


def render_pod_monitor(kubernetes: Kubernetes) -> dict[str, Any]:
    """Return the release's PodMonitor as the chart renders it; nothing is installed."""
    text = kubernetes.helm(
        "template", RELEASE, CHART, f"--namespace={NAMESPACE}", f"--kube-version={KUBERNETES_VERSION}",
        "--set=monitoring.podMonitor.enabled=true", "--show-only=templates/monitoring/podmonitor.yaml",
    )  # fmt: skip
    monitor: dict[str, Any] = yaml.safe_load(text)
    return monitor


def uninstall_chart(kubernetes: Kubernetes, *, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
    """Remove the release if it is there."""
    kubernetes.helm("uninstall", release, f"--namespace={namespace}", "--ignore-not-found", "--wait", "--timeout=120s")


def create_pool(kubernetes: Kubernetes, manifest: str, *, name: str) -> dict[str, Any]:
    """Apply a pool and wait until it is Ready; past the wait say what its conditions and its daemons say."""
    kubernetes.apply(manifest)

    def is_ready() -> bool:
        pool = kubernetes.find("kvpool", name)
        if pool is None or pool.get("status", {}).get("observedGeneration") != pool["metadata"]["generation"]:
            return False
        return condition_status(pool, "Ready") == "True"

    wait_until(
        f"pool {name} to be Ready",
        is_ready,
        timeout_seconds=90,
        poll_seconds=0.5,
        explain=lambda: describe_pool(kubernetes, name=name),
        log=kubernetes.settings.logs / "pods",
    )
    return kubernetes.get("kvpool", name)


def delete_pool(kubernetes: Kubernetes, *, name: str, namespace: str = NAMESPACE) -> None:
    """Delete a pool and wait until its daemons are gone, and with them its pages."""
    kubernetes.delete("kvpool", name)
    kubernetes.kubectl(
        "wait", "--for=delete", "pods", f"--selector={DAEMON_SELECTOR}={name}", f"--namespace={namespace}",
        "--timeout=90s",
    )  # fmt: skip


def describe_pool(kubernetes: Kubernetes, *, name: str) -> str:
    """Return everything that says why a pool is not Ready."""
    pool = kubernetes.find("kvpool", name)
    if pool is None:
        return f"there is no pool {name}"
    parts = [f"pool {name}:", describe_conditions(pool)]
    for region in kubernetes.get("kvregion")["items"]:
        if region["spec"]["poolName"] == name:
            parts += [f"region {region['metadata']['name']}:", describe_conditions(region)]
    parts.append(kubernetes.describe_pods(namespace=NAMESPACE, selector=f"{DAEMON_SELECTOR}={name}"))
    for pod in kubernetes.pods(namespace=NAMESPACE, selector=f"{DAEMON_SELECTOR}={name}"):
        parts += [f"log of {pod['metadata']['name']}:", kubernetes.log_tail(pod)]
    return "\n".join(parts)


def read_region(kubernetes: Kubernetes, *, pool: str) -> dict[str, Any]:
    """Return the pool's region on the cluster's only node."""
    regions: list[dict[str, Any]] = [
        region for region in kubernetes.get("kvregion")["items"] if region["spec"]["poolName"] == pool
    ]
    if len(regions) != 1:
        raise StepError(f"pool {pool} has {len(regions)} regions on a cluster of one node")
    return regions[0]
