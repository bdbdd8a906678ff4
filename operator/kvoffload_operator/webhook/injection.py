"""Decides about one opted-in pod, and gives it what is the pod's: volume, affinity, annotations. Pure.

`server.py` calls `inject`. It changes with what a pool, a pod's annotations or the prediction decide, and with what a
pod is given beside its engine's container, which is `container.py`'s. Everything is set only where absent, so a second
call finds nothing to do; the volumes that the cluster autoscaler need not heed are added to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvoffload import __version__
from kvoffload.api.keys import (
    CONTAINER_ANNOTATION,
    ENV_POOL,
    ENV_PYTHONHASHSEED,
    ENV_REPLICATED_LAYOUT,
    ENV_SOCKET,
    ENV_STEP_DEADLINE,
    ENV_WEIGHTS_ID,
    IMAGE_PYTHONPATH_ANNOTATION,
    INJECTED_ANNOTATION,
    MODEL_ARCHITECTURE_ANNOTATION,
    READY_NODE_LABEL_VALUE,
    REPLICATED_LAYOUT_ANNOTATION,
    SAFE_TO_EVICT_ANNOTATION,
    SKIP_REASON_ANNOTATION,
    SOCKET_PATH,
    VOLUME_NAME,
    WEIGHTS_ID_ANNOTATION,
    SkipReason,
    ready_node_label,
)
from kvoffload.api.pool import Attachment, KVOffloadPoolSpec, Mode, ReplicatedLayout, allows_namespace
from kvoffload_operator.webhook.command_line import CommandLine
from kvoffload_operator.webhook.container import (
    add_environment,
    add_mount,
    choose_container,
    find_conflict,
    literal_environment,
    read_command_lines,
)
from kvoffload_operator.webhook.limits import find_excess
from kvoffload_operator.webhook.patch import Manifest, Operation, Patch, annotation_path
from kvoffload_operator.webhook.prediction import EngineFacts, Prediction, find_refusal, predict_layout

PREFERENCE_WEIGHT = 50


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool that the pod names, and whether its namespace may use it."""

    name: str
    spec: KVOffloadPoolSpec | None
    """None: there is no such pool."""
    namespace: str
    namespace_labels: Mapping[str, str]
    operator_namespace: str
    step_deadline_seconds: float | None = None
    """How long a scheduler's step may wait for the daemon; None: as the engine has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the webhook answers; without operations the pod stays as it is."""

    operations: tuple[Operation, ...]
    skip_reason: SkipReason | None = None
    message: str = ""
    prediction: Prediction | None = None
    unread: str = ""
    """Why a command line of the pod was not read to its end; empty where all were."""


def inject(pod: Manifest, facts: PoolFacts) -> Outcome:
    """Decide and build the patch for one pod."""
    refused = _pool_refusal(facts)
    if refused is not None:
        return _skip(pod, *refused)
    assert facts.spec is not None
    lines = read_command_lines(pod["spec"]["containers"])
    unread = next((line.unread for line in lines if line.unread), "")
    return replace(_inject(pod, facts, facts.spec, lines), unread=unread)


def _inject(pod: Manifest, facts: PoolFacts, spec: KVOffloadPoolSpec, lines: Sequence[CommandLine]) -> Outcome:
    annotations = pod["metadata"].get("annotations") or {}
    chosen = choose_container(pod["spec"]["containers"], lines, annotations.get(CONTAINER_ANNOTATION, ""))
    if isinstance(chosen, tuple):
        return _skip(pod, *chosen)
    container, line = pod["spec"]["containers"][chosen], lines[chosen]
    engine = EngineFacts(
        line=line,
        image=container.get("image", ""),
        architecture=annotations.get(MODEL_ARCHITECTURE_ANNOTATION, ""),
        replication_allowed=spec.replicated_layout is not ReplicatedLayout.NEVER,
        mla_disabled=literal_environment(container).get("VLLM_MLA_DISABLE") in ("1", "true", "True"),
    )
    refusal = find_refusal(engine)
    if refusal is not None:
        return _skip(pod, refusal.reason, refusal.message)
    prediction = predict_layout(engine)
    conflict = _volume_conflict(pod, annotations) or find_conflict(container, annotations)
    if conflict is not None:
        return _skip(pod, *conflict)
    if spec.mode is Mode.OBSERVE:
        return _skip(pod, SkipReason.POOL_OBSERVED, "the pool's mode is Observe", prediction)
    patch = Patch()
    _add_volume(patch, pod)
    add_mount(patch, container, chosen)
    add_environment(
        patch,
        container,
        chosen,
        image_path=annotations.get(IMAGE_PYTHONPATH_ANNOTATION, "").strip(":"),
        wanted=_our_variables(annotations, facts, prediction),
    )
    _add_affinity(patch, pod, facts.name, spec.attachment)
    if not patch.operations:
        return Outcome((), prediction=prediction)
    wanted = {
        INJECTED_ANNOTATION: __version__,
        REPLICATED_LAYOUT_ANNOTATION: prediction.annotation,
        SAFE_TO_EVICT_ANNOTATION: _evictable_volumes(annotations.get(SAFE_TO_EVICT_ANNOTATION, "")),
    }
    _add_annotations(patch, pod, wanted)
    excess = find_excess(pod, wanted, patch.operations)
    if excess:
        return _skip(pod, SkipReason.POD_TOO_LARGE, excess)
    return Outcome(tuple(patch.operations), prediction=prediction)


