"""From a pod's managed fields and container statuses to what `explain` and `doctor` say of it. For `observe`."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kvoffload.api import keys

Manifest = Mapping[str, Any]


def timestamp(text: str) -> datetime:
    """A Kubernetes time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def came_label_late(pod: Manifest) -> bool | None:
    """Whether the opt-in label came after the pod was created; None where the managed fields do not tell.

    Who creates a pod manages its containers too. A label that only others manage is theirs, so it came later.
    """
    metadata = pod["metadata"]
    owners = [
        entry
        for entry in metadata.get("managedFields", [])
        if f"f:{keys.POOL_LABEL}" in entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:labels", {})
    ]
    creators = [entry for entry in owners if "f:containers" in entry["fieldsV1"].get("f:spec", {})]
    if owners and not creators:
        return True
    if any(entry.get("time") == metadata.get("creationTimestamp") for entry in creators):
        return False
    return None


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
    return ", ".join(
        f"{container['name']} {container['state']['waiting'].get('reason', 'waits')}"
        for container in _container_statuses(pod)
        if "waiting" in container.get("state", {})
    )


def _container_statuses(pod: Manifest) -> Iterable[Manifest]:
    status = pod.get("status", {})
    return (*status.get("initContainerStatuses", []), *status.get("containerStatuses", []))
