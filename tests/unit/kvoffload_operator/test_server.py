"""The admission server over HTTP: what it answers, and that nothing inside it denies a pod (case 25)."""

import base64
import io
import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvoffload_operator import metrics
from kvoffload_operator.kube import ApiServerError, Resource
from kvoffload_operator.webhook import server as server_module
from kvoffload_operator.webhook.server import AdmissionServer, ObjectCache
from operator_builders import pod_manifest, pool_manifest

DEEPSEEK = ["vllm", "serve", "deepseek-ai/DeepSeek-V3", "-tp", "8"]


class Reader:
    """Objects by name, as the API server would give them; counts and can fail."""

    def __init__(self, **objects: dict[str, Any]) -> None:
        self.objects, self.num_reads, self.error = objects, 0, None

    error: Exception | None

    async def get(self, resource: Resource, name: str, namespace: str = "") -> dict[str, Any] | None:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return self.objects.get(name)


def review(pod: dict[str, Any], namespace: str = "team") -> dict[str, Any]:
    return {"request": {"uid": "u-1", "namespace": namespace, "object": pod}}


async def post(reader: Reader, path: str, body: Any) -> dict[str, Any]:
    admission = AdmissionServer(reader, operator_namespace="kvoffload-system")  # type: ignore[arg-type]
    async with TestClient(TestServer(admission.build_app())) as client:
        answer = await client.post(path, json=body)
        assert answer.status == 200, await answer.text()
        response: dict[str, Any] = (await answer.json())["response"]
    assert response["uid"] == "u-1"
    return response


def count(result: str, reason: str = "") -> float:
    return metrics.injections_total.labels(result=result, reason=reason)._value.get()


def count_pools(result: str) -> float:
    return metrics.pool_validations_total.labels(result=result)._value.get()


def num_invalid(path: str) -> float:
    """Bodies that were not understood, as that webhook counts them."""
    return count_pools("invalid") if path == "/validate-pools" else count("invalid")


async def test_an_opted_in_pod_is_patched_and_counted() -> None:
    before = count("injected")
    response = await post(Reader(main=pool_manifest()), "/mutate-pods/0", review(pod_manifest(command=DEEPSEEK)))
    assert response["allowed"] is True
    operations = json.loads(base64.b64decode(response["patch"]))
    assert {operation["op"] for operation in operations} <= {"add", "replace"}
    assert count("injected") == before + 1


async def test_a_skipped_pod_is_allowed_with_a_warning_that_says_why() -> None:
    response = await post(Reader(), "/mutate-pods/0", review(pod_manifest(command=DEEPSEEK)))
    assert response["allowed"] is True
    assert "PoolNotFound" in response["warnings"][0]


