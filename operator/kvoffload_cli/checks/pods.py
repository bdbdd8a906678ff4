"""Checks of the pods that opted in. Pure."""

from collections.abc import Iterable, Iterator

from kvoffload_cli.attachment import find_unattached
from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.facts import ClusterFacts, OptedInPod
from kvoffload_cli.remedies import SKIP_REMEDIES, why_not_asked


def pod_is_not_injected(facts: ClusterFacts) -> Found:
    """A labelled pod was left as it was, with a reason or because no webhook answered."""
    for pod in _live(facts.pods):
        subject = f"pod/{pod.namespace}/{pod.name}"
        if facts.is_absent(pod.pool):
            names = ", ".join(one.name for one in facts.pools) or "none"
            message = f"asks for pool {pod.pool!r}, which does not exist (there are: {names})"
            yield Severity.ERROR, subject, message, "correct the label kvoffload.io/pool, or create the pool"
        elif pod.skip_reason:
            known = {reason.value: text for reason, text in SKIP_REMEDIES.items()}
            remedy = known.get(pod.skip_reason, f"kubectl kvoffload explain pod {pod.namespace}/{pod.name}")
            yield Severity.WARNING, subject, f"not injected: {pod.skip_reason}", remedy
        elif not pod.injected_version:
            why, remedy = why_not_asked(facts, pod)
            yield Severity.ERROR, subject, f"labelled, and not injected: {why}", remedy


def pod_is_not_attached(facts: ClusterFacts) -> Found:
    """An injected pod is ready where its pool serves, and no engine of it has attached; an error after a while."""
    for pod in _live(facts.pods):
        found = find_unattached(facts, pod)
        if found is not None:
            severity = Severity.ERROR if facts.now - found.since >= found.grace else Severity.WARNING
            yield severity, f"pod/{pod.namespace}/{pod.name}", found.message, found.remedy


def engine_declined_offload(facts: ClusterFacts) -> Found:
    """An injected engine found something in its own configuration and serves without offload."""
    for (namespace, name), engines in sorted(facts.engines.items()):
        for engine in (one for one in engines if one.is_left_alone):
            message = f"serves without offload: {engine.message or 'no reason given'}"
            remedy = "docs/troubleshooting.md lists the reasons by their first word"
            yield Severity.WARNING, f"pod/{namespace}/{name}", message, remedy


def layout_differs_from_prediction(facts: ClusterFacts) -> Found:
    """The webhook predicted one copy for all ranks and the engine found otherwise."""
    for (namespace, name), engines in sorted(facts.engines.items()):
        for engine in engines:
            if engine.is_mispredicted:
                message = (
                    f"engine {engine.engine_id}: predicted replicated, confirmed {engine.confirmed_layout} "
                    f"({engine.reason}): {engine.message}"
                )
                remedy = (
                    "expect one part a rank; set kvoffload.io/model-architecture if the model was taken for another"
                )
                yield Severity.WARNING, f"pod/{namespace}/{name}", message, remedy


def _live(pods: Iterable[OptedInPod]) -> Iterator[OptedInPod]:
    return (pod for pod in pods if pod.phase not in ("Succeeded", "Failed") and not pod.is_deleting)
