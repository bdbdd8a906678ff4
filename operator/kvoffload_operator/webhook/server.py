"""The admission server: an aiohttp application behind TLS. Runs in the webhook's Deployment, started by `__main__`.

`/mutate-pods/N` (N is the replica that the API server calls) answers with `inject`'s patch, `/validate-pools` with
`validate_pool_spec`'s verdict. Whatever is raised inside ends as `allowed: true` without a patch, a counter and a log
line: a bug must not deny a user's pod. A body without a uid to answer ends as 400, a counter and a log line. Pools and
namespaces are read through a small cache; an API server that does not answer in time counts as raised.
"""

import asyncio
import base64
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from kvoffload.api.keys import POOL_LABEL, WEBHOOK_REPLICA_ANNOTATION, SkipReason
from kvoffload.api.pool import KVOffloadPoolSpec
from kvoffload.errors import KVOffloadError
from kvoffload_operator import metrics
from kvoffload_operator.kube import NAMESPACES, POOLS, KubeClient, Resource
from kvoffload_operator.observe import describe_spec_error
from kvoffload_operator.webhook.injection import Outcome, PoolFacts, inject
from kvoffload_operator.webhook.patch import Operation, annotation_path
from kvoffload_operator.webhook.validation import validate_pool_spec

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
"""An AdmissionReview holds a pod, at most 1.5 MiB in etcd."""
DECISION_SECONDS = 1.5
"""Below the configuration's timeoutSeconds of 2, so that our answer and not a timeout is what is counted."""
VALIDATE_POOLS = "validate-pools"
FRESH_SECONDS = 2.0
STALE_SECONDS = 60.0


