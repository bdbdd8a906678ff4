"""The checks of `kubectl kvoffload doctor`: facts in, findings out. Pure; each check carries the violation's name.

A finding is an error where offload does not work, a warning where it works worse than it could or will stop. The order
of `CHECKS` is the order in which things depend on each other: the first finding is the one to mend first.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from kvoffload.api.conditions import find
from kvoffload.api.pool import Fallback, Mode, PageSize
from kvoffload.units import format_bytes
from kvoffload_cli.facts import ClusterFacts, NodePages, OptedInPod
from kvoffload_cli.remedies import SKIP_REMEDIES

OLDEST_KUBERNETES = (1, 32)
"""Bound service-account tokens name their node since 1.32; the admission policy of the regions needs that."""
CERTIFICATE_WARNING = timedelta(days=14)
ATTACH_GRACE = timedelta(minutes=5)
"""How long a running engine may take to attach: a server loads its weights first."""
MANY_RESTARTS = 5


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, on what, and what to do."""

    severity: Severity
    check: str
    subject: str
    message: str
    remedy: str


Found = Iterator[tuple[Severity, str, str, str]]
Check = Callable[[ClusterFacts], Found]


def kubernetes_is_too_old(facts: ClusterFacts) -> Found:
    """The API server lacks what the admission policy of the regions needs."""
    if (0, 0) < facts.server_version < OLDEST_KUBERNETES:
        found, needed = (".".join(map(str, version)) for version in (facts.server_version, OLDEST_KUBERNETES))
        yield Severity.ERROR, "cluster", f"Kubernetes {found}, needed {needed} or newer", "upgrade the control plane"


def crd_is_missing_or_outdated(facts: ClusterFacts) -> Found:
    """A CRD is not there, not served, or older than this program."""
    for crd in facts.crds:
        remedy = "kubectl apply --server-side -f crds/ (helm installs CRDs, and never upgrades them)"
        if not crd.serves_version:
            yield Severity.ERROR, f"crd/{crd.name}", "not installed, or does not serve v1alpha1", remedy
        elif not crd.is_established:
            yield Severity.ERROR, f"crd/{crd.name}", "not established", "kubectl describe crd " + crd.name
        elif crd.missing_fields:
            fields = ", ".join(crd.missing_fields[:5]) + (" ..." if len(crd.missing_fields) > 5 else "")
            message = f"{len(crd.missing_fields)} fields of this version are missing: {fields}"
            yield Severity.ERROR, f"crd/{crd.name}", message, remedy


def object_is_unreadable(facts: ClusterFacts) -> Found:
    """An object holds what this version does not know."""
    for sentence in facts.invalid:
        yield Severity.ERROR, "api", sentence, "use the plugin of the installed version, or correct the object"


def release_is_incomplete(facts: ClusterFacts) -> Found:
    """Operator or webhook is not installed or not running."""
    for component, effect in (
        ("operator", "pools are not reconciled"),
        ("webhook", "labelled pods start, and are not injected"),
    ):
        workloads = [one for one in facts.workloads if one.component == component]
        if not workloads:
            yield Severity.ERROR, component, f"no Deployment: {effect}", "helm install kvoffload charts/kvoffload"
        for one in workloads:
            if one.num_ready < one.num_desired:
                subject = f"deployment/{one.namespace}/{one.name}"
                severity = Severity.WARNING if one.num_ready else Severity.ERROR
                message = f"{one.num_ready} of {one.num_desired} replicas are ready" + (
                    "" if one.num_ready else f": {effect}"
                )
                yield severity, subject, message, f"kubectl -n {one.namespace} describe deployment {one.name}"


