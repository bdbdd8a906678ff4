"""Whether a pod created now would be injected: by any replica that can be called."""

from typing import Any

import pytest

from kvoffload.api.conditions import PoolReason
from kvoffload_operator.kube import DEPLOYMENTS, MUTATING_WEBHOOKS, Resource
from kvoffload_operator.settings import Settings
from kvoffload_operator.webhook.certificates import ensure_bundle
from kvoffload_operator.webhook_health import observe_injection, service_names

SERVING = {"caBundle": "Q0E=", "available": 1}
NO_CONFIGURATION = {"caBundle": None, "available": 1}
NO_CA = {"caBundle": "", "available": 1}
EMPTIED = {"caBundle": [], "available": 1}
AWAY = {"caBundle": "Q0E=", "available": 0}


class Reader:
    """What the API server says about each replica."""

    def __init__(self, *replicas: dict[str, Any]) -> None:
        self.replicas = replicas

    async def get(self, resource: Resource, name: str, namespace: str = "") -> dict[str, Any] | None:
        replica = self.replicas[int(name.removeprefix("kvoffload-webhook-"))]
        if resource is DEPLOYMENTS:
            return {"status": {"replicas": 1, "availableReplicas": replica["available"]}}
        if replica["caBundle"] is None:
            return None
        if replica["caBundle"] == []:
            return {"metadata": {}}  # as the API server shows an empty list
        return {"webhooks": [{"clientConfig": {"caBundle": replica["caBundle"]}}]}


@pytest.mark.parametrize(
    ("replicas", "reason", "message"),
    [
        ([SERVING, SERVING], PoolReason.WEBHOOK_SERVING, "2 of 2 replicas answer"),
        ([AWAY, SERVING], PoolReason.WEBHOOK_SERVING, "1 of 2 replicas answer"),
        ([SERVING, NO_CONFIGURATION], PoolReason.WEBHOOK_SERVING, "1 of 2 replicas answer"),
        ([AWAY, AWAY], PoolReason.WEBHOOK_UNAVAILABLE, "(kvoffload-system/kvoffload-webhook-0: 0 of 1 pods)"),
        ([NO_CONFIGURATION], PoolReason.WEBHOOK_UNAVAILABLE, "Configuration kvoffload-webhook-0 is gone"),
        ([EMPTIED], PoolReason.WEBHOOK_UNAVAILABLE, "Configuration kvoffload-webhook-0 has no webhooks any more"),
        ([EMPTIED, SERVING], PoolReason.WEBHOOK_SERVING, "1 of 2 replicas answer"),
        ([NO_CA, AWAY], PoolReason.CERTIFICATE_MISSING, "Configuration kvoffload-webhook-0 has no caBundle"),
        ([], PoolReason.WEBHOOK_UNAVAILABLE, "webhook.replicas is 0"),
    ],
)
async def test_one_replica_that_can_be_called_is_enough(
    replicas: list[dict[str, Any]], reason: PoolReason, message: str
) -> None:
    settings = Settings(webhook_replicas=len(replicas))
    health = await observe_injection(Reader(*replicas), settings)  # type: ignore[arg-type]
    assert health.reason is reason
    assert message in health.message


async def test_a_configuration_that_somebody_emptied_needs_no_bundle() -> None:
    await ensure_bundle(Reader(EMPTIED), MUTATING_WEBHOOKS, "kvoffload-webhook-0", b"CA")  # type: ignore[arg-type]


def test_the_certificate_is_for_every_service() -> None:
    names = service_names(Settings(namespace="kv", webhook_name="w", webhook_replicas=2))
    assert {"w.kv.svc", "w-0.kv.svc", "w-1.kv.svc"} <= set(names)