class ObjectCache:
    """Objects by name, at most `FRESH_SECONDS` old: one request for each at a time, an older answer if none comes."""

    def __init__(self, kube: KubeClient, resource: Resource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._resource, self._clock = kube, resource, clock
        self._found: dict[str, tuple[float, dict[str, Any]]] = {}
        self._pending: dict[str, asyncio.Task[dict[str, Any] | None]] = {}

    async def get(self, name: str) -> dict[str, Any] | None:
        """The object, None if there is none (which is never cached: it may come to be at any moment)."""
        known = self._found.get(name)
        if known is not None and self._clock() - known[0] < FRESH_SECONDS:
            return known[1]
        task = self._pending.get(name)
        if task is None:
            task = asyncio.create_task(self._read(name))
            self._pending[name] = task
            task.add_done_callback(lambda _: self._pending.pop(name, None))
        try:
            return await asyncio.wait_for(asyncio.shield(task), DECISION_SECONDS / 3)
        except Exception:
            if known is not None and self._clock() - known[0] < STALE_SECONDS:
                return known[1]
            raise

    async def _read(self, name: str) -> dict[str, Any] | None:
        found = await self._kube.get(self._resource, name)
        if found is None:
            self._found.pop(name, None)
        else:
            if len(self._found) > 10_000:
                self._found.clear()
            self._found[name] = (self._clock(), found)
        return found


class AdmissionServer:
    """Routes and their state."""

    def __init__(
        self, kube: KubeClient, *, operator_namespace: str, step_deadline_seconds: float | None = None
    ) -> None:
        self._pools, self._namespaces = ObjectCache(kube, POOLS), ObjectCache(kube, NAMESPACES)
        self._operator_namespace = operator_namespace
        self._specs: dict[str, tuple[str, KVOffloadPoolSpec]] = {}
        self._step_deadline_seconds = step_deadline_seconds
        self.is_draining = False
        """This replica is about to end: every answer closes its connection, so that callers turn to another replica."""

    def build_app(self) -> web.Application:
        """The application with its routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post(r"/mutate-pods/{replica:\d}", self._handle("mutate-pods", self.mutate)),
                web.post(f"/{VALIDATE_POOLS}", self._handle(VALIDATE_POOLS, self.validate)),
            ]
        )
        return app

    def _handle(
        self, name: str, decide: Callable[..., Awaitable[dict[str, Any]]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        duration = metrics.admission_duration_seconds.labels(webhook=name)

        def count(result: str) -> None:
            if name == VALIDATE_POOLS:
                metrics.pool_validations_total.labels(result=result).inc()
            else:
                metrics.injections_total.labels(result=result, reason="").inc()

        async def handler(request: web.Request) -> web.Response:
            with duration.time():
                try:
                    asked = await read_review(request)
                except InvalidReview as error:
                    logger.warning("%s: a body from %s is no AdmissionReview: %.200s", name, request.remote, error)
                    count("invalid")
                    return web.Response(status=400, text="needed: an AdmissionReview with a request and its uid\n")
                try:
                    answer = await decide(asked, **request.match_info)
                except Exception as error:
                    words = f"{type(error).__name__}: {error}"
                    logger.error("%s: %.300s stays as it is: %.300s", name, _subject(asked), words, exc_info=error)
                    count("error")
                    answer = {"allowed": True}
            response = web.json_response(
                {
                    "apiVersion": "admission.k8s.io/v1",
                    "kind": "AdmissionReview",
                    "response": {"uid": asked["uid"], **answer},
                }
            )
            if self.is_draining:
                response.force_close()
            return response

        return handler

    async def mutate(self, request: dict[str, Any], replica: str) -> dict[str, Any]:
        """Response to a pod's creation; always allows it, or raises."""
        async with asyncio.timeout(DECISION_SECONDS):
            outcome = await self._decide(request)
        if outcome.skip_reason is not None:
            if not outcome.operations and outcome.skip_reason is SkipReason.POD_TOO_LARGE:
                # the pod itself cannot say it
                logger.warning("pod %.300s stays as it is: %s", _subject(request), outcome.message)
            metrics.injections_total.labels(result="skipped", reason=str(outcome.skip_reason)).inc()
        else:
            result = "injected" if outcome.operations else "unchanged"
            metrics.injections_total.labels(result=result, reason="").inc()
        response: dict[str, Any] = {"allowed": True}
        warnings: list[str] = []
        if outcome.unread:
            logger.warning("pod %.300s: %s", _subject(request), outcome.unread)
            metrics.unread_command_lines_total.inc()
            warnings.append(f"kvoffload: {outcome.unread}; its layout is not predicted")
        if outcome.operations:
            operations = (*outcome.operations, *mark_replica(replica))
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(operations).encode()).decode()
        if outcome.skip_reason is not None:
            warnings.append(f"kvoffload: {outcome.skip_reason}: {outcome.message}; the pod runs without offload")
        if warnings:
            response["warnings"] = warnings
        return response

    async def _decide(self, request: dict[str, Any]) -> Outcome:
        pod = request["object"]
        pool_name = pod["metadata"]["labels"][POOL_LABEL]
        spec = self._parse(await self._pools.get(pool_name))
        labels: dict[str, str] = {}
        if spec is not None and spec.namespace_selector is not None:
            namespace = await self._namespaces.get(request["namespace"])
            labels = ((namespace or {}).get("metadata") or {}).get("labels") or {}
        facts = PoolFacts(
            name=pool_name,
            spec=spec,
            namespace=request["namespace"],
            namespace_labels=labels,
            operator_namespace=self._operator_namespace,
            step_deadline_seconds=self._step_deadline_seconds,
        )
        return inject(pod, facts)

    def _parse(self, manifest: dict[str, Any] | None) -> KVOffloadPoolSpec | None:
        """The pool's spec; parsed once for each version of the pool, not for each pod."""
        if manifest is None:
            return None
        name, version = manifest["metadata"]["name"], manifest["metadata"].get("resourceVersion", "")
        known = self._specs.get(name)
        if known is None or known[0] != version:
            known = self._specs[name] = version, KVOffloadPoolSpec.model_validate(manifest["spec"])
        return known[1]

    async def validate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Response to a pool's creation or change."""
        spec = (request.get("object") or {}).get("spec", {})
        try:
            validation = validate_pool_spec(KVOffloadPoolSpec.model_validate(spec))
        except ValidationError as error:
            return _refusal(describe_spec_error(error))
        if validation.errors:
            return _refusal("; ".join(map(str, validation.errors)))
        metrics.pool_validations_total.labels(result="allowed").inc()
        return {"allowed": True, "warnings": list(validation.warnings)}


class InvalidReview(KVOffloadError):
    """A body that nobody can be answered for."""


async def read_review(request: web.Request) -> dict[str, Any]:
    """The request of the AdmissionReview, which has a uid. Raises InvalidReview."""
    try:
        review = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise InvalidReview(f"it has more than {MAX_BODY_BYTES} bytes") from error
    except (ValueError, RecursionError) as error:
        raise InvalidReview(f"{type(error).__name__}: {error}") from error
    asked = review.get("request") if isinstance(review, dict) else None
    if not isinstance(asked, dict) or not isinstance(asked.get("uid"), str):
        raise InvalidReview("it has no request with a uid")
    return asked


def mark_replica(replica: str) -> tuple[Operation, ...]:
    """After any other operation: says who answered, where it was not the first, which its configuration looks for."""
    if replica == "0":
        return ()
    return ({"op": "add", "path": annotation_path(WEBHOOK_REPLICA_ANNOTATION), "value": replica},)


def _subject(request: dict[str, Any]) -> str:
    """The object of a request, for the log."""
    return f"{request.get('namespace')}/{request.get('name') or '(generated)'}"


def _refusal(message: str) -> dict[str, Any]:
    metrics.pool_validations_total.labels(result="refused").inc()
    return {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": message}}
