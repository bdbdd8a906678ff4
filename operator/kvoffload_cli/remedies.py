"""What to do where the webhook left a pod as it was, by its reason, or never saw it. Used by `explain` and `doctor`."""

from kvoffload.api import keys
from kvoffload.api.keys import SkipReason
from kvoffload_cli.facts import OptedInPod

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


def why_missed(pod: OptedInPod) -> str:
    """Why a labelled pod has no annotation of the webhook, as far as the pod tells."""
    if pod.label_is_late:
        return f"the label {keys.POOL_LABEL} came after the pod was created, and the webhook looks at new pods only"
    if pod.label_is_late is None:
        return f"the label {keys.POOL_LABEL} came after the pod was created, or no webhook answered then"
    return "no webhook answered when the pod was created"


def remedy_of_missed(pod: OptedInPod) -> str:
    """What makes the webhook look at it."""
    if pod.label_is_late:
        return "put the label into the pod template (spec.template.metadata.labels), or recreate the pod with it"
    return "once `kubectl kvoffload doctor` finds the webhook ready, recreate the pod"
