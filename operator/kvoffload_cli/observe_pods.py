"""From a pod's manifest, its managed fields and container statuses, to what `explain`, `doctor` and `top` ask of it."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kvoffload.api import keys
from kvoffload.api.opt_in import came_label_late
from kvoffload_cli.facts import DaemonPod, OptedInPod, RolloutFailure, Wait
from kvoffload_cli.observe_release import has_condition

Manifest = Mapping[str, Any]


def timestamp(text: str) -> datetime:
    """A Kubernetes time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def labels_of(manifest: Manifest) -> Mapping[str, str]:
    """Labels, empty where there are none."""
    return manifest["metadata"].get("labels") or {}


def path_of(pod: Manifest) -> str:
    """A pod's path at the API server."""
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def metrics_proxy(pod: Manifest) -> str | None:
    """Where the API server passes requests on to the pod's port `metrics`; None where it has none, or does not run."""
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
    port = next((port["containerPort"] for port in ports if port.get("name") == "metrics"), None)
    if port is None or pod.get("status", {}).get("phase") != "Running":
        return None
    return f"{path_of(pod)}:{port}/proxy"


def count_restarts(pod: Manifest) -> int:
    """How often containers of the pod were started again."""
    return sum(container.get("restartCount", 0) for container in _container_statuses(pod))


def last_end(pod: Manifest) -> str:
    """How a container ended last: `vllm OOMKilled (exit code 137) at 2026-11-29 17:59:00 UTC`; empty if none did."""
    ends = [
        (end.get("finishedAt") or "", container["name"], end)
        for container in _container_statuses(pod)
        for end in (
            container.get("lastState", {}).get("terminated"),
            container.get("state", {}).get("terminated"),
        )
        if end and (end.get("exitCode") or container.get("restartCount"))
    ]
    if not ends:
        return ""
    finished_at, name, end = max(ends, key=lambda one: one[:2])
    at = f" at {timestamp(finished_at):%Y-%m-%d %H:%M:%S} UTC" if finished_at else ""
    return f"{name} {end.get('reason') or 'ended'} (exit code {end.get('exitCode', '?')}){at}"


def waiting_reasons(pod: Manifest) -> str:
    """Why containers wait: `vllm CrashLoopBackOff`; empty where none does."""
    return ", ".join(map(str, container_waits(pod)))


def container_waits(pod: Manifest) -> tuple[Wait, ...]:
    """Containers that wait."""
    return tuple(
        Wait(container["name"], waiting.get("reason", ""), waiting.get("message", ""))
        for container in _container_statuses(pod)
        if (waiting := container.get("state", {}).get("waiting")) is not None
    )


def not_scheduled(pod: Manifest) -> str:
    """Why the pod has no node, in the scheduler's words; empty where it has one, or is about to."""
    return next(
        (
            f"not scheduled: {one.get('message', one.get('reason', ''))}"
            for one in pod.get("status", {}).get("conditions", [])
            if one["type"] == "PodScheduled" and one["status"] == "False"
        ),
        "",
    )


def waits_in_vain(pod: Manifest) -> RolloutFailure | None:
    """What the pod waits for that will not come by itself, in the words of scheduler or kubelet; None if nothing."""
    name = pod["metadata"]["name"]
    if said := not_scheduled(pod):
        return RolloutFailure(name, said)
    waits = tuple(wait for wait in container_waits(pod) if not wait.is_passing)
    if not waits:
        return None
    words = [": ".join(filter(None, (str(wait), wait.message))) for wait in waits]
    return RolloutFailure(name, "; ".join(words), waits)


def _container_statuses(pod: Manifest) -> Iterable[Manifest]:
    status = pod.get("status", {})
    return (*status.get("initContainerStatuses", []), *status.get("containerStatuses", []))


def opted_in_pod(pod: Manifest) -> OptedInPod:
    """A pod that carries the opt-in label."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    annotations = metadata.get("annotations", {})
    ready = next((one for one in status.get("conditions", []) if one["type"] == "Ready"), None)
    return OptedInPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        node=spec.get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        is_deleting="deletionTimestamp" in metadata,
        ready_since=timestamp(ready["lastTransitionTime"]) if ready and ready["status"] == "True" else None,
        pool=metadata["labels"][keys.POOL_LABEL],
        injected_version=annotations.get(keys.INJECTED_ANNOTATION, ""),
        skip_reason=annotations.get(keys.SKIP_REASON_ANNOTATION, ""),
        predicted_layout=annotations.get(keys.REPLICATED_LAYOUT_ANNOTATION, ""),
        has_volume=any(volume["name"] == keys.VOLUME_NAME for volume in spec.get("volumes", [])),
        has_readiness_probe=any("readinessProbe" in container for container in spec["containers"]),
        label_is_late=came_label_late(pod),
        num_restarts=count_restarts(pod),
        last_end=last_end(pod),
        waiting=waiting_reasons(pod),
    )


def daemon_pod(pod: Manifest, *, mount_failure: str = "") -> DaemonPod:
    """A pod of ours on a node."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    return DaemonPod(
        namespace=pod["metadata"]["namespace"],
        name=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName", ""),
        pool=labels_of(pod)[keys.DAEMON_OF_LABEL],
        phase=status.get("phase", "Pending"),
        is_ready=has_condition(status, "Ready"),
        num_restarts=sum(container.get("restartCount", 0) for container in containers),
        unscheduled=not_scheduled(pod),
        waits=container_waits(pod),
        is_deleting="deletionTimestamp" in pod["metadata"],
        created_at=timestamp(pod["metadata"]["creationTimestamp"]),
        mount_failure="" if has_condition(status, "Ready") else mount_failure,
    )
