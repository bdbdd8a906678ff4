"""Restarts of the operator, and what it says of pods that opted in; each test starts the replicas that it needs."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.control_plane import ControlPlane, report_regions, wait_until
from e2e.operator_pools import QUICK, events_of, leftovers, make_pool, make_ready
from e2e.operator_process import OperatorProcess, checked_metrics, free_lease, running_operator, start_operator

pytestmark = pytest.mark.e2e
__all__ = ["make_pool"]


def test_what_happened_while_it_was_away_is_made_good(
    control_plane: ControlPlane, make_pool: Callable[..., str]
) -> None:
    """Killed in the middle of making a pool, and away while another is deleted: the next one converges."""
    operator = start_operator(control_plane, "operator-a", **QUICK)
    wait_until(lambda: operator.is_leader, "the first to lead")
    gone = make_pool("gone")
    make_ready(control_plane, gone)
    operator.process.send_signal(signal.SIGSTOP)
    free_lease(control_plane)
    try:
        control_plane.kubectl("delete", "kvpool", gone)
        half = make_pool("half")
        successor = start_operator(control_plane, "operator-b", **QUICK)
        wait_until(lambda: successor.is_leader, "the successor to lead")
        wait_until(lambda: control_plane.find("kvregion", f"{half}.n1") is not None, "the first region")
        successor.process.kill()
        successor.process.wait()
        free_lease(control_plane)
        with running_operator(control_plane, "operator-c", **QUICK):
            make_ready(control_plane, half)
            wait_until(lambda: not leftovers(control_plane, [gone]), "what was left of the deleted pool to go")
            control_plane.kubectl("delete", "kvpool", half)
            wait_until(lambda: not leftovers(control_plane, [half]), "the other pool's to go while somebody works")
    finally:
        operator.process.send_signal(signal.SIGCONT)
        operator.stop(signal.SIGKILL)


# --- opted-in pods --------------------------------------------------------------------------------------------------


@pytest.fixture
def make_pod(control_plane: ControlPlane) -> Iterator[Callable[..., dict[str, Any]]]:
    made: list[tuple[str, str]] = []

    def make(
        name: str, *, pool: str, node: str = "n1", namespace: str = "default", runs: bool = True, **annotations: str
    ) -> dict[str, Any]:
        control_plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "labels": {"kvoffload.io/pool": pool} if pool else {},
                    "annotations": {
                        f"kvoffload.io/{key.replace('_', '-')}": value for key, value in annotations.items()
                    },
                },
                "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}]},
            }
        )
        where = f"--namespace={namespace}"
        made.append((name, where))
        if runs:
            run(control_plane, name, namespace)
        pod: dict[str, Any] = control_plane.get("pod", name, where)
        return pod

    yield make
    for name, where in made:
        control_plane.kubectl("delete", "pod", name, where, "--force", "--grace-period=0", "--ignore-not-found")


def run(plane: ControlPlane, pod: str, namespace: str = "default") -> None:
    """Be the kubelet: the pod's containers start now."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    patch = json.dumps({"status": {"phase": "Running", "startTime": started}})
    where = f"--namespace={namespace}"
    plane.kubectl("patch", "pod", pod, where, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture
def second_operator(control_plane: ControlPlane) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, "operator-d", **QUICK) as running:
        yield running


def reasons(plane: ControlPlane, pod: str, namespace: str = "default") -> list[str]:
    return sorted(one["reason"] for one in events_of(plane, pod, namespace))


def test_case_26_pods_that_the_webhook_missed_are_named_by_one_event_also_after_a_restart(
    control_plane: ControlPlane, make_pod: Callable[..., Any]
) -> None:
    pod = make_pod("missed", pool="nowhere")
    for name in ("operator-e", "operator-f"):
        with running_operator(control_plane, name, **QUICK):
            later = f"missed-{name}"  # the other pod's turn is before its own
            make_pod(later, pool="nowhere")
            wait_until(lambda: reasons(control_plane, later) == ["MissedByWebhook"], "the later event")  # noqa: B023
            wait_until(lambda: reasons(control_plane, "missed") == ["MissedByWebhook"], "the event")
    (event,) = events_of(control_plane, "missed")
    assert "no webhook answered when the pod was created" in event["message"]
    assert event["involvedObject"]["uid"] == pod["metadata"]["uid"]


