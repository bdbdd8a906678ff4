"""From the API server's objects to `ClusterFacts`. Called by every command that looks at a cluster."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from cryptography import x509

from kvoffload.api import keys
from kvoffload.api.region import KVOffloadRegion, RegionEngine
from kvoffload.api.schema import build_crds
from kvoffload.errors import InvalidSpec
from kvoffload_cli.facts import (
    ClusterFacts,
    CRDFacts,
    Part,
    Workload,
)
from kvoffload_cli.kube import Denied, Reader, ReadFailed
from kvoffload_cli.observation import API, Observation
from kvoffload_cli.observe_absence import explain_absence
from kvoffload_cli.observe_nodes import observe_nodes
from kvoffload_cli.observe_pods import (
    labels_of,
    metrics_proxy,
    opted_in_pod,
    waiting_reasons,
)
from kvoffload_cli.observe_release import (
    Manifest,
    Release,
    certificate_facts,
    crd_facts,
    release_of,
    served_certificate,
    webhook_facts,
)
from kvoffload_cli.observe_rights import DEPLOYMENTS, OURS, does_operator_run, has_operator
from kvoffload_cli.observe_workloads import observe_daemons, observe_daemonsets, workload_facts

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


def server_version(answer: Manifest) -> tuple[int, int]:
    """Major and minor; (0, 0) where it could not be read."""
    try:
        return int(answer["major"]), int(str(answer["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        return 0, 0
