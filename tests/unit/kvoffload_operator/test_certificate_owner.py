"""An operator that ends with its Deployment makes no certificate that nobody would serve."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvoffload.errors import KVOffloadError
from kvoffload_operator.kube import DEPLOYMENTS, SECRETS, Resource
from kvoffload_operator.webhook.certificates import ensure_certificates

OWNER = {"name": "kvoffload-operator", "uid": "u-1"}


class ApiServer:
    """Has no Secret, and one Deployment or none; keeps what is created."""

    def __init__(self, deployment: dict[str, Any] | None) -> None:
        self.deployment, self.created = deployment, list[Resource]()

    async def get(self, resource: Resource, name: str, namespace: str = "") -> dict[str, Any] | None:
        return self.deployment if (resource, name) == (DEPLOYMENTS, OWNER["name"]) else None

    async def create(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> None:
        self.created.append(resource)


async def ensure(kube: ApiServer) -> None:
    await ensure_certificates(
        kube,  # type: ignore[arg-type]
        namespace="kvoffload-system",
        secret="tls",
        dns_names=("kvoffload-webhook",),
        configurations=(),
        owner=OWNER,
        lifetime=timedelta(days=1),
        now=datetime(2026, 11, 30, tzinfo=UTC),
    )


async def test_a_deployment_that_is_there_gets_its_secret() -> None:
    kube = ApiServer({"metadata": {"uid": "u-1"}})
    await ensure(kube)
    assert kube.created == [SECRETS]


@pytest.mark.parametrize(
    "deployment",
    [None, {"metadata": {"uid": "u-2"}}, {"metadata": {"uid": "u-1", "deletionTimestamp": "2026-11-30T00:00:00Z"}}],
    ids=["gone", "another", "going"],
)
async def test_one_that_goes_gets_none_and_says_so(deployment: dict[str, Any] | None) -> None:
    kube = ApiServer(deployment)
    with pytest.raises(KVOffloadError, match="is gone or goes"):
        await ensure(kube)
    assert kube.created == []
