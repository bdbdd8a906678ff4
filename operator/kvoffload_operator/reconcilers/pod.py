"""Looks at pods that opted in: says by one event what the webhook did with each, and finds those that run unattached.

The webhook writes annotations only, because at admission the pod may never come to be; the event is written here once
it exists. `plan_pod` is pure. Nothing is ever changed on a user's pod.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvoffload.api.keys import POOL_LABEL, SKIP_REASON_ANNOTATION, SkipReason
from kvoffload.api.opt_in import is_never_injected, remedy_of_missed, why_missed
from kvoffload.api.region import MAX_ENGINES, KVOffloadRegion, RegionEngine, region_name
from kvoffload_operator.events import EventRecorder, PodEvent, Regarding
from kvoffload_operator.observe import ObservedPod
from kvoffload_operator.view import ClusterView

UNATTACHED_REASONS: tuple[str, ...] = (*SkipReason, PodEvent.MISSED_BY_WEBHOOK, PodEvent.UNATTACHED)
"""Every reason of `count_unattached`."""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What to say about a pod."""

    reason: PodEvent
    note: str
    warning: bool


def plan_pod(
    pod: ObservedPod, region: KVOffloadRegion | None, *, now: datetime, unattached_after: timedelta, namespace: str
) -> list[PodPlan]:
    """Events that are due for this pod. `namespace` is the operator's own."""
    if pod.is_over:
        return []
    if not pod.injected:
        return [_not_injected(pod, namespace)]
    plans = [
        PodPlan(
            PodEvent.INJECTED,
            f"injected by kvoffload {pod.injected} for pool {pod.pool}; predicted layout {pod.predicted_layout}",
            warning=False,
        )
    ]
    engines = _engines(pod, region)
    if is_unattached(pod, region, now=now, unattached_after=unattached_after):
        waited = (now - pod.started_at).total_seconds() if pod.started_at else 0
        plans.append(
            PodPlan(
                PodEvent.UNATTACHED,
                f"runs for {waited:.0f} s on node {pod.node} and no engine of it is attached to pool {pod.pool}: it "
                f"serves without offload. `kubectl kvoffload explain pod {pod.namespace}/{pod.name}` says what to do",
                warning=True,
            )
        )
    for engine in engines:
        if engine.is_left_alone:
            plans.append(
                PodPlan(
                    PodEvent.ENGINE_DECLINED,
                    f"an engine of it declined offload and serves without it ({engine.reason}): {engine.message}",
                    warning=True,
                )
            )
        elif engine.is_mispredicted:
            plans.append(
                PodPlan(
                    PodEvent.LAYOUT_NOT_CONFIRMED,
                    f"engine {engine.engine_id}: predicted replicated, its ranks found {engine.confirmed_layout} "
                    f"({engine.reason}): {engine.message}",
                    warning=True,
                )
            )
    return plans


def _not_injected(pod: ObservedPod, namespace: str) -> PodPlan:
    reason = _skip_reason(pod, namespace)
    if reason:
        documented = reason in set(SkipReason)
        hint = "" if documented else " (not a reason of this version)"
        return PodPlan(
            PodEvent.NOT_INJECTED,
            f"not injected for pool {pod.pool}: {reason}{hint}; it serves without offload. `kubectl kvoffload "
            f"explain pod {pod.namespace}/{pod.name}` has the remedy; the pod must be created anew for it",
            warning=reason != SkipReason.POOL_OBSERVED,
        )
    return PodPlan(
        PodEvent.MISSED_BY_WEBHOOK,
        f"has the label {POOL_LABEL}={pod.pool} and neither an injection nor {SKIP_REASON_ANNOTATION}: "
        f"{why_missed(pod.label_is_late)}. It serves without offload; {remedy_of_missed(pod.label_is_late)}",
        warning=True,
    )


def _skip_reason(pod: ObservedPod, namespace: str) -> str:
    """The webhook's reason, or that of the namespaces in which it is never asked."""
    if not pod.skip_reason and is_never_injected(pod.namespace, {namespace}):
        return SkipReason.NAMESPACE_NOT_ALLOWED
    return pod.skip_reason


def _engines(pod: ObservedPod, region: KVOffloadRegion | None) -> list[RegionEngine]:
    return [engine for engine in region.status.engines if engine.pod_uid == pod.uid] if region else []


def is_unattached(
    pod: ObservedPod, region: KVOffloadRegion | None, *, now: datetime, unattached_after: timedelta
) -> bool:
    """Whether an injected pod has run long enough to have an engine attached, and has none; one that declined offload
    is told by an event and a metric of its own."""
    if pod.is_over or not pod.is_running or pod.started_at is None or now - pod.started_at < unattached_after:
        return False
    if _engines(pod, region):
        return False
    # the region names 64 engines only; with more attached nothing can be said
    return region is None or region.status.engines_attached <= MAX_ENGINES


class PodReconciler:
    """Writes the events and counts."""

    def __init__(
        self, view: ClusterView, recorder: EventRecorder, *, unattached_seconds: float, namespace: str
    ) -> None:
        self._view, self._recorder, self._namespace = view, recorder, namespace
        self._unattached_after = timedelta(seconds=unattached_seconds)

    async def reconcile(self, key: str, now: datetime) -> float | None:
        """One pass over one pod; returns seconds after which to look again."""
        pod = self._view.pods.get(key)
        if pod is None:
            return None
        region = self._view.regions.get(region_name(pod.pool, pod.node)) if pod.node else None
        plans = plan_pod(pod, region, now=now, unattached_after=self._unattached_after, namespace=self._namespace)
        for plan in plans:
            await self._recorder.record(
                Regarding.pod(pod.namespace, pod.name, pod.uid),
                reason=plan.reason,
                note=plan.note,
                warning=plan.warning,
                action="Inject",
            )
        waits = pod.injected and not pod.is_over and not _engines(pod, region)
        return self._unattached_after.total_seconds() if waits else None

    def count_unattached(self, now: datetime) -> Counter[str]:
        """Opted-in pods that run without offload, by reason."""
        return Counter(self._unattached_reasons(self._view.pods.values(), now))

    def _unattached_reasons(self, pods: Iterable[ObservedPod], now: datetime) -> Iterable[str]:
        for pod in pods:
            if pod.is_over or not pod.is_running:
                continue
            if not pod.injected:
                reason = _skip_reason(pod, self._namespace)
                yield reason if reason in set(SkipReason) else PodEvent.MISSED_BY_WEBHOOK
                continue
            region = self._view.regions.get(region_name(pod.pool, pod.node)) if pod.node else None
            if is_unattached(pod, region, now=now, unattached_after=self._unattached_after):
                yield PodEvent.UNATTACHED
