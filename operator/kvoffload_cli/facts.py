"""What the plugin knows of a cluster, as frozen values: `observe.py` makes them, `checks/` judges them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from kvoffload.api.pool import KVOffloadPool
from kvoffload.api.region import KVOffloadRegion, RegionEngine

PASSING_WAITS = ("ContainerCreating", "PodInitializing")
"""What a container waits for that comes by itself."""


class Part(StrEnum):
    """What is read of a cluster, one collection or kind each. Checks over a part that was not read are silent."""

    POOLS = "pools"
    REGIONS = "regions"
    PODS = "pods"
    NODES = "nodes"
    DEPLOYMENTS = "Deployments"
    DAEMONSETS = "DaemonSets"
    CERTIFICATE = "the webhook's certificate"
    EVENTS = "events of the daemons"
    WEBHOOKS = "webhook configurations"
    CRDS = "CRDs"
    VERSION = "the server's version"
    WEBHOOK_CALL = "the webhook's answer"


@dataclass(frozen=True, slots=True)
class Wait:
    """A container that waits, in the kubelet's words."""

    container: str
    reason: str
    message: str = ""

    def __str__(self) -> str:
        """For people, without the message."""
        return f"{self.container} {self.reason or 'waits'}"

    @property
    def is_passing(self) -> bool:
        """Whether what it waits for comes by itself."""
        return self.reason in ("", *PASSING_WAITS)


def lacks_image(waits: Iterable[Wait]) -> bool:
    """Whether a container does not get its image."""
    return any("Image" in wait.reason for wait in waits)


@dataclass(frozen=True, slots=True)
class NodePages:
    """Huge pages of one size on a node, in bytes, as its kubelet reports them."""

    allocatable_bytes: int
    """What pods may have: all that the kubelet found at its start, for no kubelet can keep huge pages back."""
    requested_bytes_by_pool: Mapping[str, int]
    """Requests of our daemons' pods on this node."""
    requested_bytes_by_others: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node."""

    name: str
    labels: Mapping[str, str]
    pages: Mapping[str, NodePages]
    """By page size, `2Mi` and `1Gi`; a size the kubelet does not know is absent."""
    not_ready: str
    """Why the node is not ready, in its kubelet's words; empty where it is."""


@dataclass(frozen=True, slots=True)
class OptedInPod:
    """A pod with the label `kvoffload.io/pool`."""

    namespace: str
    name: str
    node: str
    phase: str
    is_deleting: bool
    ready_since: datetime | None
    pool: str
    injected_version: str
    skip_reason: str
    predicted_layout: str
    has_volume: bool
    has_readiness_probe: bool = True
    """Whether Ready means that its server answers, and not only that it runs."""
    label_is_late: bool | None = None
    """Whether the label came after the pod was created; None where that cannot be told."""
    num_restarts: int = 0
    last_end: str = ""
    """How a container ended last, empty if none did."""
    waiting: str = ""
    """Why containers wait, empty if none does."""


@dataclass(frozen=True, slots=True)
class DaemonPod:
    """A pod of a pool's DaemonSet."""

    namespace: str
    name: str
    node: str
    pool: str
    phase: str
    is_ready: bool
    num_restarts: int
    unscheduled: str = ""
    """Why the pod has no node, in the scheduler's words; empty where it has one, or is about to."""
    waits: tuple[Wait, ...] = ()
    is_deleting: bool = False
    created_at: datetime | None = None
    mount_failure: str = ""
    """The kubelet's last words about a volume that it cannot mount, empty where the pod is ready or there are none."""

    @property
    def waiting(self) -> str:
        """What it waits for, for people; empty if nothing."""
        return self.unscheduled or ", ".join(map(str, self.waits))