def webhook_is_not_trusted(facts: ClusterFacts) -> Found:
    """The API server cannot call the webhook: no configuration, no authority, or one that did not sign."""
    mutating = [one for one in facts.webhooks if one.kind == "mutating"]
    if not mutating and facts.workloads:
        yield (
            Severity.ERROR,
            "webhook",
            "no MutatingWebhookConfiguration of the release: no pod is injected",
            "helm upgrade kvoffload charts/kvoffload",
        )
    for webhook in facts.webhooks:
        subject = f"{webhook.kind}webhookconfiguration/{webhook.configuration}"
        namespace = webhook.service.partition("/")[0]
        remedy = f"kubectl -n {namespace} logs -l app.kubernetes.io/component=operator --tail=-1 | grep -i certificate"
        if not webhook.authorities:
            message = "caBundle is empty: the API server trusts no certificate and injects nothing"
            yield Severity.ERROR, subject, message, remedy
        elif webhook.trusts_serving is False:
            served = ", ".join(sorted({one.where for one in facts.serving_certificates}))
            message = f"no certificate in caBundle signed the serving one ({served}): every call fails"
            yield Severity.ERROR, subject, message, remedy


def certificate_expires(facts: ClusterFacts) -> Found:
    """A certificate is past its time, or nearly."""
    authorities = [one for webhook in facts.webhooks for one in webhook.authorities]
    newest: dict[str, datetime] = {}
    for one in (*facts.serving_certificates, *authorities):
        newest[one.where] = max(one.not_after, newest.get(one.where, one.not_after))
    for where, not_after in sorted(newest.items()):
        if not_after > facts.now + CERTIFICATE_WARNING:
            continue
        expired = not_after <= facts.now
        yield (
            Severity.ERROR if expired else Severity.WARNING,
            where,
            f"{'expired' if expired else 'expires'} {not_after:%Y-%m-%d %H:%M} UTC",
            "restart the operator, which renews its own; a given or cert-manager certificate is renewed by its issuer",
        )


def pool_matches_no_node(facts: ClusterFacts) -> Found:
    """The selector selects nothing."""
    for pool in facts.pools:
        if facts.nodes and not facts.matching_nodes(pool):
            wanted = ",".join(f"{key}={value}" for key, value in pool.spec.node_selector.items())
            message = f"no node has all of the labels {wanted}"
            yield Severity.ERROR, f"pool/{pool.name}", message, f"kubectl get nodes -l {wanted}; correct nodeSelector"


def node_is_short_of_pages(facts: ClusterFacts) -> Found:
    """A matching node cannot give the pool's capacity, or others hold its pages."""
    for pool in facts.pools:
        if pool.spec.fallback is Fallback.SHARED_MEMORY or pool.spec.mode is not Mode.ACTIVE:
            continue
        size = pool.spec.page_size
        for node in facts.matching_nodes(pool):
            pages = node.pages.get(size.value)
            allocatable = pages.allocatable_bytes if pages else 0
            subject = f"node/{node.name}"
            if allocatable < pool.spec.capacity:
                found = f"allocatable {size.resource_name} is {format_bytes(allocatable)}"
                message = f"{found}, pool {pool.name} needs {format_bytes(pool.spec.capacity)}"
                yield Severity.ERROR, subject, message, reserve_remedy(size, pool.spec.capacity, allocatable, pages)
            elif pages and pages.requested_bytes_by_pool.get(pool.name, 0) == 0:
                taken = pages.requested_bytes_by_others + sum(pages.requested_bytes_by_pool.values())
                if allocatable - taken < pool.spec.capacity:
                    message = (
                        f"{format_bytes(taken)} of {format_bytes(allocatable)} {size.resource_name} are requested by "
                        f"other pods, pool {pool.name} needs {format_bytes(pool.spec.capacity)}"
                    )
                    remedy = "reserve more pages, or move the pods: kubectl describe node " + node.name
                    yield Severity.ERROR, subject, message, remedy


