"""From the API server's objects to `ClusterFacts`. Called by every command that looks at a cluster."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from cryptography import x509
from pydantic import ValidationError

from kvoffload.api import keys
from kvoffload.api.pool import KVOffloadPool
from kvoffload.api.region import KVOffloadRegion, RegionEngine
from kvoffload.api.schema import build_crds
from kvoffload.errors import InvalidSpec
from kvoffload_cli.facts import (
    ClusterFacts,
    CRDFacts,
    DaemonPod,
    DaemonSetFacts,
    Part,
    RolloutFailure,
    Workload,
)
from kvoffload_cli.kube import Denied, Reader, ReadFailed
from kvoffload_cli.observe_absence import explain_absence
from kvoffload_cli.observe_nodes import observe_nodes
from kvoffload_cli.observe_pods import (
    daemon_pod,
    labels_of,
    metrics_proxy,
    opted_in_pod,
    timestamp,
    waiting_reasons,
    waits_in_vain,
)
from kvoffload_cli.observe_release import (
    Manifest,
    Release,
    certificate_facts,
    crd_facts,
    has_condition,
    release_of,
    served_certificate,
    webhook_facts,
)
from kvoffload_cli.observe_rights import DEPLOYMENTS, OURS, does_operator_run, find_viewer_role, has_operator

_T = TypeVar("_T", KVOffloadPool, KVOffloadRegion)

API = f"/apis/{keys.GROUP}/{keys.VERSION}"
POOLS, REGIONS = f"{API}/{keys.POOL_PLURAL}", f"{API}/{keys.REGION_PLURAL}"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PODS, NODES, DAEMONSETS = "/api/v1/pods", "/api/v1/nodes", "/apis/apps/v1/daemonsets"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PROBE_PATH = "/api/v1/namespaces/default/pods"
PROBE_TRIES = 3
"""One call that takes longer than the webhook's timeout, on a busy node, is not what is looked for."""
PROBE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "kvoffload-doctor", "labels": {keys.POOL_LABEL: "kvoffload-doctor"}},
    "spec": {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "vllm",
                "image": "vllm/vllm-openai",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    },
}
"""A pod that Pod Security `restricted` takes, for a pool that there is not: the webhook's answer is a skip reason."""
GIVEN_UP = (("ReplicaFailure", "True"), ("Progressing", "False"))
"""Conditions by which a Deployment says that it does not go on: its pods are refused, or not ready in time."""
MOUNT_FAILED = "MountVolume."
"""How a kubelet's event begins that names the volume; the others of its reason only say that it waited."""

COMBINED = "(combined from similar events): "
"""What a controller puts before its words when it has said nearly the same before."""


