"""What the plugin knows of a cluster, as frozen values: `observe.py` makes them, `checks/` judges them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvoffload.api.pool import KVOffloadPool
from kvoffload.api.region import KVOffloadRegion, RegionEngine


@dataclass(frozen=True, slots=True)
class NodePages:
    """Huge pages of one size on a node, in bytes, as its kubelet reports them."""

    capacity_bytes: int
    """What the kubelet found at its start."""
    allocatable_bytes: int
    """What of it pods may have."""
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
    waiting: str
    """Why a container waits or the pod is not scheduled, empty if neither."""
    mount_failure: str = ""
    """The kubelet's last words about a volume that it cannot mount, empty where the pod is ready or there are none."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment of the release: the operator or the webhook."""

    namespace: str
    name: str
    component: str
    num_desired: int
    num_ready: int


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
    """Whether one of the authorities signed the serving certificate; None where no serving certificate was read."""


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
    workloads: tuple[Workload, ...] = ()
    webhooks: tuple[WebhookFacts, ...] = ()
    serving_certificates: tuple[CertificateFacts, ...] = ()
    webhook_answers: bool | None = None
    """Whether the API server asked the webhook about a pod that is not stored; None where that was not tried."""
    crds: tuple[CRDFacts, ...] = ()
    pods: tuple[OptedInPod, ...] = ()
    unreadable: tuple[str, ...] = ()
    """What RBAC kept from this user, one sentence each; checks over it are silent, and doctor says so."""
    invalid: tuple[str, ...] = ()
    """Objects that this version cannot read, one sentence each."""
    engines: Mapping[tuple[str, str], tuple[RegionEngine, ...]] = field(default_factory=dict)
    """Engines by (namespace, pod name), over all regions."""

    def pool(self, name: str) -> KVOffloadPool | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def region(self, *, pool: str, node: str) -> KVOffloadRegion | None:
        """The region of a pool on a node."""
        wanted = (pool, node)
        return next((one for one in self.regions if (one.spec.pool_name, one.spec.node_name) == wanted), None)

    def matching_nodes(self, pool: KVOffloadPool) -> tuple[NodeFacts, ...]:
        """Nodes that carry every label of the pool's nodeSelector."""
        wanted = pool.spec.node_selector.items()
        return tuple(node for node in self.nodes if wanted <= node.labels.items())


def declined_offload(engine: RegionEngine) -> bool:
    """Whether the engine's plugin left vLLM as it was, and only tells why: its id then begins with `without-`."""
    return engine.engine_id.startswith("without-")
