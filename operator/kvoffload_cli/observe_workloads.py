"""From Deployments, DaemonSets, their pods and events to facts: what runs, and what keeps the rest from running.

For `observe`; `bundle.contents` sorts events by the same time.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvoffload.api import keys
from kvoffload_cli.facts import DaemonPod, DaemonSetFacts, Part, RolloutFailure, Workload
from kvoffload_cli.observation import Observation
from kvoffload_cli.observe_pods import daemon_pod, labels_of, waits_in_vain
from kvoffload_cli.observe_release import Manifest, has_condition, release_of

GIVEN_UP = (("ReplicaFailure", "True"), ("Progressing", "False"))
"""Conditions by which a Deployment says that it does not go on: its pods are refused, or not ready in time."""
MOUNT_FAILED = "MountVolume."
"""How a kubelet's event begins that names the volume; the others of its reason only say that it waited."""

COMBINED = "(combined from similar events): "
"""What a controller puts before its words when it has said nearly the same before."""


def observe_daemons(seen: Observation, pods: Iterable[Manifest]) -> tuple[DaemonPod, ...]:
    """Our pods on the nodes; of those that are not ready, what their kubelets cannot mount, by their events."""
    manifests = [pod for pod in pods if labels_of(pod).get(keys.DAEMON_OF_LABEL)]
    waiting = {
        pod["metadata"]["namespace"]
        for pod in manifests
        if pod["spec"].get("nodeName") and not has_condition(pod.get("status", {}), "Ready")
    }
    failures = {
        (namespace, event["involvedObject"]["name"]): event["message"]
        for namespace in sorted(waiting)
        for event in seen.collection(f"/api/v1/namespaces/{namespace}/events", Part.EVENTS, fields="reason=FailedMount")
        if event["involvedObject"].get("kind") == "Pod" and event.get("message", "").startswith(MOUNT_FAILED)
    }
    return tuple(
        daemon_pod(pod, mount_failure=failures.get((pod["metadata"]["namespace"], pod["metadata"]["name"]), ""))
        for pod in manifests
    )


def observe_daemonsets(seen: Observation, daemonsets: Iterable[Manifest]) -> tuple[DaemonSetFacts, ...]:
    """The pools' DaemonSets; of those that miss pods, why the API server did not take one, by their events."""
    found = [daemonset_facts(one) for one in daemonsets if labels_of(one).get(keys.DAEMON_OF_LABEL)]
    refusals: dict[tuple[str, str], Manifest] = {}
    for namespace in sorted({one.namespace for one in found if one.num_missing}):
        path = f"/api/v1/namespaces/{namespace}/events"
        for event in seen.collection(path, Part.EVENTS, fields="reason=FailedCreate"):
            about = (namespace, event["involvedObject"].get("name", ""))
            if happened_at(event) >= happened_at(refusals.get(about, {})):
                refusals[about] = event
    words = {about: event.get("message", "").removeprefix(COMBINED) for about, event in refusals.items()}
    return tuple(
        replace(one, refusal=words.get((one.namespace, one.name), "")) if one.num_missing else one for one in found
    )


def daemonset_facts(daemonset: Manifest) -> DaemonSetFacts:
    """A pool's DaemonSet."""
    metadata, status = daemonset["metadata"], daemonset.get("status", {})
    num_desired = status.get("desiredNumberScheduled", 0)
    return DaemonSetFacts(
        namespace=metadata["namespace"],
        name=metadata["name"],
        pool=labels_of(daemonset)[keys.DAEMON_OF_LABEL],
        num_desired=num_desired,
        num_updated=status.get("updatedNumberScheduled", 0),
        is_observed=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        num_missing=num_desired - status.get("currentNumberScheduled", 0),
    )


def happened_at(event: Manifest) -> str:
    """When an event happened last, to sort by."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def workload_facts(deployment: Manifest, pods: Iterable[Manifest]) -> Workload:
    """A Deployment of the release, with what keeps its pods from running."""
    metadata, spec, status = deployment["metadata"], deployment["spec"], deployment.get("status", {})
    num_desired = spec.get("replicas", 1)
    is_observed = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    selected = spec.get("selector", {}).get("matchLabels", {}).items()
    waiting = [
        failure
        for pod in pods
        if selected and pod["metadata"]["namespace"] == metadata["namespace"] and selected <= labels_of(pod).items()
        if "deletionTimestamp" not in pod["metadata"] and (failure := waits_in_vain(pod))
    ]
    said = [
        RolloutFailure(pod="", message=f"{one['type']} is {one['status']}: {one.get('message', '')}")
        for one in status.get("conditions", [])
        if (one["type"], one["status"]) in GIVEN_UP
    ]
    return Workload(
        namespace=metadata["namespace"],
        name=metadata["name"],
        component=labels_of(deployment).get("app.kubernetes.io/component", ""),
        num_desired=num_desired,
        num_ready=status.get("readyReplicas", 0),
        release=release_of(deployment),
        is_rolling_out=not is_observed
        or status.get("updatedReplicas", 0) < num_desired
        or status.get("unavailableReplicas", 0) > 0,
        failures=tuple(waiting or said),
    )
