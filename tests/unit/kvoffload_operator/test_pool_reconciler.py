"""Whole passes over a pool: what is said where something fails, and what is left to somebody else."""

from typing import Any

import pytest

from kvoffload_operator.events import EventRecorder
from kvoffload_operator.kube import DAEMONSETS, ApiServerError, Resource
from kvoffload_operator.reconcilers.pool import PoolReconciler
from kvoffload_operator.view import ClusterView
from operator_builders import NOW, daemonset_options, pool_manifest


class ApiServer:
    """Somebody else's DaemonSet has the pool's name: refuses to take it over unless forced; keeps what it was told."""

    def __init__(self) -> None:
        self.is_taken = True
        self.applied: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []

    async def apply(
        self, resource: Resource, manifest: dict[str, Any], *, force: bool = True, **_: Any
    ) -> dict[str, Any]:
        if resource is DAEMONSETS and self.is_taken and not force:
            raise ApiServerError(409, "Conflict", 'Apply failed with 1 conflict: conflict with "kubectl-create"')
        self.applied.append((resource.plural, manifest))
        return {**pool_manifest(), **manifest, "metadata": {"uid": "u", "generation": 1, **manifest["metadata"]}}

    async def list_all(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return []

    async def create(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self.events.append(manifest)
        return manifest


def reconciler(server: ApiServer) -> PoolReconciler:
    """Of a cluster with one pool and no node."""
    view = ClusterView()
    view.update_pool(pool_manifest())
    return PoolReconciler(
        server,  # type: ignore[arg-type]
        view,
        options=daemonset_options(),
        recorder=EventRecorder(server, instance="test"),  # type: ignore[arg-type]
        silence_seconds=90,
        write_parallelism=1,
    )


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("division by zero"),
        ApiServerError(422, "Invalid", 'DaemonSet "kvoffload-main" is invalid: spec.template'),
    ],
)
async def test_what_trying_again_may_not_mend_is_said_in_the_pool_once_and_raised(error: Exception) -> None:
    class Broken(ApiServer):
        async def apply(self, resource: Resource, manifest: dict[str, Any], **given: Any) -> dict[str, Any]:
            if resource is DAEMONSETS:
                raise error
            return await super().apply(resource, manifest, **given)

    server = Broken()
    pools = reconciler(server)
    for _ in range(2):
        with pytest.raises(type(error)):
            await pools.reconcile("main", NOW)
    ((_, written),) = server.applied
    (found,) = written["status"]["conditions"]
    assert (found["type"], found["status"], found["reason"]) == ("Ready", "False", "ReconcileFailed")
    assert f"failed at this pool ({type(error).__name__}: {error}) and tries again" in found["message"]
    assert [(one["reason"], one["type"]) for one in server.events] == [("ReconcileFailed", "Warning")]


async def test_what_a_pass_met_is_raised_where_it_cannot_be_said_either(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ApiServer):
        async def apply(self, resource: Resource, *_: Any, **__: Any) -> dict[str, Any]:
            if resource is DAEMONSETS:
                raise ZeroDivisionError
            raise ApiServerError(503, "ServiceUnavailable", "etcd")

    pools = reconciler(Broken())
    with pytest.raises(ZeroDivisionError):
        await pools.reconcile("main", NOW)
    assert "pool main: its status was not written" in caplog.text


async def test_a_daemonset_that_somebody_else_made_is_left_alone_and_said_until_its_name_is_free() -> None:
    server = ApiServer()
    pools = reconciler(server)
    assert await pools.reconcile("main", NOW) is not None, "it comes back by itself"
    ((kind, written),) = server.applied
    assert kind == "kvoffloadpools"
    (found,) = [one for one in written["status"]["conditions"] if one["type"] == "RegionsProvisioned"]
    assert (found["status"], found["reason"]) == ("False", "DaemonSetNameTaken")
    assert "DaemonSet kvoffload-system/kvoffload-main is there and not this pool's" in found["message"]
    assert "Delete or rename it" in found["message"]
    assert ("DaemonSetNameTaken", "Warning") in [(one["reason"], one["type"]) for one in server.events]
    server.is_taken = False
    await pools.reconcile("main", NOW)
    assert [kind for kind, _ in server.applied] == ["kvoffloadpools", "daemonsets", "kvoffloadpools"]
