"""Events of opted-in pods, and which of them run unattached."""

from datetime import timedelta
from typing import Any

import pytest

from kvoffload.api.region import KVOffloadRegion
from kvoffload_operator.observe import ObservedPod
from kvoffload_operator.reconcilers.pod import PodPlan, is_unattached, plan_pod
from kvoffload_operator.resources.region import build_region, build_region_spec
from operator_builders import NOW, spec_of

AFTER = timedelta(seconds=120)


def pod(**changes: Any) -> ObservedPod:
    fields: dict[str, Any] = {
        "namespace": "team",
        "name": "server-1",
        "uid": "uid-pod",
        "pool": "main",
        "node": "a",
        "injected": "0.1.0",
        "skip_reason": "",
        "predicted_layout": "replicated (Replicated: x)",
        "is_running": True,
        "is_over": False,
        "started_at": NOW - timedelta(seconds=600),
        **changes,
    }
    return ObservedPod(**fields)


def region(*engines: dict[str, Any], attached: int | None = None) -> KVOffloadRegion:
    manifest = build_region("main", "u", build_region_spec("main", "a", spec_of()))
    count = len(engines) if attached is None else attached
    manifest["status"] = {"engines": list(engines), "enginesAttached": count}
    return KVOffloadRegion.from_manifest(manifest)


def engine(**changes: Any) -> dict[str, Any]:
    return {"podNamespace": "team", "podName": "server-1", "podUID": "uid-pod", "engineID": "e", **changes}


def reasons(given: ObservedPod, at: KVOffloadRegion | None) -> list[str]:
    return [plan.reason for plan in plans_of(given, at)]


def plans_of(given: ObservedPod, at: KVOffloadRegion | None = None) -> list[PodPlan]:
    return plan_pod(given, at, now=NOW, unattached_after=AFTER, namespace="kvoffload-system")


@pytest.mark.parametrize(
    ("given", "at", "expected"),
    [
        (pod(), region(engine()), ["Injected"]),
        (pod(), region(), ["Injected", "Unattached"]),
        (pod(), None, ["Injected", "Unattached"]),
        (pod(started_at=NOW - timedelta(seconds=60)), region(), ["Injected"]),
        (pod(is_running=False), region(), ["Injected"]),
        (pod(), region(attached=65), ["Injected"]),
        (pod(injected="", skip_reason="UserConnector"), None, ["NotInjected"]),
        (pod(injected=""), None, ["MissedByWebhook"]),
        (pod(is_over=True), None, []),
        (
            pod(),
            region(engine(predictedLayout="replicated", confirmedLayout="per-rank", reason="LayerNotReplicated")),
            ["Injected", "LayoutNotConfirmed"],
        ),
        *(
            (
                pod(),
                region(engine(predictedLayout=predicted, confirmedLayout="left-alone", reason="MultiNode"), attached=0),
                ["Injected", "EngineDeclined"],
            )
            for predicted in ("replicated", "auto")
        ),
        (pod(), region(engine(predictedLayout="replicated", confirmedLayout="")), ["Injected"]),
        (pod(), region(engine(predictedLayout="auto", confirmedLayout="per-rank")), ["Injected"]),
    ],
)
def test_what_is_said_of_a_pod(given: ObservedPod, at: KVOffloadRegion | None, expected: list[str]) -> None:
    assert reasons(given, at) == expected


def test_only_what_mode_observe_left_alone_is_no_warning() -> None:
    observed = plans_of(pod(injected="", skip_reason="PoolObserved"))
    skipped = plans_of(pod(injected="", skip_reason="MultiNode"))
    assert [plan.warning for plan in (*observed, *skipped)] == [False, True]


@pytest.mark.parametrize(
    ("late", "said", "remedy"),
    [
        (True, "came after the pod was created, and the webhook looks at new pods only", "put the label into the pod"),
        (False, ": no webhook answered when the pod was created", "recreate the pod"),
        (None, "came after the pod was created, or no webhook answered then", "recreate the pod"),
    ],
)
def test_the_webhook_is_not_blamed_for_a_label_that_came_later(late: bool | None, said: str, remedy: str) -> None:
    (plan,) = plans_of(pod(injected="", label_is_late=late))
    assert (plan.reason, plan.warning) == ("MissedByWebhook", True)
    assert said in plan.note
    assert remedy in plan.note


@pytest.mark.parametrize("namespace", ["kube-system", "kvoffload-system"])
def test_a_pod_where_the_webhook_is_never_asked_was_not_missed(namespace: str) -> None:
    (plan,) = plans_of(pod(injected="", namespace=namespace))
    assert plan.reason == "NotInjected"
    assert "NamespaceNotAllowed" in plan.note


def test_a_pod_becomes_unattached_exactly_when_its_time_is_over() -> None:
    late, early = pod(started_at=NOW - AFTER), pod(started_at=NOW - AFTER + timedelta(seconds=1))
    assert is_unattached(late, region(), now=NOW, unattached_after=AFTER)
    assert not is_unattached(early, region(), now=NOW, unattached_after=AFTER)
