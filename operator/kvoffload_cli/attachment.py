"""Why no engine of an injected pod is attached, as far as the cluster tells. Pure; `explain` and `doctor` ask it."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from kvoffload.api.conditions import RegionCondition, find
from kvoffload.api.region import MAX_ENGINES
from kvoffload_cli.facts import ClusterFacts, OptedInPod, Part

ATTACH_GRACE = timedelta(minutes=2)
"""How long a pod that is Ready may be without an engine; the operator's event `Unattached` comes then as well."""
UNPROBED_GRACE = timedelta(minutes=5)
"""The same without a readiness probe: Ready means then that the process runs, and a server loads its weights first."""
PLUGIN_LINES = r"kvoffload( [0-9]|:| rank| scheduler)|plugin kvoffload"
"""Our lines in an engine's log, and vLLM's about our plugin; not the paths of our library in a trace."""


@dataclass(frozen=True, slots=True)
class Unattached:
    """A pod that serves without an engine of ours."""

    since: datetime
    """From when on an engine could have been attached."""
    grace: timedelta
    message: str
    remedy: str


def find_unattached(facts: ClusterFacts, pod: OptedInPod) -> Unattached | None:
    """What to say of a pod that is Ready without an engine; None where nothing can be said, or other things say it."""
    if not pod.injected_version or pod.ready_since is None or (pod.namespace, pod.name) in facts.engines:
        return None
    if Part.REGIONS in facts.unread or facts.pool(pod.pool) is None:
        return None
    grace = ATTACH_GRACE if pod.has_readiness_probe else UNPROBED_GRACE
    region = facts.region(pool=pod.pool, node=pod.node)
    if region is None:
        return Unattached(
            since=pod.ready_since,
            grace=grace,
            message=f"injected, and node {pod.node} gives no memory to pool {pod.pool}: it runs without offload",
            remedy="set attachment: Required in the pool, or add the node to its nodeSelector",
        )
    serves = find(region.status.conditions, RegionCondition.READY)
    if serves is None or serves.status != "True":
        return None
    if region.status.engines_attached > MAX_ENGINES:  # the region names no more than these
        return None
    unsure = "" if pod.has_readiness_probe else " (without a readiness probe it may still load its weights)"
    return Unattached(
        since=max(pod.ready_since, serves.last_transition_time),
        grace=grace,
        message=f"injected and ready, and no engine of it has attached: it runs without offload{unsure}",
        remedy=f"{plugin_log(pod)}   # the plugin says why; no such line, or `Failed to load plugin kvoffload`: it was "
        "not imported, recreate the pod (docs/troubleshooting.md, A pod is injected and does not attach)",
    )


def plugin_log(pod: OptedInPod) -> str:
    """The command that shows what our plugin said in the pod's log."""
    return f"kubectl -n {pod.namespace} logs {pod.name} --all-containers | grep -E '{PLUGIN_LINES}'"
