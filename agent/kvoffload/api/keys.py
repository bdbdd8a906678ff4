"""Names of labels, annotations and environment variables, ports, and the closed set of skip reasons.

Imported by the operator, the webhook, the node daemon and the command line; each name is written here, and again only
in the engine, which may not load this package (`kvoffload_engine.environment`; a test holds the two together).
"""

from enum import StrEnum

GROUP = "kvoffload.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
DAEMON_METRICS_PORT = 9420
"""Where the daemon's pod shows /metrics, /healthz and /readyz."""
CERTIFICATE_PATH = "/certificate"
"""At the port `metrics` of the webhook's pods: the certificate that it serves now, in PEM."""
ATTACHER_PORT = 9421
"""Where its container of the attacher shows /healthz."""
POOL_PLURAL = "kvoffloadpools"
REGION_PLURAL = "kvoffloadregions"

# On the user's pod.
POOL_LABEL = "kvoffload.io/pool"
"""Opt-in, by the user: the pool's name."""
CONTAINER_ANNOTATION = "kvoffload.io/container"
"""By the user: which container runs vLLM, where it is not the only candidate."""
MODEL_ARCHITECTURE_ANNOTATION = "kvoffload.io/model-architecture"
"""By the user: the architecture of the model's config.json, such as `DeepseekV3ForCausalLM`."""
WEIGHTS_ID_ANNOTATION = "kvoffload.io/weights-id"
"""By the user: names the weights where their path or revision does not."""
IMAGE_PYTHONPATH_ANNOTATION = "kvoffload.io/image-pythonpath"
"""By the user: the PYTHONPATH that the image sets itself, which an injected one would hide."""
REPLICATED_LAYOUT_ANNOTATION = "kvoffload.io/replicated-layout"
"""By the webhook: the predicted layout and its reason, `per-rank (NotMLA: ...)`."""
SKIP_REASON_ANNOTATION = "kvoffload.io/skip-reason"
"""By the webhook: why the pod was left as it was, a `SkipReason`."""
INJECTED_ANNOTATION = "kvoffload.io/injected"
"""By the webhook: the version that injected."""
WEBHOOK_REPLICA_ANNOTATION = "kvoffload.io/webhook-replica"
"""By the webhook: the number of the replica that answered, where it was not replica 0."""

SAFE_TO_EVICT_ANNOTATION = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
"""Of the cluster autoscaler: names of a pod's volumes, by commas, that need not keep their node; ours is added."""

# On nodes.
READY_NODE_LABEL_PREFIX = "pool.kvoffload.io/"
"""`pool.kvoffload.io/<pool>: ready` on nodes where region and daemon are ready."""
READY_NODE_LABEL_VALUE = "ready"
DAEMON_NODE_LABEL_PREFIX = "daemon.kvoffload.io/"
"""`daemon.kvoffload.io/<pool>: run` on nodes whose pages are enough, which the DaemonSet selects."""
DAEMON_NODE_LABEL_VALUE = "run"

# On our own objects.
DAEMON_OF_LABEL = "kvoffload.io/daemon-of"
"""The pool of a DaemonSet, its pods and its regions."""

# In the pod: the emptyDir and what is in it.
VOLUME_NAME = "kvoffload"
MOUNT_PATH = "/run/kvoffload"
SOCKET_PATH = f"{MOUNT_PATH}/daemon.sock"

# Environment of the injected container.
ENV_SOCKET = "KVOFFLOAD_SOCKET"
ENV_POOL = "KVOFFLOAD_POOL"
ENV_REPLICATED_LAYOUT = "KVOFFLOAD_REPLICATED_LAYOUT"
ENV_WEIGHTS_ID = "KVOFFLOAD_WEIGHTS_ID"
ENV_STEP_DEADLINE = "KVOFFLOAD_STEP_DEADLINE_SECONDS"
ENV_PYTHONPATH = "PYTHONPATH"
ENV_PYTHONHASHSEED = "PYTHONHASHSEED"
ENV_VLLM_PLUGINS = "VLLM_PLUGINS"
PLUGIN_NAME = "kvoffload"

# Field managers of server-side apply.
OPERATOR_FIELD_MANAGER = "kvoffload-operator"
NODE_FIELD_MANAGER = "kvoffload-node"
APPLY_CRDS_COMMAND = "kubectl apply --server-side --force-conflicts -f crds/"
"""What brings the CRDs to the version of a clone: by force, since helm or the operator's leader wrote them before."""


class SkipReason(StrEnum):
    """Why the webhook left an opted-in pod as it was; closed, documented in `docs/reference/conditions.md`."""

    POOL_NOT_FOUND = "PoolNotFound"
    """No KVOffloadPool of that name."""
    POOL_PAUSED = "PoolPaused"
    """The pool's mode is Paused."""
    POOL_OBSERVED = "PoolObserved"
    """The pool's mode is Observe: this is what would have been injected."""
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    """The pool's namespaceSelector does not select the pod's namespace."""
    NO_VLLM_CONTAINER = "NoVLLMContainer"
    """No container looks like vLLM; name it in the annotation `kvoffload.io/container`."""
    AMBIGUOUS_CONTAINER = "AmbiguousContainer"
    """Several containers could be vLLM; name one in the annotation `kvoffload.io/container`."""
    USER_CONNECTOR = "UserConnector"
    """The user gave a KV connector or `--kv-offloading-size` of their own."""
    UNSUPPORTED_VLLM = "UnsupportedVLLM"
    """The image's tag names a vLLM outside the supported versions."""
    MULTI_NODE = "MultiNode"
    """The engine spans several nodes, whose memory no node holds alone."""
    UNSUPPORTED_EXECUTOR = "UnsupportedExecutor"
    """Executor `ray` or `external_launcher`."""
    PYTHONPATH_FROM_REFERENCE = "PythonPathFromReference"
    """PYTHONPATH comes by valueFrom or envFrom and cannot be prefixed without knowing it."""
    NAME_CONFLICT = "NameConflict"
    """The pod has a volume or mount of our name or path already that is not ours."""
    POD_TOO_LARGE = "PodTooLarge"
    """With our part the pod would pass a limit of the API server's or of the kernel's."""


class PredictedLayout(StrEnum):
    """Value of `KVOFFLOAD_REPLICATED_LAYOUT` and of the annotation `kvoffload.io/replicated-layout`."""

    REPLICATED = "replicated"
    """One copy for all ranks, if the engine confirms it."""
    PER_RANK = "per-rank"
    """A veto: one part for each rank whatever the engine finds."""
    AUTO = "auto"
    """Unknown: the engine decides alone."""


def ready_node_label(pool: str) -> str:
    """Label key that a node carries where the pool is ready."""
    return READY_NODE_LABEL_PREFIX + pool


def daemon_node_label(pool: str) -> str:
    """Label key that a node carries where the pool's daemon may run."""
    return DAEMON_NODE_LABEL_PREFIX + pool


def daemonset_name(pool: str) -> str:
    """Name of the pool's DaemonSet in the operator's namespace."""
    return f"kvoffload-{pool}"