def _pool_refusal(facts: PoolFacts) -> tuple[SkipReason, str] | None:
    if facts.spec is None:
        return SkipReason.POOL_NOT_FOUND, f"there is no KVOffloadPool {facts.name!r}"
    selector, labels = facts.spec.namespace_selector, facts.namespace_labels
    if not allows_namespace(selector, facts.namespace, labels, operator_namespace=facts.operator_namespace):
        return SkipReason.NAMESPACE_NOT_ALLOWED, f"pool {facts.name} does not allow namespace {facts.namespace}"
    if facts.spec.mode is Mode.PAUSED:
        return SkipReason.POOL_PAUSED, f"pool {facts.name} is paused"
    return None


def _skip(pod: Manifest, reason: SkipReason, message: str, prediction: Prediction | None = None) -> Outcome:
    patch = Patch()
    wanted = {SKIP_REASON_ANNOTATION: str(reason)}
    if prediction is not None:
        wanted[REPLICATED_LAYOUT_ANNOTATION] = prediction.annotation
    _add_annotations(patch, pod, wanted)
    operations = () if find_excess(pod, wanted, patch.operations) else tuple(patch.operations)
    return Outcome(operations, reason, message, prediction)


def _volume_conflict(pod: Manifest, annotations: Mapping[str, str]) -> tuple[SkipReason, str] | None:
    for volume in pod["spec"].get("volumes") or ():
        if volume["name"] == VOLUME_NAME and "emptyDir" not in volume:
            return SkipReason.NAME_CONFLICT, f"the pod has a volume {VOLUME_NAME} that is no emptyDir"
        if volume["name"] == VOLUME_NAME and INJECTED_ANNOTATION not in annotations:
            return SkipReason.NAME_CONFLICT, f"the pod brings a volume {VOLUME_NAME} of its own: rename it"
    return None


def _add_volume(patch: Patch, pod: Manifest) -> None:
    volumes = pod["spec"].get("volumes")
    ours = {"name": VOLUME_NAME, "emptyDir": {}}
    if not volumes:
        patch.add("/spec/volumes", [ours])
    elif all(volume["name"] != VOLUME_NAME for volume in volumes):
        patch.add("/spec/volumes/-", ours)


def _our_variables(annotations: Mapping[str, str], facts: PoolFacts, prediction: Prediction) -> dict[str, str]:
    """What the engine is told of pool and pod."""
    variables = {
        ENV_PYTHONHASHSEED: "0",
        ENV_SOCKET: SOCKET_PATH,
        ENV_POOL: facts.name,
        ENV_REPLICATED_LAYOUT: str(prediction.layout),
    }
    if annotations.get(WEIGHTS_ID_ANNOTATION):
        variables[ENV_WEIGHTS_ID] = annotations[WEIGHTS_ID_ANNOTATION]
    if facts.step_deadline_seconds is not None:
        variables[ENV_STEP_DEADLINE] = str(facts.step_deadline_seconds)
    return variables


def _add_affinity(patch: Patch, pod: Manifest, pool: str, attachment: Attachment) -> None:
    spec = pod["spec"]
    if spec.get("nodeName"):
        return
    expression = {"key": ready_node_label(pool), "operator": "In", "values": [READY_NODE_LABEL_VALUE]}
    affinity = spec.get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    if attachment is Attachment.REQUIRED:
        name = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = (node_affinity.get(name) or {}).get("nodeSelectorTerms") or []
        # terms are alternatives: ours has to be part of each
        if terms and all(expression in term.get("matchExpressions", ()) for term in terms):
            return
        value: Any = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*term.get("matchExpressions", ()), expression]} for term in terms or [{}]
            ]
        }
    else:
        name = "preferredDuringSchedulingIgnoredDuringExecution"
        preferences = node_affinity.get(name) or []
        ours = {"weight": PREFERENCE_WEIGHT, "preference": {"matchExpressions": [expression]}}
        if ours in preferences:
            return
        value = [*preferences, ours]
    if not spec.get("affinity"):
        patch.add("/spec/affinity", {"nodeAffinity": {name: value}})
    elif not affinity.get("nodeAffinity"):
        patch.add("/spec/affinity/nodeAffinity", {name: value})
    else:
        patch.add(f"/spec/affinity/nodeAffinity/{name}", value)


def _evictable_volumes(named: str) -> str:
    """The volumes that the user names, and ours: an emptyDir without it keeps the autoscaler from removing the node."""
    if VOLUME_NAME in named.split(","):
        return named
    return ",".join(filter(None, [named, VOLUME_NAME]))


def _add_annotations(patch: Patch, pod: Manifest, wanted: Mapping[str, str]) -> None:
    present = pod["metadata"].get("annotations")
    if not present:
        patch.add("/metadata/annotations", dict(wanted))
        return
    for key, value in wanted.items():
        if present.get(key) != value:
            patch.add(annotation_path(key), value)
