"""From the API server's objects to `ClusterFacts`. Called by every command that looks at a cluster."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from kvoffload.api import keys
from kvoffload.api.pool import KVOffloadPool, PageSize
from kvoffload.api.region import KVOffloadRegion, RegionEngine
from kvoffload.api.schema import build_crds
from kvoffload.errors import InvalidSpec
from kvoffload.units import parse_quantity
from kvoffload_cli.facts import (
    ClusterFacts,
    DaemonPod,
    NodeFacts,
    NodePages,
    OptedInPod,
    Workload,
)
from kvoffload_cli.kube import Denied, Reader
from kvoffload_cli.observe_release import (
    Manifest,
    certificate_facts,
    certificate_secret_paths,
    crd_facts,
    has_condition,
    serving_certificate,
    webhook_facts,
)

_T = TypeVar("_T", KVOffloadPool, KVOffloadRegion)

API = f"/apis/{keys.GROUP}/{keys.VERSION}"
POOLS, REGIONS = f"{API}/{keys.POOL_PLURAL}", f"{API}/{keys.REGION_PLURAL}"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
OURS = "app.kubernetes.io/name=kvoffload"
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
FINISHED = ("Succeeded", "Failed")
MOUNT_FAILED = "MountVolume."
"""How a kubelet's event begins that names the volume; the others of its reason only say that it waited."""


class Observation:
    """Reads one thing after the other, and keeps what could not be read instead of stopping there."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.unreadable: list[str] = []
        self.invalid: list[str] = []

    def collection(self, path: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """A collection; empty, and noted, where RBAC forbids it."""
        try:
            return self.reader.list_objects(path, labels=labels, fields=fields)
        except Denied as error:
            self.unreadable.append(str(error))
            return []

    def get(self, path: str) -> dict[str, Any] | None:
        """One object; None, and noted, where RBAC forbids it."""
        try:
            return self.reader.get(path)
        except Denied as error:
            self.unreadable.append(str(error))
            return None

    def parse(self, manifests: Iterable[dict[str, Any]], make: Callable[[dict[str, Any]], _T]) -> tuple[_T, ...]:
        """Our objects; one that this version cannot read is noted and left out."""
        parsed = []
        for manifest in manifests:
            try:
                parsed.append(make(manifest))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                name = manifest.get("metadata", {}).get("name", "?")
                self.invalid.append(f"{manifest.get('kind', 'object')} {name}: {where}: {first['msg']}")
        return tuple(sorted(parsed, key=lambda one: one.name))


def observe_pools(reader: Reader, *, now: datetime) -> ClusterFacts:
    """Pools and regions: what `status` shows."""
    seen = Observation(reader)
    pools = seen.parse(seen.collection(POOLS), KVOffloadPool.from_manifest)
    regions = seen.parse(seen.collection(REGIONS), KVOffloadRegion.from_manifest)
    return ClusterFacts(
        now=now,
        server_version=(0, 0),
        pools=pools,
        regions=regions,
        engines=engines_by_pod(regions),
        unreadable=tuple(seen.unreadable),
        invalid=tuple(seen.invalid),
    )


def observe_pod(reader: Reader, *, namespace: str, name: str, now: datetime) -> ClusterFacts:
    """What `explain pod` needs: the pod, pools and regions, which is all that an application owner may read.

    Raises:
        Denied: the pod itself cannot be read.
    """
    facts = observe_pools(reader, now=now)
    found = reader.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
    opted_in = found is not None and labels_of(found).get(keys.POOL_LABEL)
    return replace(facts, pods=(opted_in_pod(found),) if found is not None and opted_in else ())


def observe_cluster(reader: Reader, *, now: datetime) -> ClusterFacts:
    """Everything that `doctor` judges."""
    seen = Observation(reader)
    pools = seen.parse(seen.collection(POOLS), KVOffloadPool.from_manifest)
    regions = seen.parse(seen.collection(REGIONS), KVOffloadRegion.from_manifest)
    pods = seen.collection("/api/v1/pods")
    deployments = seen.collection("/apis/apps/v1/deployments", labels=OURS)
    workloads = [workload_facts(one) for one in deployments]
    secrets = [found for path in certificate_secret_paths(deployments) if (found := seen.get(path)) is not None]
    serving = {where: one for where, one in map(serving_certificate, secrets) if one is not None}
    webhooks = [
        fact
        for kind in ("mutating", "validating")
        for one in seen.collection(f"{ADMISSION}/{kind}webhookconfigurations", labels=OURS)
        for fact in webhook_facts(one, kind=kind, serving=list(serving.values()))
    ]
    return ClusterFacts(
        now=now,
        server_version=server_version(seen.get("/version") or {}),
        nodes=tuple(node_facts(one, pods) for one in seen.collection("/api/v1/nodes")),
        pools=pools,
        regions=regions,
        daemons=observe_daemons(seen, pods),
        workloads=tuple(workloads),
        webhooks=tuple(webhooks),
        serving_certificates=tuple(certificate_facts(one, where=where) for where, one in serving.items()),
        webhook_answers=probe_webhook(seen) if workloads or webhooks else None,
        crds=tuple(
            crd_facts(expected, seen.get(f"{CRDS}/{expected['metadata']['name']}"))
            for expected in build_crds().values()
        ),
        pods=tuple(opted_in_pod(pod) for pod in pods if labels_of(pod).get(keys.POOL_LABEL)),
        unreadable=tuple(seen.unreadable),
        invalid=tuple(seen.invalid),
        engines=engines_by_pod(regions),
    )


def probe_webhook(seen: Observation) -> bool | None:
    """Whether a labelled pod that is created now meets the webhook; None, and noted, where RBAC forbids to try."""
    try:
        for _ in range(PROBE_TRIES):
            stored = seen.reader.admit(PROBE_PATH, PROBE)
            if keys.SKIP_REASON_ANNOTATION in stored["metadata"].get("annotations", {}):
                return True
    except Denied as error:
        seen.unreadable.append(str(error))
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


def node_facts(node: Manifest, pods: Iterable[Manifest]) -> NodeFacts:
    """A node and the huge pages that pods on it asked for."""
    status, name = node["status"], node["metadata"]["name"]
    here = [
        pod
        for pod in pods
        if pod["spec"].get("nodeName") == name and pod.get("status", {}).get("phase") not in FINISHED
    ]
    pages = {}
    for size in PageSize:
        if size.resource_name not in status.get("allocatable", {}):
            continue
        by_pool: dict[str, int] = {}
        by_others = 0
        for pod in here:
            requested = requested_bytes(pod, size.resource_name)
            pool = labels_of(pod).get(keys.DAEMON_OF_LABEL)
            if pool:
                by_pool[pool] = by_pool.get(pool, 0) + requested
            else:
                by_others += requested
        pages[size.value] = NodePages(
            capacity_bytes=parse_quantity(status["capacity"][size.resource_name]),
            allocatable_bytes=parse_quantity(status["allocatable"][size.resource_name]),
            requested_bytes_by_pool=by_pool,
            requested_bytes_by_others=by_others,
        )
    return NodeFacts(
        name=name,
        labels=labels_of(node),
        pages=pages,
        not_ready=not_ready(status),
    )


def not_ready(status: Manifest) -> str:
    """Why a node is not ready, as its kubelet, or the controller that misses it, says; empty where it is."""
    ready = next((one for one in status.get("conditions", []) if one["type"] == "Ready"), None)
    if ready is None:
        return "it has not reported yet"
    if ready["status"] == "True":
        return ""
    return ": ".join(filter(None, (ready.get("reason"), ready.get("message")))) or f"Ready is {ready['status']}"


def requested_bytes(pod: Manifest, resource: str) -> int:
    """What a pod asks of a resource: its containers' sum, or its largest init container."""
    of_containers = [_request(container, resource) for container in pod["spec"].get("containers", [])]
    of_init = [_request(container, resource) for container in pod["spec"].get("initContainers", [])]
    return max(sum(of_containers), *of_init, 0)


