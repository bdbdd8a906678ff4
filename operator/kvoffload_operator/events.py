"""Kubernetes events, each at most once: an event's name is a digest of what it says, so that a second writing of the
same one is refused by the API server and means nothing. Used by the reconcilers, after what they speak of has been
written.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from kvoffload.api.conditions import Condition
from kvoffload_operator.kube import EVENTS, POOLS, ApiServerError, KubeClient

CONTROLLER = "kvoffload.io/operator"
MAX_NOTE_BYTES = 1024
"""The API server's limit; it refuses an event with more."""
MAX_OBJECT_NAME = 200
"""Of the object's name in the event's."""
CLUSTER_EVENT_NAMESPACE = "default"
"""Where Kubernetes keeps events about cluster-scoped objects."""


class PodEvent(StrEnum):
    """Reasons of events on opted-in pods; documented in `docs/reference/conditions.md`."""

    INJECTED = "Injected"
    NOT_INJECTED = "NotInjected"
    MISSED_BY_WEBHOOK = "MissedByWebhook"
    UNATTACHED = "Unattached"
    ENGINE_DECLINED = "EngineDeclined"
    LAYOUT_NOT_CONFIRMED = "LayoutNotConfirmed"


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object that an event is about."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str = ""

    @classmethod
    def pool(cls, name: str, uid: str) -> "Regarding":
        """A KVOffloadPool."""
        return cls(POOLS.api_version, POOLS.kind, name, uid)

    @classmethod
    def pod(cls, namespace: str, name: str, uid: str) -> "Regarding":
        """A pod."""
        return cls("v1", "Pod", name, uid, namespace)


class EventRecorder:
    """Writes events."""

    def __init__(self, kube: KubeClient, *, instance: str) -> None:
        self._kube, self._instance = kube, instance
        self._written: set[str] = set()

    async def record_condition(self, regarding: Regarding, condition: Condition, *, warning: bool) -> None:
        """The transition of a condition: one event for each transition time, status and reason."""
        distinct = (
            f"{condition.type}/{condition.status}/{condition.reason}/{condition.last_transition_time.isoformat()}"
        )
        await self.record(
            regarding,
            reason=condition.reason,
            note=f"{condition.type} is {condition.status}: {condition.message}",
            warning=warning,
            distinct=distinct,
        )

    async def record(
        self,
        regarding: Regarding,
        *,
        reason: str,
        note: str,
        warning: bool,
        distinct: str = "",
        action: str = "Reconcile",
    ) -> None:
        """Write the event unless one of this object, reason and `distinct` is there."""
        digest = hashlib.sha256(f"{regarding.uid}/{reason}/{distinct}".encode()).hexdigest()[:16]
        name = f"{regarding.name[:MAX_OBJECT_NAME].rstrip('-.')}.{digest}"
        if name in self._written:
            return
        namespace = regarding.namespace or CLUSTER_EVENT_NAMESPACE
        manifest = {
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": action,
            "reason": reason,
            "type": "Warning" if warning else "Normal",
            "note": _cut(note),
            "regarding": {
                "apiVersion": regarding.api_version,
                "kind": regarding.kind,
                "name": regarding.name,
                "uid": regarding.uid,
                **({"namespace": regarding.namespace} if regarding.namespace else {}),
            },
        }
        try:
            await self._kube.create(EVENTS, manifest, namespace)
        except ApiServerError as error:
            # there already, or its namespace is going or gone
            if not (error.is_conflict or error.is_not_found or error.is_namespace_ending):
                raise
        if len(self._written) > 100_000:
            self._written.clear()  # the API server still refuses duplicates
        self._written.add(name)


def _cut(note: str) -> str:
    """The note, or as much of it as an event takes, with an ellipsis."""
    encoded, more = note.encode(), "…"
    if len(encoded) <= MAX_NOTE_BYTES:
        return note
    return encoded[: MAX_NOTE_BYTES - len(more.encode())].decode(errors="ignore") + more
