"""What Prometheus' discovery of Kubernetes' pods says of them, and the scrape jobs that make target labels of that.

Debian builds Prometheus without that discovery: the demo writes the same labels to a file (hack/demo/prometheus.py).
That they are the same, and that the Prometheus operator makes this job of a PodMonitor, is test_discovery.py's to show.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from hack.cache import REPOSITORY

META = "__meta_kubernetes_"
Object = Mapping[str, Any]


def discover(pods: Iterable[Object]) -> list[dict[str, Any]]:
    """Return one target for each port of each pod that has an address, as `kubernetes_sd_configs` of role pod do."""
    return [
        {"targets": [address], "labels": labels}
        for pod in pods
        if pod["status"].get("podIP")
        for address, labels in _targets(pod)
    ]


def _targets(pod: Object) -> Iterator[tuple[str, dict[str, str]]]:
    spec, status = pod["spec"], pod["status"]
    ids = {
        one["name"]: one.get("containerID", "")
        for key in ("containerStatuses", "initContainerStatuses")
        for one in status.get(key, [])
    }
    init = [one["name"] for one in spec.get("initContainers", [])]
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        of_container = {
            "name": container["name"],
            "id": ids.get(container["name"], ""),
            "image": container.get("image", ""),
            "init": str(container["name"] in init).lower(),
        }
        for port in container.get("ports", [None]):
            address, described = status["podIP"], of_container
            if port:
                address = f"{address}:{port['containerPort']}"
                described = of_container | {
                    "port_name": port.get("name", ""),
                    "port_number": str(port["containerPort"]),
                    "port_protocol": port.get("protocol", "TCP"),
                }
            labels = {f"{META}pod_container_{name}": value for name, value in described.items()}
            yield address, _pod_labels(pod) | labels


def _pod_labels(pod: Object) -> dict[str, str]:
    metadata, status = pod["metadata"], pod["status"]
    ready = (one["status"] for one in status.get("conditions", []) if one["type"] == "Ready")
    labels = {
        f"{META}namespace": metadata["namespace"],
        f"{META}pod_name": metadata["name"],
        f"{META}pod_uid": metadata["uid"],
        f"{META}pod_ip": status["podIP"],
        f"{META}pod_host_ip": status["hostIP"],
        f"{META}pod_phase": status["phase"],
        f"{META}pod_ready": next(ready, "Unknown").lower(),
        f"{META}pod_node_name": pod["spec"]["nodeName"],
    }
    for owner in metadata.get("ownerReferences", []):
        if owner.get("controller"):
            labels |= {
                f"{META}pod_controller_kind": owner["kind"],
                f"{META}pod_controller_name": owner["name"],
            }
    for what in ("label", "annotation"):
        for name, value in metadata.get(f"{what}s", {}).items():
            labels |= {
                f"{META}pod_{what}_{_sanitized(name)}": value,
                f"{META}pod_{what}present_{_sanitized(name)}": "true",
            }
    return labels


def _sanitized(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def pod_monitor_job(monitor: Object) -> dict[str, Any]:
    """Return the scrape job, without its discovery, that the Prometheus operator makes of our PodMonitor."""
    metadata, spec = monitor["metadata"], monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    steps: list[dict[str, Any]] = [
        {"source_labels": ["job"], "target_label": "__tmp_prometheus_job_name"},
        {"action": "drop", "source_labels": [f"{META}pod_phase"], "regex": "(Failed|Succeeded)"},
    ]
    for name, value in sorted(spec["selector"]["matchLabels"].items()):
        sources = [f"{META}pod_{what}_{_sanitized(name)}" for what in ("label", "labelpresent")]
        steps.append({"action": "keep", "source_labels": sources, "regex": f"({value});true"})
    steps.append(
        {"action": "keep", "source_labels": [f"{META}pod_container_port_name"], "regex": endpoint["port"]},
    )
    for label, source in {"namespace": "namespace", "container": "pod_container_name", "pod": "pod_name"}.items():
        steps.append({"source_labels": [META + source], "target_label": label})
    steps.append({"target_label": "job", "replacement": f"{metadata['namespace']}/{metadata['name']}"})
    steps.append({"target_label": "endpoint", "replacement": endpoint["port"]})
    steps += [{_snake_case(key): value for key, value in one.items()} for one in endpoint["relabelings"]]
    return {
        "job_name": f"podMonitor/{metadata['namespace']}/{metadata['name']}/0",
        "scrape_interval": endpoint["interval"],
        "relabel_configs": steps,
    }


def _snake_case(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def documented_job() -> dict[str, Any]:
    """Return the one job of docs/monitoring.md, for who has no Prometheus operator, with its discovery."""
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    (text,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, flags=re.DOTALL)
    (job,) = yaml.safe_load(text)["scrape_configs"]
    return dict(job)