class Observation:
    """Reads one thing after the other, and keeps what could not be read instead of stopping there: it is unknown."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.unreadable: list[str] = []
        self.unread: set[Part] = set()
        self.invalid: list[str] = []
        self.reported_at: dict[str, datetime] = {}

    def note(self, part: Part, error: Exception) -> None:
        """Keep what could not be read."""
        self.unread.add(part)
        self.unreadable.append(str(error))

    def collection(self, path: str, part: Part, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """A collection; empty, and noted, where it could not be read."""
        try:
            return self.reader.list_objects(path, labels=labels, fields=fields)
        except (Denied, ReadFailed) as error:
            self.note(part, error)
            return []

    def get(self, path: str, part: Part) -> dict[str, Any] | None:
        """One object; None, and noted, where it could not be read."""
        try:
            return self.reader.get(path)
        except (Denied, ReadFailed) as error:
            self.note(part, error)
            return None

    def text(self, path: str, part: Part) -> str:
        """What is proxied; empty, and noted, where it could not be read."""
        try:
            return self.reader.text(path)
        except (Denied, ReadFailed) as error:
            self.note(part, error)
            return ""

    def pools(self) -> tuple[KVOffloadPool, ...]:
        """All pools that this version can read."""
        return self.parse(self.collection(POOLS, Part.POOLS), KVOffloadPool.from_manifest)

    def regions(self) -> tuple[KVOffloadRegion, ...]:
        """All regions that this version can read."""
        return self.parse(self.collection(REGIONS, Part.REGIONS), KVOffloadRegion.from_manifest)

    def viewer_role(self) -> str:
        """The ClusterRole that would let this user read pools and regions; empty where everything was read."""
        return find_viewer_role(self.reader) if self.unread else ""

    def parse(self, manifests: Iterable[dict[str, Any]], make: Callable[[dict[str, Any]], _T]) -> tuple[_T, ...]:
        """Our objects; one that this version cannot read is noted and left out."""
        parsed = []
        for manifest in manifests:
            try:
                parsed.append(make(manifest))
                self.reported_at.update(status_time(manifest))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                name = manifest.get("metadata", {}).get("name", "?")
                self.invalid.append(f"{manifest.get('kind', 'object')} {name}: {where}: {first['msg']}")
        return tuple(sorted(parsed, key=lambda one: one.name))


def observe_pools(reader: Reader, *, now: datetime) -> ClusterFacts:
    """Pools and regions."""
    seen = Observation(reader)
    pools, regions = seen.pools(), seen.regions()
    is_unsure = not pools and Part.POOLS not in seen.unread
    return ClusterFacts(
        now=now,
        server_version=(0, 0),
        pools=pools,
        regions=regions,
        engines=engines_by_pod(regions),
        unreadable=tuple(seen.unreadable),
        unread=frozenset(seen.unread),
        viewer_role=seen.viewer_role(),
        serves_pools=serves_pools(reader) if is_unsure else True,
        reported_at=seen.reported_at,
        invalid=tuple(seen.invalid),
    )


def serves_pools(reader: Reader) -> bool:
    """Whether the API server has the kind KVOffloadPool, which everybody may ask."""
    try:
        served = reader.get(API) or {}
    except (Denied, ReadFailed):
        return True
    return any(one["name"] == keys.POOL_PLURAL for one in served.get("resources", []))


def observe_status(reader: Reader, *, now: datetime) -> ClusterFacts:
    """What `status` shows: pools and regions, and whether anybody keeps them up to date."""
    return replace(observe_pools(reader, now=now), operator_runs=does_operator_run(reader))


def observe_pod(reader: Reader, *, namespace: str, name: str, now: datetime) -> ClusterFacts:
    """What `explain pod` needs: the pod, pools and regions, which is all that an application owner may read.

    Raises:
        Denied: the pod itself cannot be read.
        InvalidSpec: there is no such pod, or it is not labelled.
    """
    found = reader.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
    if found is None or not labels_of(found).get(keys.POOL_LABEL):
        raise InvalidSpec(explain_absence(reader, found, namespace=namespace, name=name))
    pod = opted_in_pod(found)
    is_missed = not pod.injected_version and not pod.skip_reason
    return replace(
        observe_pools(reader, now=now),
        pods=(pod,),
        release_namespaces=frozenset({namespace} if is_missed and has_operator(reader, namespace) else ()),
    )


def observe_cluster(reader: Reader, *, now: datetime) -> ClusterFacts:
    """Everything that `doctor` judges. No Secret is read."""
    seen = Observation(reader)
    pools, regions = seen.pools(), seen.regions()
    pods = seen.collection(PODS, Part.PODS)
    deployments = seen.collection(DEPLOYMENTS, Part.DEPLOYMENTS, labels=OURS)
    workloads = [workload_facts(one, pods) for one in deployments]
    daemonsets = seen.collection(DAEMONSETS, Part.DAEMONSETS, labels=OURS)
    serving = observe_serving(seen, pods, workloads)
    webhooks = [
        fact
        for kind in ("mutating", "validating")
        for one in seen.collection(f"{ADMISSION}/{kind}webhookconfigurations", Part.WEBHOOKS, labels=OURS)
        for fact in webhook_facts(one, kind=kind, serving=serving)
    ]
    return ClusterFacts(
        now=now,
        server_version=server_version(seen.get("/version", Part.VERSION) or {}),
        nodes=observe_nodes(seen.collection(NODES, Part.NODES), pods),
        pools=pools,
        regions=regions,
        daemons=observe_daemons(seen, pods),
        daemonsets=observe_daemonsets(seen, daemonsets),
        workloads=tuple(workloads),
        webhooks=tuple(webhooks),
        serving_certificates=tuple(
            certificate_facts(one, where=f"webhook/{namespace}/{release}")
            for (namespace, release), served in serving.items()
            for one in served
        ),
        webhook_answers=probe_webhook(seen) if workloads or webhooks else None,
        crds=tuple(observe_crds(seen)),
        pods=tuple(opted_in_pod(pod) for pod in pods if labels_of(pod).get(keys.POOL_LABEL)),
        release_namespaces=frozenset(one["metadata"]["namespace"] for one in (*deployments, *daemonsets)),
        unreadable=tuple(seen.unreadable),
        unread=frozenset(seen.unread),
        viewer_role=seen.viewer_role(),
        reported_at=seen.reported_at,
        invalid=tuple(seen.invalid),
        engines=engines_by_pod(regions),
    )


def observe_serving(
    seen: Observation, pods: Iterable[Manifest], workloads: Iterable[Workload]
) -> dict[Release, list[x509.Certificate]]:
    """What each pod of each release's webhook says that it serves; those are left out that do not run."""
    releases = {(one.namespace, one.release) for one in workloads if one.component == "webhook"}
    found: dict[Release, list[x509.Certificate]] = {}
    for pod in pods:
        labels, release = labels_of(pod), (pod["metadata"]["namespace"], release_of(pod))
        if labels.get("app.kubernetes.io/component") != "webhook" or release not in releases:
            continue
        proxy = metrics_proxy(pod)
        if proxy is None or waiting_reasons(pod) or "deletionTimestamp" in pod["metadata"]:
            continue
        served = served_certificate(seen.text(proxy + keys.CERTIFICATE_PATH, Part.CERTIFICATE))
        if served is not None:
            found.setdefault(release, []).append(served)
    return found