@pytest.mark.parametrize("reader", [Reader(main=pool_manifest()), Reader()], ids=["injected", "skipped"])
async def test_a_replica_that_is_not_the_first_notes_its_number_and_nothing_else(reader: Reader) -> None:
    answers = [
        await post(reader, f"/mutate-pods/{replica}", review(pod_manifest(command=DEEPSEEK))) for replica in (0, 1)
    ]
    first, second = (json.loads(base64.b64decode(answer["patch"])) for answer in answers)
    number = {"op": "add", "path": "/metadata/annotations/kvoffload.io~1webhook-replica", "value": "1"}
    assert second == [*first, number]


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ApiServerError(500, "InternalError", "x"), TimeoutError(), KeyError("spec")]
)
async def test_whatever_is_raised_inside_allows_the_pod_unpatched_and_is_counted(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader()
    reader.error = error
    before = count("error")
    response = await post(reader, "/mutate-pods/0", review(pod_manifest(command=DEEPSEEK)))
    assert response == {"uid": "u-1", "allowed": True}
    assert count("error") == before + 1
    assert type(error).__name__ in caplog.records[-1].getMessage()


@pytest.mark.parametrize("pod", [{}, {"metadata": {}}, {"metadata": {"labels": {"kvoffload.io/pool": 7}}}, None, []])
async def test_a_pod_that_is_no_pod_is_allowed_too(pod: Any) -> None:
    response = await post(Reader(main=pool_manifest()), "/mutate-pods/0", review(pod))
    assert response["allowed"] is True


@pytest.mark.parametrize("path", ["/mutate-pods/0", "/validate-pools"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"\xff",
        b"[" * 100_000,
        b"7" * 5000,
        b"null",
        b"[]",
        b'{"request": null}',
        b'{"request": {"uid": 7}}',
        b'{"request": {"uid": "u-1", "filler": "' + b"x" * server_module.MAX_BODY_BYTES + b'"}}',
    ],
    ids=["empty", "text", "bytes", "deep", "long number", "null", "list", "no request", "no uid", "too large"],
)
async def test_a_body_that_nobody_can_be_answered_for_is_refused_counted_and_said_in_one_line(
    path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    admission = AdmissionServer(Reader(), operator_namespace="kvoffload-system")  # type: ignore[arg-type]
    before = num_invalid(path)
    async with TestClient(TestServer(admission.build_app())) as client:
        answer = await client.post(path, data=io.BytesIO(body))
    assert answer.status == 400
    assert num_invalid(path) == before + 1
    (record,) = caplog.records
    assert record.exc_info is None
    assert len(record.getMessage()) < 400


@pytest.mark.parametrize(
    "given", [{}, {"object": None}, {"object": []}, {"object": {"spec": []}}, {"name": "x" * 9999}]
)
@pytest.mark.parametrize("path", ["/mutate-pods/0", "/validate-pools"])
async def test_whatever_has_a_uid_is_answered(
    path: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    response = await post(Reader(main=pool_manifest()), path, {"request": {"uid": "u-1", **given}})
    assert "patch" not in response
    assert response["allowed"] is True or response["status"]["code"] == 422
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


async def test_a_pod_without_room_for_the_reason_is_allowed_warned_of_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = count("skipped", "PodTooLarge")
    pod = pod_manifest(command=DEEPSEEK, annotations={"a": "x" * ((256 << 10) - 1)})
    response = await post(Reader(main=pool_manifest()), "/mutate-pods/0", review(pod))
    assert response["allowed"] is True
    assert "patch" not in response
    assert "PodTooLarge" in response["warnings"][0]
    assert count("skipped", "PodTooLarge") == before + 1
    assert "the API server takes 262144" in caplog.text


async def test_a_pod_whose_command_line_is_not_read_is_injected_warned_of_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = metrics.unread_command_lines_total._value.get()
    pod = pod_manifest(command=["$(A)" * 1000], container={"env": [{"name": "A", "value": "x" * 1000}]})
    response = await post(Reader(main=pool_manifest()), "/mutate-pods/0", review(pod))
    assert "patch" in response
    assert "more than 524288 characters" in response["warnings"][0]
    assert metrics.unread_command_lines_total._value.get() == before + 1
    assert "team/(generated)" in caplog.text


async def test_a_bug_in_the_injection_itself_allows_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server_module, "inject", broken)
    response = await post(Reader(main=pool_manifest()), "/mutate-pods/0", review(pod_manifest(command=DEEPSEEK)))
    assert response == {"uid": "u-1", "allowed": True}


async def test_a_bug_in_a_pool_s_validation_is_no_failed_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server_module, "validate_pool_spec", broken)
    before = count("error"), count_pools("error")
    body = {"request": {"uid": "u-1", "object": {"spec": {"capacity": "1Gi"}}}}
    response = await post(Reader(), "/validate-pools", body)
    assert response == {"uid": "u-1", "allowed": True}
    assert (count("error"), count_pools("error")) == (before[0], before[1] + 1)


async def test_a_pool_whose_status_is_of_another_version_still_has_its_pods_injected() -> None:
    pool = pool_manifest() | {"status": {"usedBytes": 2**62}}
    assert "patch" in await post(Reader(main=pool), "/mutate-pods/0", review(pod_manifest(command=DEEPSEEK)))


async def test_validation_tells_all_errors_at_once_and_warns_of_what_may_surprise() -> None:
    before = count_pools("refused"), count_pools("allowed")
    spec = {"capacity": (1 << 30) + 1, "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}
    response = await post(Reader(), "/validate-pools", {"request": {"uid": "u-1", "object": {"spec": spec}}})
    assert response["allowed"] is False
    message = response["status"]["message"]
    assert "nearest multiples are 1Gi and 1026Mi" in message
    assert "spec.namespaceSelector.matchExpressions[0].values: operator In needs at least one value" in message
    good = {"capacity": "1Gi", "sharing": "Pool"}
    response = await post(Reader(), "/validate-pools", {"request": {"uid": "u-1", "object": {"spec": good}}})
    assert response["allowed"] is True
    assert len(response["warnings"]) == 2
    assert (count_pools("refused"), count_pools("allowed")) == (before[0] + 1, before[1] + 1)


async def test_a_unit_that_is_none_is_one_message_with_those_that_are() -> None:
    response = await post(
        Reader(), "/validate-pools", {"request": {"uid": "u-1", "object": {"spec": {"capacity": "256MB"}}}}
    )
    assert response["allowed"] is False
    assert response["status"]["message"] == (
        "spec.capacity: '256MB' has an unknown suffix 'MB'; write Ki, Mi, Gi, Ti, Pi, Ei (powers of 1024), k, M, G, T, "
        "P, E (of 1000), or bytes without a suffix"
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_the_cache_reads_once_while_fresh_and_serves_the_old_where_reading_fails() -> None:
    reader, clock = Reader(main=pool_manifest()), Clock()
    cache = ObjectCache(reader, None, clock=clock)  # type: ignore[arg-type]
    assert await cache.get("main") == pool_manifest()
    assert await cache.get("main") == pool_manifest()
    assert reader.num_reads == 1
    clock.now += server_module.FRESH_SECONDS
    reader.error = ApiServerError(0, "down", "x")
    assert await cache.get("main") == pool_manifest()
    clock.now += server_module.STALE_SECONDS
    with pytest.raises(ApiServerError):
        await cache.get("main")


async def test_that_there_is_no_such_pool_is_never_remembered() -> None:
    reader = Reader()
    cache = ObjectCache(reader, None)  # type: ignore[arg-type]
    assert await cache.get("main") is None
    reader.objects["main"] = pool_manifest()
    assert await cache.get("main") is not None