def reserve_remedy(size: PageSize, needed_bytes: int, allocatable_bytes: int, pages: NodePages | None) -> str:
    """The commands that make the pages: sysctl for 2Mi, the kernel's command line for 1Gi; the kubelet's restart."""
    of_others = pages.requested_bytes_by_others if pages else 0
    num_pages = -(-(needed_bytes + of_others) // size.num_bytes)
    if size is PageSize.GI_1:
        return f"on the node: kernel command line hugepagesz=1G hugepages={num_pages}, reboot"
    return (
        f"on the node: sysctl -w vm.nr_hugepages={num_pages}, then systemctl restart kubelet "
        f"(it reported {format_bytes(allocatable_bytes)} when it started)"
    )


def pools_overlap(facts: ClusterFacts) -> Found:
    """Two pools ask more of one node than it has."""
    for node in facts.nodes:
        for size in PageSize:
            here = [pool for pool in facts.pools if pool.spec.page_size is size and node in facts.matching_nodes(pool)]
            asked, pages = sum(pool.spec.capacity for pool in here), node.pages.get(size.value)
            if len(here) > 1 and pages and asked > pages.allocatable_bytes:
                names = ", ".join(pool.name for pool in here)
                message = (
                    f"pools {names} ask {format_bytes(asked)} of {size.resource_name} together, "
                    f"the node has {format_bytes(pages.allocatable_bytes)}"
                )
                yield Severity.ERROR, f"node/{node.name}", message, "narrow a nodeSelector, or lower a capacity"


def daemon_does_not_run(facts: ClusterFacts) -> Found:
    """A pool's daemon pod is pending, failing or often restarted."""
    for pod in facts.daemons:
        subject = f"pod/{pod.namespace}/{pod.name}"
        if not pod.is_ready:
            message = f"{pod.phase} on node {pod.node or '(none)'}: {pod.waiting or 'not ready'}"
            yield Severity.ERROR, subject, message, f"kubectl -n {pod.namespace} describe pod {pod.name}"
        if pod.num_restarts >= MANY_RESTARTS:
            remedy = f"kubectl -n {pod.namespace} logs {pod.name} -c daemon --previous"
            yield Severity.WARNING, subject, f"restarted {pod.num_restarts} times", remedy


def region_does_not_serve(facts: ClusterFacts) -> Found:
    """A region says that it is not ready, or degraded, with the daemon's own words."""
    for region in facts.regions:
        subject, spec = f"region/{region.name}", region.spec
        if region.deleting:
            continue
        ready, degraded = (find(region.status.conditions, kind) for kind in ("Ready", "Degraded"))
        node_ready = find(region.status.conditions, "NodeReady")
        why = f"kubectl describe kvregion {region.name}"
        if ready is None:
            if node_ready is not None and node_ready.status == "False":
                yield Severity.ERROR, subject, f"{node_ready.reason}: {node_ready.message}", why
            else:
                yield Severity.ERROR, subject, "the node daemon has not reported yet", daemon_logs(spec.pool_name)
        elif ready.status != "True" and spec.mode is Mode.ACTIVE:
            yield Severity.ERROR, subject, f"{ready.reason}: {ready.message}", why
        if degraded is not None and degraded.status == "True":
            yield Severity.WARNING, subject, f"{degraded.reason}: {degraded.message}", why


def pool_is_not_ready(facts: ClusterFacts) -> Found:
    """A pool's Ready condition is not True; its message names the nodes."""
    for pool in facts.pools:
        ready = find(pool.status.conditions, "Ready")
        if pool.spec.mode is not Mode.ACTIVE:
            message = f"mode is {pool.spec.mode.value}: no pod is served"
            yield (
                Severity.WARNING,
                f"pool/{pool.name}",
                message,
                f"kubectl patch kvpool {pool.name} --type merge -p " + ('\'{"spec":{"mode":"Active"}}\''),
            )
        elif ready is None:
            message = "the operator has not looked at it yet"
            yield Severity.ERROR, f"pool/{pool.name}", message, "see the findings about the operator"
        elif ready.status != "True":
            yield (
                Severity.WARNING if pool.status.nodes.ready else Severity.ERROR,
                f"pool/{pool.name}",
                f"{ready.reason}: {ready.message}",
                f"kubectl describe kvpool {pool.name}",
            )


def pod_is_not_injected(facts: ClusterFacts) -> Found:
    """A labelled pod was left as it was, with a reason or because no webhook answered."""
    for pod in _live(facts.pods):
        subject = f"pod/{pod.namespace}/{pod.name}"
        if facts.pool(pod.pool) is None:
            names = ", ".join(one.name for one in facts.pools) or "none"
            message = f"asks for pool {pod.pool!r}, which does not exist (there are: {names})"
            yield Severity.ERROR, subject, message, "correct the label kvoffload.io/pool, or create the pool"
        elif pod.skip_reason:
            known = {reason.value: text for reason, text in SKIP_REMEDIES.items()}
            remedy = known.get(pod.skip_reason, f"kubectl kvoffload explain pod {pod.namespace}/{pod.name}")
            yield Severity.WARNING, subject, f"not injected: {pod.skip_reason}", remedy
        elif not pod.injected_version:
            message = "labelled, and not injected: no webhook answered when it was created"
            yield Severity.ERROR, subject, message, "recreate the pod once the webhook is ready"


def pod_is_not_attached(facts: ClusterFacts) -> Found:
    """An injected pod has served for a while, and no engine of it has attached."""
    for pod in _live(facts.pods):
        if not pod.injected_version or pod.ready_since is None or (pod.namespace, pod.name) in facts.engines:
            continue
        if facts.now - pod.ready_since < ATTACH_GRACE:
            continue
        pool = facts.pool(pod.pool)
        if pool is None or facts.region(pool=pool.name, node=pod.node) is None:
            message = f"injected, and node {pod.node} gives no memory to pool {pod.pool}: it runs without offload"
            remedy = "set attachment: Required in the pool, or add the node to its nodeSelector"
        else:
            message = "injected and ready, and no engine of it has attached: it runs without offload"
            remedy = f"kubectl -n {pod.namespace} logs {pod.name} | grep -i kvoffload"
        yield Severity.ERROR, f"pod/{pod.namespace}/{pod.name}", message, remedy


def layout_differs_from_prediction(facts: ClusterFacts) -> Found:
    """The webhook predicted one copy for all ranks and the engine found otherwise."""
    for (namespace, name), engines in sorted(facts.engines.items()):
        for engine in engines:
            if engine.predicted_layout == "replicated" and engine.confirmed_layout == "per-rank":
                message = (
                    f"engine {engine.engine_id}: predicted replicated, confirmed per rank "
                    f"({engine.reason}): {engine.message}"
                )
                remedy = (
                    "expect one part a rank; set kvoffload.io/model-architecture if the model was taken for another"
                )
                yield Severity.WARNING, f"pod/{namespace}/{name}", message, remedy


CHECKS: tuple[Check, ...] = (
    kubernetes_is_too_old,
    crd_is_missing_or_outdated,
    object_is_unreadable,
    release_is_incomplete,
    webhook_is_not_trusted,
    certificate_expires,
    pool_matches_no_node,
    pools_overlap,
    node_is_short_of_pages,
    daemon_does_not_run,
    region_does_not_serve,
    pool_is_not_ready,
    pod_is_not_injected,
    pod_is_not_attached,
    layout_differs_from_prediction,
)


def run_checks(facts: ClusterFacts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [
        Finding(severity=severity, check=check.__name__, subject=subject, message=message, remedy=remedy)
        for check in checks
        for severity, subject, message, remedy in check(facts)
    ]


def daemon_logs(pool: str) -> str:
    """How to read a pool's daemons' logs."""
    return f"kubectl logs -A -l kvoffload.io/daemon-of={pool} -c daemon --tail=20"


def _live(pods: Iterable[OptedInPod]) -> Iterator[OptedInPod]:
    return (pod for pod in pods if pod.phase not in ("Succeeded", "Failed") and not pod.is_deleting)