@dataclass(frozen=True, slots=True)
class DaemonSetFacts:
    """A pool's DaemonSet, as far as its rollout goes."""

    namespace: str
    name: str
    pool: str
    num_desired: int
    num_updated: int
    is_observed: bool
    """Whether the numbers are of its newest template."""
    num_missing: int = 0
    """Nodes that should have a pod of it, and for which there is none."""
    refusal: str = ""
    """The API server's last words about a pod that it did not take, empty where none is missing or there are none."""

    @property
    def is_rolling_out(self) -> bool:
        """Whether pods of an older template are still to be replaced."""
        return not self.refusal and (not self.is_observed or self.num_updated < self.num_desired)


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """What keeps pods of a Deployment from running: what one of them waits for in vain, or what the Deployment says."""

    pod: str
    """The pod's name; empty where the Deployment itself says it."""
    message: str
    waits: tuple[Wait, ...] = ()
    """The pod's containers that wait in vain; none where the scheduler or the Deployment says it."""

    def __str__(self) -> str:
        """For people."""
        return f"pod {self.pod}: {self.message}" if self.pod else self.message

    @property
    def ends_at_once(self) -> bool:
        """Whether a container of the pod is started and ends again and again: its log says why."""
        return any(wait.reason == "CrashLoopBackOff" for wait in self.waits)


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment of the release: the operator or the webhook."""

    namespace: str
    name: str
    component: str
    num_desired: int
    num_ready: int
    release: str = ""
    is_rolling_out: bool = False
    """Whether pods of its newest template are still to come, or not available yet."""
    failures: tuple[RolloutFailure, ...] = ()
    """What keeps its pods from running: one for each pod that waits in vain, or the Deployment's own words."""


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """One X.509 certificate."""

    where: str
    not_before: datetime
    not_after: datetime


@dataclass(frozen=True, slots=True)
class WebhookFacts:
    """One webhook in a webhook configuration of the release."""

    configuration: str
    kind: str
    service: str
    authorities: tuple[CertificateFacts, ...]
    trusts_serving: bool | None
    """Whether the authorities signed every certificate that the release serves; None where none was read."""


@dataclass(frozen=True, slots=True)
class CRDFacts:
    """An installed CustomResourceDefinition and the fields that its schema lacks, compared with this version's."""

    name: str
    is_established: bool
    serves_version: bool
    missing_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Everything that was read, at `now`."""

    now: datetime
    server_version: tuple[int, int]
    nodes: tuple[NodeFacts, ...] = ()
    pools: tuple[KVOffloadPool, ...] = ()
    regions: tuple[KVOffloadRegion, ...] = ()
    daemons: tuple[DaemonPod, ...] = ()
    daemonsets: tuple[DaemonSetFacts, ...] = ()
    workloads: tuple[Workload, ...] = ()
    webhooks: tuple[WebhookFacts, ...] = ()
    serving_certificates: tuple[CertificateFacts, ...] = ()
    webhook_answers: bool | None = None
    """Whether the API server asked the webhook about a pod that is not stored; None where that was not tried."""
    crds: tuple[CRDFacts, ...] = ()
    pods: tuple[OptedInPod, ...] = ()
    release_namespaces: frozenset[str] = frozenset()
    """Namespaces of the chart's releases, as far as they were looked for."""
    unreadable: tuple[str, ...] = ()
    """What could not be read, by RBAC or by a failure, one sentence each."""
    unread: frozenset[Part] = frozenset()
    """The parts of those sentences: unknown, which is not the same as empty."""
    viewer_role: str = ""
    """The ClusterRole that lets people read pools and regions; empty where everything was read."""
    serves_pools: bool = True
    """Whether the API server has the kind KVOffloadPool."""
    operator_runs: bool | None = None
    """Whether an operator is ready; None where that was not looked at, or may not be."""
    reported_at: Mapping[str, datetime] = field(default_factory=dict)
    """When the status of a pool or region was written last, by the object's name."""
    invalid: tuple[str, ...] = ()
    """Objects that this version cannot read, one sentence each."""
    engines: Mapping[tuple[str, str], tuple[RegionEngine, ...]] = field(default_factory=dict)
    """Engines by (namespace, pod name), over all regions."""

    def pool(self, name: str) -> KVOffloadPool | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def node(self, name: str) -> NodeFacts | None:
        """The node of that name."""
        return next((node for node in self.nodes if node.name == name), None)

    def is_absent(self, name: str) -> bool:
        """Whether there surely is no pool of that name: pools were read, and none that is invalid has it."""
        known = self.pool(name) is not None or any(one.startswith(f"KVOffloadPool {name}: ") for one in self.invalid)
        return not known and Part.POOLS not in self.unread

    def region(self, *, pool: str, node: str) -> KVOffloadRegion | None:
        """The region of a pool on a node."""
        wanted = (pool, node)
        return next((one for one in self.regions if (one.spec.pool_name, one.spec.node_name) == wanted), None)

    def matching_nodes(self, pool: KVOffloadPool) -> tuple[NodeFacts, ...]:
        """Nodes that carry every label of the pool's nodeSelector."""
        wanted = pool.spec.node_selector.items()
        return tuple(node for node in self.nodes if wanted <= node.labels.items())
