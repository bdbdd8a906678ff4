"""The only module that speaks to the API server; operator and webhook use it, nothing else knows paths or verbs.

Requests that may be repeated (reads, server-side apply, merge patches of whole values) are repeated on 429, 5xx and
broken connections, a few times within one deadline; what remains is an `ApiServerError` that carries the status. Every
write first asks the guard that `leader.py` sets, so that a process that lost its lease cannot write.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from kvoffload.api.keys import GROUP, POOL_PLURAL, REGION_PLURAL, VERSION
from kvoffload.errors import KVOffloadError

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})
PAGE_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object: where it lives in the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """`apiVersion` in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, *, name: str = "", namespace: str = "", subresource: str = "") -> str:
        """URL path of the collection, the object or its subresource."""
        prefix = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if namespace:
            prefix += f"/namespaces/{quote(namespace)}"
        return "/".join(filter(None, [f"{prefix}/{self.plural}", quote(name), subresource]))


POOLS = Resource(GROUP, VERSION, POOL_PLURAL, "KVOffloadPool")
REGIONS = Resource(GROUP, VERSION, REGION_PLURAL, "KVOffloadRegion")
NODES = Resource("", "v1", "nodes", "Node")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
DAEMONSETS = Resource("apps", "v1", "daemonsets", "DaemonSet")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")
MUTATING_WEBHOOKS = Resource(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration"
)
VALIDATING_WEBHOOKS = Resource(
    "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration"
)


