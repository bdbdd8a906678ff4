"""The daemon and the API server: the region's spec comes in, its status goes out, and at the end the question what to
keep.

Runs in the node daemon, called by `daemon.py` through threads.
"""

from collections.abc import Callable
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from kvoffload.api.keys import API_VERSION, GROUP, NODE_FIELD_MANAGER, REGION_PLURAL, VERSION
from kvoffload.api.region import KVOffloadRegion, KVOffloadRegionStatus, region_name
from kvoffload_node.watching import ApiServerError, Watching, describe

_REQUEST_SECONDS = 10
_LAST_QUESTION_SECONDS = 3
"""The client asks four times where nobody answers, and a stopping daemon has a minute in all until it is killed."""
_WATCH_SECONDS = 300
_GONE = (401, 403, 404)
RETRY_SECONDS = 5.0


class RegionClient:
    """Reads and reports on one KVOffloadRegion. Every method blocks: call them in a thread."""

    def __init__(
        self, *, pool: str, node_name: str, daemonset: str, namespace: str, on_unreadable: Callable[[str], None]
    ) -> None:
        """Load the pod's service account. Raises ApiServerError outside a cluster.

        `on_unreadable` gets, in the watch's thread, why the region cannot be read, and an empty text when it can.
        """
        try:
            config.load_config()
        except config.ConfigException as error:
            raise ApiServerError(f"no way to the API server: {error}; give the pod its service account") from error
        self.name = region_name(pool, node_name)
        self._daemonset = daemonset
        self._namespace = namespace
        self._custom = client.CustomObjectsApi()
        self._apps = client.AppsV1Api()
        self.watching = Watching("region", f"KVOffloadRegion {self.name}", on_unreadable)

    def read(self) -> KVOffloadRegion | None:
        """The region, None if there is none. Raises ApiServerError."""
        try:
            manifest = self._custom.get_cluster_custom_object(
                GROUP, VERSION, REGION_PLURAL, self.name, _request_timeout=_REQUEST_SECONDS
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise ApiServerError(describe(error)) from error
        except (HTTPError, OSError) as error:
            raise ApiServerError(describe(error)) from error
        return KVOffloadRegion.from_manifest(manifest)

    def follow(self, on_region: Callable[[KVOffloadRegion | None], None]) -> None:
        """Call `on_region` with every change (None: deleted), in a thread, until `watching` is stopped."""

        def run_round() -> None:
            on_region(self.read())
            self._follow_once(on_region)

        self.watching.start(run_round, retry_seconds=RETRY_SECONDS)

    def _follow_once(self, on_region: Callable[[KVOffloadRegion | None], None]) -> None:
        stream = self.watching.watch.stream(
            self._custom.list_cluster_custom_object,
            GROUP,
            VERSION,
            REGION_PLURAL,
            field_selector=f"metadata.name={self.name}",
            timeout_seconds=_WATCH_SECONDS,
            _request_timeout=_WATCH_SECONDS + _REQUEST_SECONDS,
        )
        for event in stream:
            if self.watching.is_stopped:
                return
            on_region(None if event["type"] == "DELETED" else KVOffloadRegion.from_manifest(event["object"]))

    def apply_status(self, status: KVOffloadRegionStatus) -> None:
        """Write our part of the status by server-side apply, never by force. Raises ApiServerError."""
        body: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": "KVOffloadRegion",
            "metadata": {"name": self.name},
            "status": status.to_manifest(),
        }
        try:
            self._custom.patch_cluster_custom_object_status(
                GROUP,
                VERSION,
                REGION_PLURAL,
                self.name,
                body,
                field_manager=NODE_FIELD_MANAGER,
                _content_type="application/apply-patch+yaml",
                _request_timeout=_REQUEST_SECONDS,
            )
        except (ApiException, HTTPError, OSError) as error:
            raise ApiServerError(describe(error)) from error

    def must_keep_files(self, uid: str) -> tuple[bool, str]:
        """Whether a stopping daemon leaves its files to a successor, and why.

        It does if its DaemonSet and its region (of this uid, empty: not known yet) are both there and not being
        deleted, or if nobody can be asked. A refusal counts as gone: helm removes our rights before it removes us.
        """
        questions: list[tuple[str, Callable[[], bool]]] = [
            ("region", lambda: self._is_region_ending(uid)),
            ("DaemonSet", self._is_daemonset_ending),
        ]
        for what, read in questions:
            try:
                is_ending = read()
            except ApiException as error:
                if error.status in _GONE:
                    return False, f"the {what} answers {error.status}"
                return True, f"the {what} cannot be asked about: {error.status}"
            except (HTTPError, OSError) as error:
                return True, f"the API server cannot be reached: {error}"
            if is_ending:
                return False, f"the {what} is being deleted, or is another one"
        return True, "a successor will come"

    def _is_region_ending(self, uid: str) -> bool:
        manifest = self._custom.get_cluster_custom_object(
            GROUP, VERSION, REGION_PLURAL, self.name, _request_timeout=_LAST_QUESTION_SECONDS
        )
        return "deletionTimestamp" in manifest["metadata"] or uid not in ("", manifest["metadata"]["uid"])

    def _is_daemonset_ending(self) -> bool:
        found = self._apps.read_namespaced_daemon_set(
            self._daemonset, self._namespace, _request_timeout=_LAST_QUESTION_SECONDS
        )
        return found.metadata.deletion_timestamp is not None