def test_a_label_that_came_later_and_a_namespace_that_is_left_out_are_not_laid_to_the_webhook(
    control_plane: ControlPlane, second_operator: OperatorProcess, make_pod: Callable[..., Any]
) -> None:
    make_pod("late", pool="")
    control_plane.kubectl("label", "pod", "late", "kvoffload.io/pool=nowhere")
    make_pod("system", pool="nowhere", namespace="kube-system")
    wait_until(lambda: reasons(control_plane, "late") == ["MissedByWebhook"], "the event")
    (event,) = events_of(control_plane, "late")
    assert "the label kvoffload.io/pool came after the pod was created, and" in event["message"]
    wait_until(lambda: reasons(control_plane, "system", "kube-system") == ["NotInjected"], "the other event")
    (event,) = events_of(control_plane, "system", "kube-system")
    assert "NamespaceNotAllowed" in event["message"]


def test_pods_that_the_webhook_missed_are_counted_while_they_run(
    control_plane: ControlPlane, make_pod: Callable[..., Any]
) -> None:
    sample = 'kvoffload_operator_unattached_pods{reason="MissedByWebhook"}'

    def count() -> float | None:
        return checked_metrics(running.metrics_port).get(sample)

    with running_operator(control_plane, "operator-m", **QUICK) as running:
        wait_until(lambda: count() == 0, "the first sweep")
        names = ("missed-a", "missed-b")
        for name in names:
            make_pod(name, pool="nowhere")
        wait_until(lambda: count() == 2, "both to be counted")
        for name in names:
            control_plane.kubectl("delete", "pod", name, "--force", "--grace-period=0")
        wait_until(lambda: count() == 0, "both to be forgotten")
        shown = checked_metrics(running.metrics_port)
    assert shown["kvoffload_operator_leader"] == 1
    assert shown["kvoffload_operator_injection_ready"] == 0, "no webhook is here"
    assert shown["kvoffload_operator_api_writes_total"] > 0
    assert shown['kvoffload_operator_reconcile_errors_total{kind="pool"}'] == 0


def test_what_the_webhook_decided_is_one_event(
    control_plane: ControlPlane, second_operator: OperatorProcess, make_pod: Callable[..., Any]
) -> None:
    make_pod("skipped", pool="nowhere", skip_reason="UserConnector")
    wait_until(lambda: reasons(control_plane, "skipped") == ["NotInjected"], "the event")
    assert "UserConnector" in events_of(control_plane, "skipped")[0]["message"]


def test_an_injected_pod_without_an_engine_is_called_unattached_and_one_with_an_engine_is_not(
    control_plane: ControlPlane,
    second_operator: OperatorProcess,
    make_pool: Callable[..., str],
    make_pod: Callable[..., Any],
) -> None:
    pool = make_pool("attach")
    make_ready(control_plane, pool)
    layout = "replicated (Replicated: x)"
    attached = make_pod("attached", pool=pool, injected="0.1.0", replicated_layout=layout, runs=False)
    engine = {
        "podNamespace": "default",
        "podName": "attached",
        "podUID": attached["metadata"]["uid"],
        "engineID": "e",
        "predictedLayout": "replicated",
        "confirmedLayout": "per-rank",
        "reason": "LayerNotReplicated",
        "message": "layer 3 is a FullAttentionSpec",
    }
    report_regions(control_plane, engines=[engine], enginesAttached=1)
    wait_until(
        lambda: reasons(control_plane, "attached") == ["Injected", "LayoutNotConfirmed"], "the disagreement to be told"
    )
    run(control_plane, "attached")  # only now: one that runs for a while and is not reported is called unattached
    make_pod("alone", pool=pool, injected="0.1.0", replicated_layout="auto (UnknownModel: x)")
    wait_until(lambda: reasons(control_plane, "alone") == ["Injected", "Unattached"], "the sweep to name it")
    assert reasons(control_plane, "attached") == ["Injected", "LayoutNotConfirmed"]
    told = next(one for one in events_of(control_plane, "attached") if one["reason"] == "LayoutNotConfirmed")
    assert "LayerNotReplicated" in told["message"]
