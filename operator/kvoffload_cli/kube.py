"""The plugin's only module that speaks to the API server: it reads, tries by dry run, and stores nothing."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import urllib3.exceptions
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from kvoffload.errors import KVOffloadError

PAGE_LENGTH = 500
"""Objects in one answer of a list."""
TIMEOUT_SECONDS = 15


class ClusterUnavailable(KVOffloadError):
    """The API server, or the way to it, does not answer as needed."""


class ReadFailed(ClusterUnavailable):
    """The API server answers, and this one request failed: what it asked for is unknown."""


class Denied(KVOffloadError):
    """RBAC does not let this user read it, or a policy refuses what was tried."""


class Reader(Protocol):
    """What observing needs of a cluster. The fixture of the tests is one as well."""

    def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """All objects of a collection; none where its kind does not exist. Raises Denied, ClusterUnavailable."""

    def get(self, path: str) -> dict[str, Any] | None:
        """One object, None where there is none. Raises Denied, ClusterUnavailable."""

    def text(self, path: str, *, query: Mapping[str, str] | None = None) -> str:
        """What a path answers that is no object: a log, or what is proxied. Raises Denied, ClusterUnavailable."""

    def admit(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """What would be stored of a new object, which is not (dry run). Raises Denied, ClusterUnavailable."""


class ClusterReader:
    """Reads through the user's own kubeconfig, as kubectl would."""

    def __init__(
        self, *, kubeconfig: str | None = None, context: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._timeout_seconds = timeout_seconds
        try:
            settings = client.Configuration()
            settings.retries = False  # urllib3 would wait four times as long
            config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
            self._client = client.ApiClient(configuration=settings)
            contexts, current = config.list_kube_config_contexts(config_file=kubeconfig)
        except (ConfigException, yaml.YAMLError, OSError) as error:
            raise ClusterUnavailable(f"no usable kubeconfig ({error}); set KUBECONFIG, or give --kubeconfig") from error
        used = next((one for one in contexts if one["name"] == context), current)
        self.namespace: str = used["context"].get("namespace") or "default"
        """Of the context, which is meant where the user names none."""

    def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """All objects of a collection, page by page."""
        items: list[dict[str, Any]] = []
        query = [("limit", str(PAGE_LENGTH))]
        query += [(name, value) for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value]
        following = ""
        while True:
            answer = self._request(path, [*query, ("continue", following)] if following else query)
            if answer is None:
                return []
            page = json.loads(answer)
            items += page["items"]
            following = page["metadata"].get("continue", "")
            if not following:
                return items

    def get(self, path: str) -> dict[str, Any] | None:
        """One object, None where there is none."""
        answer = self._request(path, [])
        return None if answer is None else json.loads(answer)

    def text(self, path: str, *, query: Mapping[str, str] | None = None) -> str:
        """What a path answers that is no object: a log, or what is proxied."""
        answer = self._request(path, list((query or {}).items()))
        if answer is None:
            raise ReadFailed(f"asking {path} failed (404): not found")
        return answer

    def admit(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """What would be stored of a new object, which is not (dry run)."""
        answer = self._request(path, [("dryRun", "All")], manifest)
        if answer is None:
            raise ReadFailed(f"a dry run of creating in {path} failed (404): not found")
        return dict(json.loads(answer))

    def _request(self, path: str, query: "list[tuple[str, str]]", manifest: dict[str, Any] | None = None) -> str | None:
        request = self._client.param_serialize(
            method="GET" if manifest is None else "POST",
            resource_path=path,
            query_params=query,
            body=manifest,
            header_params={"Accept": "application/json, text/plain;q=0.9", "Content-Type": "application/json"},
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*request, _request_timeout=self._timeout_seconds)
            text = str(response.read().decode("utf-8", "replace"))
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            where = self._client.configuration.host
            raise ClusterUnavailable(f"API server {where} does not answer: {error}") from error
        if response.status == 404:
            return None
        if response.status in (401, 403):
            verb = "reading" if manifest is None else "a dry run of creating in"
            raise Denied(f"{verb} {path} is not allowed ({response.status}): {_message(text)}")
        if manifest is not None and 400 <= response.status < 500:  # a site's policy, not RBAC
            raise Denied(f"a dry run of creating in {path} was refused ({response.status}): {_message(text)}")
        if response.status >= 400:
            raise ReadFailed(f"asking {path} failed ({response.status}): {_message(text)}")
        return text


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
