"""What to do where the webhook left a pod as it was, by its reason, or never saw it. Used by `explain` and `doctor`."""

from kvoffload.api import keys
from kvoffload.api.keys import SkipReason
from kvoffload.api.opt_in import is_never_injected, remedy_of_missed, why_missed
from kvoffload.api.pool import SYSTEM_NAMESPACE
from kvoffload_cli.facts import ClusterFacts, OptedInPod

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

MEND_IMAGE = (
    "push that image where the nodes pull from, correct its name, or give the chart imagePullSecrets "
    "(docs/install.md, A private registry)"
)
"""What helps a pod of ours that does not get its image."""


def why_not_asked(facts: ClusterFacts, pod: OptedInPod) -> tuple[str, str]:
    """Why a labelled pod has no annotation of the webhook, and what to do."""
    if is_never_injected(pod.namespace, facts.release_namespaces):
        why = (
            f"the webhook is never asked about pods of namespace {pod.namespace}, whatever the pool says: it leaves out"
        )
        return (
            f"{why} {SYSTEM_NAMESPACE} and the release's own",
            "run the pod in another namespace, or take the label off",
        )
    pool, remedy = facts.pool(pod.pool), remedy_of_missed(pod.label_is_late)
    if pool is not None and pool.spec.namespace_selector is not None:
        remedy += f"; its namespace must have the labels of the namespaceSelector of pool {pool.name}"
    return why_missed(pod.label_is_late), remedy
