"""The only kopf file: watches, and nothing else. Each handler unpacks an event, updates the view and queues what is
dirty.

Only `on.event` is used, for pools too: it leaves neither annotation nor finalizer on anybody's object, and one queue
of names that need a pass makes kopf's own per-object retries unnecessary. kopf runs standalone inside the leader's
lease, and takes care of listing, watching, and mending watches that broke, went silent or are too old.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import kopf

from kvoffload.api.keys import DAEMON_OF_LABEL, GROUP, POOL_LABEL, POOL_PLURAL, REGION_PLURAL, VERSION
from kvoffload.errors import KVOffloadError
from kvoffload_operator.view import ClusterView, Dirty

logger = logging.getLogger(__name__)

OnDirty = Callable[[Dirty], None]
Update = Callable[[dict[str, Any]], Dirty]

SERVER_TIMEOUT_SECONDS = 300
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
SILENCE_SECONDS = 70
"""Bookmarks come every 60 s or so: a watch that says nothing for longer is dead and is made anew."""


def build_registry(view: ClusterView, on_dirty: OnDirty) -> kopf.OperatorRegistry:
    """Handlers that feed `view` and report what is dirty."""
    registry = kopf.OperatorRegistry()

    def handle(update: Update, kind: str, *, namespaced: bool = False) -> Callable[..., Awaitable[None]]:
        async def on_event(event: dict[str, Any], name: str, namespace: str | None, **_: Any) -> None:
            key = f"{namespace}/{name}" if namespaced else name
            if event["type"] == "DELETED":
                version = event["object"]["metadata"].get("resourceVersion", "")
                on_dirty(view.forget(kind, key, version=version))
                return
            try:
                on_dirty(update(event["object"]))
            except KVOffloadError as error:
                # seen as if it were not there: the pass that follows writes it anew, or says what is wrong
                logger.warning("%s %s: %s", kind, key, error)
                on_dirty(view.forget(kind, key))

        on_event.__name__ = f"on_{kind}"
        return on_event

    kopf.on.event(GROUP, VERSION, POOL_PLURAL, registry=registry)(handle(view.update_pool, POOL_PLURAL))
    kopf.on.event(GROUP, VERSION, REGION_PLURAL, registry=registry)(handle(view.update_region, REGION_PLURAL))
    kopf.on.event("v1", "nodes", registry=registry)(handle(view.update_node, "nodes"))
    kopf.on.event("apps", "v1", "daemonsets", registry=registry, labels={DAEMON_OF_LABEL: kopf.PRESENT})(
        handle(view.update_daemonset, "daemonsets")
    )
    kopf.on.event("v1", "pods", registry=registry, labels={POOL_LABEL: kopf.PRESENT})(
        handle(view.update_pod, "pods", namespaced=True)
    )

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # by KUBERNETES_SERVICE_HOST: kopf's own service-account login asks DNS, which may start after us
        return kopf.login_via_client(**kwargs)

    return registry


def build_kopf_settings() -> kopf.OperatorSettings:
    """No writing by kopf itself, and watches that end before they can be silent for long."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = SERVER_TIMEOUT_SECONDS + 30
    settings.watching.inactivity_timeout = SILENCE_SECONDS
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 500
    settings.watching.label_selectors["pods"] = POOL_LABEL
    settings.watching.label_selectors["daemonsets"] = DAEMON_OF_LABEL
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = None
    return settings


async def watch_cluster(view: ClusterView, on_dirty: OnDirty, *, identity: str) -> None:
    """Watch until cancelled.

    kopf gives up where the API server refuses a listing or a watch (403, 500 ...); that passes, so it is begun again.
    """
    delay_seconds = FIRST_RETRY_SECONDS
    while True:
        started = time.monotonic()
        try:
            await kopf.operator(
                registry=build_registry(view, on_dirty),
                settings=build_kopf_settings(),
                standalone=True,
                identity=cast(Any, identity),  # a NewType that kopf does not export; its guess needs a passwd entry
                clusterwide=True,
            )
            raise RuntimeError("kopf ended without an error")  # it is told nothing that would end it
        except Exception as error:  # noqa: BLE001 -- kopf's errors have no root that it exports
            if time.monotonic() - started > MAX_RETRY_SECONDS:
                delay_seconds = FIRST_RETRY_SECONDS
            logger.warning("watches ended, begun again in %.0f s: %s", delay_seconds, error)
            await asyncio.sleep(delay_seconds)
            delay_seconds = min(2 * delay_seconds, MAX_RETRY_SECONDS)