def observe_crds(seen: Observation) -> Iterable[CRDFacts]:
    """The CRDs beside those of this version; one that could not be read is unknown, and left out."""
    for expected in build_crds().values():
        num_unreadable = len(seen.unreadable)
        installed = seen.get(f"{CRDS}/{expected['metadata']['name']}", Part.CRDS)
        if len(seen.unreadable) == num_unreadable:
            yield crd_facts(expected, installed)


def probe_webhook(seen: Observation) -> bool | None:
    """Whether a labelled pod that is created now meets the webhook; None, and noted, where it cannot be tried."""
    try:
        for _ in range(PROBE_TRIES):
            stored = seen.reader.admit(PROBE_PATH, PROBE)
            if keys.SKIP_REASON_ANNOTATION in stored["metadata"].get("annotations", {}):
                return True
    except (Denied, ReadFailed) as error:
        seen.note(Part.WEBHOOK_CALL, error)
        return None
    return False


def engines_by_pod(regions: Iterable[KVOffloadRegion]) -> dict[tuple[str, str], tuple[RegionEngine, ...]]:
    """Engines of all regions by their pod."""
    found: dict[tuple[str, str], tuple[RegionEngine, ...]] = {}
    for region in regions:
        for engine in region.status.engines:
            pod = (engine.pod_namespace, engine.pod_name)
            found[pod] = (*found.get(pod, ()), engine)
    return found


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
        RolloutFailure(
            pod="", reasons=(one["type"],), message=f"{one['type']} is {one['status']}: {one.get('message', '')}"
        )
        for one in status.get("conditions", [])
        if (one["type"], one["status"]) in GIVEN_UP
    ]
    return Workload(
        namespace=metadata["namespace"],
        name=metadata["name"],
        component=labels_of(deployment).get("app.kubernetes.io/component", ""),
        num_desired=num_desired,
        num_ready=status.get("readyReplicas", 0),
        release=labels_of(deployment).get("app.kubernetes.io/instance", ""),
        is_rolling_out=not is_observed
        or status.get("updatedReplicas", 0) < num_desired
        or status.get("unavailableReplicas", 0) > 0,
        failures=tuple(waiting or said),
    )


def server_version(answer: Manifest) -> tuple[int, int]:
    """Major and minor; (0, 0) where it could not be read."""
    try:
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        return 0, 0


def status_time(manifest: Manifest) -> dict[str, datetime]:
    """When the figures in the status of one of our objects were written last, by its name; empty where unknown.

    A region's figures are the node daemon's; the operator writes a condition of its own there.
    """
    metadata = manifest["metadata"]
    times = [
        timestamp(entry["time"])
        for entry in metadata.get("managedFields", [])
        if entry.get("time") and "f:usedBytes" in entry.get("fieldsV1", {}).get("f:status", {})
    ]
    return {metadata["name"]: max(times)} if times else {}