class ApiServerError(KVOffloadError):
    """The API server refused, or did not answer (`status` 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"API server: {status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason

    @property
    def is_not_found(self) -> bool:
        """404."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """409: changed in between, exists already, or another field manager owns it."""
        return self.status == 409

    @property
    def is_invalid(self) -> bool:
        """400 or 422: what was written cannot be, and trying again does not help."""
        return self.status in (400, 422)

    @property
    def is_namespace_ending(self) -> bool:
        """403, though not for want of a right: nothing new is made in a namespace that is being deleted."""
        return self.status == 403 and "is being terminated" in str(self)


class KubeClient:
    """A connection to the API server."""

    def __init__(
        self, api: client.ApiClient, *, user_agent: str, timeout_seconds: float = 10.0, attempts: int = 4
    ) -> None:
        self._api, self._user_agent = api, user_agent
        self._timeout_seconds = timeout_seconds
        self._attempts = attempts
        self.check_may_write: Callable[[], None] = lambda: None
        """Raises where this process may not write any more; the leader's election sets it."""
        self.num_writes = 0
        """Writes that the API server accepted."""

    @classmethod
    async def connect(
        cls,
        *,
        user_agent: str,
        kubeconfig: str | None = None,
        timeout_seconds: float = 10.0,
        attempts: int = 4,
        connections: int = 32,
    ) -> "KubeClient":
        """By the pod's service account, or by a kubeconfig (KUBECONFIG's unless one is given) where there is none.

        `user_agent` is what audit logs see.
        """
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        configuration.connection_pool_maxsize = connections
        api = client.ApiClient(configuration=configuration)
        return cls(api, user_agent=user_agent, timeout_seconds=timeout_seconds, attempts=attempts)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    # --- reads ------------------------------------------------------------------------------------------------------

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Manifest | None:
        """One object, None if there is none."""
        try:
            return await self._request("GET", resource.path(name=name, namespace=namespace))
        except ApiServerError as error:
            if error.is_not_found:
                return None
            raise

    async def list_all(self, resource: Resource, *, namespace: str = "", label_selector: str = "") -> list[Manifest]:
        """All objects, read in pages; a listing that expired half way (410) is begun again."""
        for attempt in range(self._attempts):
            try:
                pages = self._pages(resource, namespace=namespace, label_selector=label_selector)
                return [item async for item in pages]
            except ApiServerError as error:
                if error.status != 410 or attempt + 1 == self._attempts:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _pages(self, resource: Resource, *, namespace: str, label_selector: str) -> AsyncIterator[Manifest]:
        token = ""
        while True:
            query = {"limit": str(PAGE_LIMIT), "labelSelector": label_selector, "continue": token}
            page = await self._request("GET", resource.path(namespace=namespace), query=query)
            for item in page["items"]:
                yield item
            token = page["metadata"].get("continue", "")
            if not token:
                return

    # --- writes -----------------------------------------------------------------------------------------------------

    async def apply(
        self,
        resource: Resource,
        manifest: Mapping[str, Any],
        *,
        field_manager: str,
        force: bool = True,
        subresource: str = "",
    ) -> Manifest:
        """Server-side apply of what this field manager wants to own."""
        metadata = manifest["metadata"]
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **manifest}
        query = {"fieldManager": field_manager, "force": "true" if force else "false"}
        path = resource.path(name=metadata["name"], namespace=metadata.get("namespace", ""), subresource=subresource)
        return await self._write("PATCH", path, query=query, body=body, content_type=APPLY)

    async def merge_patch(
        self, resource: Resource, name: str, patch: Mapping[str, Any], *, namespace: str = "", subresource: str = ""
    ) -> Manifest:
        """JSON merge patch of whole values."""
        path = resource.path(name=name, namespace=namespace, subresource=subresource)
        return await self._write("PATCH", path, body=patch, content_type=MERGE)

    async def create(self, resource: Resource, manifest: Mapping[str, Any], namespace: str = "") -> Manifest:
        """Create; 409 if it exists."""
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **manifest}
        return await self._write("POST", resource.path(namespace=namespace), body=body, retried=False)

    async def replace(self, resource: Resource, manifest: Mapping[str, Any], namespace: str = "") -> Manifest:
        """Replace as read, with its resourceVersion; 409 if it changed since."""
        path = resource.path(name=manifest["metadata"]["name"], namespace=namespace)
        return await self._write("PUT", path, body=manifest, retried=False)

    async def delete(self, resource: Resource, name: str, *, namespace: str = "", uid: str = "") -> None:
        """Delete in the background if it is (still) the object of that uid; gone is fine."""
        body: Manifest = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._write("DELETE", resource.path(name=name, namespace=namespace), body=body)
        except ApiServerError as error:
            if not (error.is_not_found or error.is_conflict):
                raise

    async def _write(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any],
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        retried: bool = True,
    ) -> Manifest:
        answer = await self._request(
            method, path, query=query, body=body, content_type=content_type, retried=retried, guarded=True
        )
        self.num_writes += 1
        return answer

    # --- transport --------------------------------------------------------------------------------------------------

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        retried: bool = True,
        guarded: bool = False,
    ) -> Manifest:
        attempts = self._attempts if retried else 1
        for attempt in range(attempts):
            if guarded:
                self.check_may_write()
            try:
                return await self._request_once(method, path, query=query, body=body, content_type=content_type)
            except ApiServerError as error:
                if attempt + 1 == attempts or (error.status and error.status not in RETRIED_STATUS):
                    raise
                delay = min(0.2 * 2**attempt, 2.0)
                logger.info(
                    "%s %s: %s; attempt %d of %d, next in %.1f s", method, path, error, attempt + 1, attempts, delay
                )
                await asyncio.sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _request_once(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
    ) -> Manifest:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": self._user_agent}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self._api.configuration.host + path
        given = {key: value for key, value in (query or {}).items() if value}
        if given:
            url += "?" + urlencode(given)
        try:
            response = await self._api.rest_client.request(
                method,
                url,
                headers=headers,
                body=body,
                _request_timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
            )
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiServerError(0, type(error).__name__, f"{method} {path}: {error}") from error
        try:
            answer = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            text = raw[:200].decode(errors="replace")
            raise ApiServerError(response.status, "NoObject", f"{method} {path}: answered what is no object: {text}")
        if not 200 <= response.status < 300:
            raise ApiServerError(
                response.status, str(answer.get("reason", "")), f"{method} {path}: {answer.get('message')}"
            )
        return answer
