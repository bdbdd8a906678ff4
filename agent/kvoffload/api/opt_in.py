"""Why a labelled pod has no annotation of the webhook's, as its manifest tells: one reading for operator and plugin.

Pure. The operator's event `MissedByWebhook`, `kubectl kvoffload explain` and `doctor` say it in these words.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvoffload.api.keys import POOL_LABEL
from kvoffload.api.pool import SYSTEM_NAMESPACE


def is_never_injected(namespace: str, release_namespaces: Collection[str]) -> bool:
    """Whether the chart's webhook configurations leave the namespace out, whatever a pool's namespaceSelector says."""
    return namespace == SYSTEM_NAMESPACE or namespace in release_namespaces


def came_label_late(pod: Mapping[str, Any]) -> bool | None:
    """Whether the opt-in label came after the pod was created; None where the managed fields do not tell.

    Who creates a pod manages its containers too. A label that only others manage is theirs, so it came later.
    """
    metadata = pod["metadata"]
    owners = [
        entry
        for entry in metadata.get("managedFields") or ()
        if f"f:{POOL_LABEL}" in entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:labels", {})
    ]
    creators = [entry for entry in owners if "f:containers" in entry["fieldsV1"].get("f:spec", {})]
    if owners and not creators:
        return True
    if any(entry.get("time") == metadata.get("creationTimestamp") for entry in creators):
        return False
    return None


def why_missed(is_label_late: bool | None) -> str:
    """Why the webhook left no annotation, as far as the pod tells."""
    if is_label_late:
        return f"the label {POOL_LABEL} came after the pod was created, and the webhook looks at new pods only"
    if is_label_late is None:
        return f"the label {POOL_LABEL} came after the pod was created, or no webhook answered then"
    return "no webhook answered when the pod was created"


def remedy_of_missed(is_label_late: bool | None) -> str:
    """What makes the webhook look at it."""
    if is_label_late:
        return "put the label into the pod template (spec.template.metadata.labels), or recreate the pod with it"
    return "once `kubectl kvoffload doctor` finds the webhook ready, recreate the pod"
