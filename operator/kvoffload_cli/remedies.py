"""What to do about each reason for which the webhook leaves a pod as it was. Used by `explain` and `doctor`."""

from kvoffload.api import keys
from kvoffload.api.keys import SkipReason

SKIP_REMEDIES = {
    SkipReason.POOL_NOT_FOUND: "correct the label kvoffload.io/pool or create the pool, then recreate the pod",
    SkipReason.POOL_PAUSED: "set the pool's mode to Active, then recreate the pod",
    SkipReason.POOL_OBSERVED: "the pool only observes: set its mode to Active, then recreate the pod",
    SkipReason.NAMESPACE_NOT_ALLOWED: "the pool's namespaceSelector leaves this namespace out: ask the administrator",
    SkipReason.NO_VLLM_CONTAINER: "name the container that runs vLLM in the annotation kvoffload.io/container",
    SkipReason.AMBIGUOUS_CONTAINER: "name the one container that runs vLLM in the annotation kvoffload.io/container",
    SkipReason.USER_CONNECTOR: "the pod brings its own KV connector: remove --kv-transfer-config or "
    "--kv-offloading-size to use the pool",
    SkipReason.UNSUPPORTED_VLLM: "use a vLLM of 0.28 to 0.33",
    SkipReason.MULTI_NODE: "an engine over several nodes cannot use one node's memory: keep it on one node",
    SkipReason.UNSUPPORTED_EXECUTOR: "start vLLM with --distributed-executor-backend mp",
    SkipReason.PYTHONPATH_FROM_REFERENCE: "write PYTHONPATH as a literal value instead of valueFrom or envFrom",
    SkipReason.NAME_CONFLICT: f"rename the pod's volume {keys.VOLUME_NAME}, or move its mount off {keys.MOUNT_PATH}",
    SkipReason.POD_TOO_LARGE: "make the pod's annotations, environment or arguments smaller, then recreate the pod",
}
