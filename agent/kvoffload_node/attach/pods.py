"""This node's opted-in pods, from the API server, and whether the pool takes their namespace.

Runs in the attacher, in a thread of its own; `attacher.py` looks at the last known set and never waits for it. A
watch that goes silent costs at most `RESYNC_SECONDS`, and less where the kubelet's folder shows a pod that is not
known: then `refresh` ends the watch.
"""

import logging
import threading
import time
from dataclasses import dataclass

from kubernetes import client, config

from kvoffload.api.keys import (
    GROUP,
    POOL_LABEL,
    REGION_PLURAL,
    REPLICATED_LAYOUT_ANNOTATION,
    VERSION,
)
from kvoffload.api.pool import allows_namespace
from kvoffload.api.region import KVOffloadRegion, region_name
from kvoffload_node.watching import Watching, describe

log = logging.getLogger(__name__)

RESYNC_SECONDS = 30
"""The longest that one watch lasts before pods are listed again."""
SILENCE_SECONDS = 5
"""So much later than it should have ended a watch that says nothing is given up."""
RETRY_SECONDS = 2.0
MIN_REFRESH_SECONDS = 1.0
_ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """An opted-in pod of this node."""

    uid: str
    namespace: str
    name: str
    predicted_layout: str


class NodePods:
    """Keeps `current` up to date until `stop`."""

    def __init__(self, *, pool: str, node_name: str, own_namespace: str) -> None:
        """Load the pod's service account. Raises kubernetes.config.ConfigException outside a cluster."""
        config.load_config()
        self._pool = pool
        self._node_name = node_name
        self._own_namespace = own_namespace
        self._core = client.CoreV1Api()
        self._custom = client.CustomObjectsApi()
        self._unreadable = ""
        self.watching = Watching("pods", "this node's pods, or their pool's selector,", self._say_unreadable)
        self._last_refresh = 0.0
        self._changing = threading.Lock()
        self.current: dict[str, ObservedPod] = {}
        """By uid; replaced, never changed."""

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self.watching.start(lambda: self._follow(self._list()), retry_seconds=RETRY_SECONDS)

    def _say_unreadable(self, why: str) -> None:
        if why and why != self._unreadable:
            log.error("no new pod is attached: %s", why)
        self._unreadable = why

    def refresh(self) -> bool:
        """List again now, in a thread: a pod's folder is there that the watch has not told of.

        False if that was done less than `MIN_REFRESH_SECONDS` ago.
        """
        now = time.monotonic()
        if now - self._last_refresh < MIN_REFRESH_SECONDS:
            return False
        self._last_refresh = now
        threading.Thread(target=self._refresh, name="pods-refresh", daemon=True).start()
        return True

    def _refresh(self) -> None:
        try:
            self._list()
        except Exception as error:  # noqa: BLE001 - the watch tries it again, and says what is wrong
            log.warning("pods could not be listed: %s", describe(error))

    def _query(self) -> dict[str, str]:
        return {
            "field_selector": f"spec.nodeName={self._node_name}",
            "label_selector": f"{POOL_LABEL}={self._pool}",
        }

    def _list(self) -> str:
        listed = self._core.list_pod_for_all_namespaces(**self._query(), _request_timeout=10)
        allowed = self._allowed_namespaces({pod.metadata.namespace for pod in listed.items})
        pods = [_observe(pod) for pod in listed.items if _is_running(pod) and pod.metadata.namespace in allowed]
        with self._changing:
            self.current = {pod.uid: pod for pod in pods}
        return str(listed.metadata.resource_version)

    def _follow(self, version: str) -> None:
        stream = self.watching.watch.stream(
            self._core.list_pod_for_all_namespaces,
            **self._query(),
            resource_version=version,
            timeout_seconds=RESYNC_SECONDS,
            _request_timeout=RESYNC_SECONDS + SILENCE_SECONDS,
        )
        for event in stream:
            pod = event["object"]
            is_ours = event["type"] != "DELETED" and _is_running(pod)
            if is_ours and pod.metadata.uid not in self.current:
                is_ours = bool(self._allowed_namespaces({pod.metadata.namespace}))
            with self._changing:  # `refresh` may have listed meanwhile
                others = {uid: other for uid, other in self.current.items() if uid != pod.metadata.uid}
                self.current = others | ({pod.metadata.uid: _observe(pod)} if is_ours else {})

    def _allowed_namespaces(self, namespaces: set[str]) -> set[str]:
        """Those whose pods the pool takes."""
        if not namespaces:
            return set()
        manifest = self._custom.get_cluster_custom_object(
            GROUP, VERSION, REGION_PLURAL, region_name(self._pool, self._node_name), _request_timeout=10
        )
        selector = KVOffloadRegion.from_manifest(manifest).spec.namespace_selector
        return {
            name
            for name in namespaces
            if allows_namespace(
                selector,
                name,
                {} if selector is None else self._labels_of(name),
                operator_namespace=self._own_namespace,
            )
        }

    def _labels_of(self, namespace: str) -> dict[str, str]:
        return dict(self._core.read_namespace(namespace, _request_timeout=10).metadata.labels or {})


def _observe(pod: client.V1Pod) -> ObservedPod:
    annotations = pod.metadata.annotations or {}
    return ObservedPod(
        uid=pod.metadata.uid,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        predicted_layout=annotations.get(REPLICATED_LAYOUT_ANNOTATION, "").partition(" ")[0],
    )


def _is_running(pod: client.V1Pod) -> bool:
    return pod.status.phase not in _ENDED_PHASES