def opted_in_pod(pod: Manifest) -> OptedInPod:
    """A pod that carries the opt-in label."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    annotations = metadata.get("annotations", {})
    ready = next((one for one in status.get("conditions", []) if one["type"] == "Ready"), None)
    return OptedInPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        node=spec.get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        is_deleting="deletionTimestamp" in metadata,
        ready_since=timestamp(ready["lastTransitionTime"]) if ready and ready["status"] == "True" else None,
        pool=metadata["labels"][keys.POOL_LABEL],
        injected_version=annotations.get(keys.INJECTED_ANNOTATION, ""),
        skip_reason=annotations.get(keys.SKIP_REASON_ANNOTATION, ""),
        predicted_layout=annotations.get(keys.REPLICATED_LAYOUT_ANNOTATION, ""),
        has_volume=any(volume["name"] == keys.VOLUME_NAME for volume in spec.get("volumes", [])),
    )


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
        for event in seen.collection(f"/api/v1/namespaces/{namespace}/events", fields="reason=FailedMount")
        if event["involvedObject"].get("kind") == "Pod" and event.get("message", "").startswith(MOUNT_FAILED)
    }
    return tuple(
        daemon_pod(pod, mount_failure=failures.get((pod["metadata"]["namespace"], pod["metadata"]["name"]), ""))
        for pod in manifests
    )


def daemon_pod(pod: Manifest, *, mount_failure: str = "") -> DaemonPod:
    """A pod of ours on a node."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    unscheduled = next(
        (
            f"not scheduled: {one.get('message', one.get('reason', ''))}"
            for one in status.get("conditions", [])
            if one["type"] == "PodScheduled" and one["status"] == "False"
        ),
        "",
    )
    waiting = [
        f"{container['name']} {container['state']['waiting'].get('reason', 'waits')}"
        for container in containers
        if "waiting" in container.get("state", {})
    ]
    return DaemonPod(
        namespace=pod["metadata"]["namespace"],
        name=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName", ""),
        pool=labels_of(pod)[keys.DAEMON_OF_LABEL],
        phase=status.get("phase", "Pending"),
        is_ready=has_condition(status, "Ready"),
        num_restarts=sum(container.get("restartCount", 0) for container in containers),
        waiting=unscheduled or ", ".join(waiting),
        mount_failure="" if has_condition(status, "Ready") else mount_failure,
    )


def workload_facts(deployment: Manifest) -> Workload:
    """A Deployment of the release."""
    return Workload(
        namespace=deployment["metadata"]["namespace"],
        name=deployment["metadata"]["name"],
        component=labels_of(deployment).get("app.kubernetes.io/component", ""),
        num_desired=deployment["spec"].get("replicas", 1),
        num_ready=deployment.get("status", {}).get("readyReplicas", 0),
    )


def server_version(answer: Manifest) -> tuple[int, int]:
    """Major and minor; (0, 0) where it could not be read."""
    try:
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        return 0, 0


def labels_of(manifest: Manifest) -> Mapping[str, str]:
    """Labels, empty where there are none."""
    return manifest["metadata"].get("labels") or {}


def timestamp(text: str) -> datetime:
    """A Kubernetes time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _request(container: Manifest, resource: str) -> int:
    resources = container.get("resources", {})
    amount = resources.get("requests", {}).get(resource) or resources.get("limits", {}).get(resource) or "0"
    try:
        return parse_quantity(amount)
    except InvalidSpec:
        return 0
