"""Decides about one opted-in pod and builds the patch. Pure; `server.py` calls `inject`.

Everything is set only where absent, so a second call finds nothing to do. The user's values stay: PYTHONPATH is
prefixed, VLLM_PLUGINS is added to, and where either comes from a reference it is kept under another name and referred
to. The volumes that the cluster autoscaler need not heed are added to as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvoffload import __version__
from kvoffload.api.keys import (
    CONTAINER_ANNOTATION,
    ENV_POOL,
    ENV_PYTHONHASHSEED,
    ENV_PYTHONPATH,
    ENV_REPLICATED_LAYOUT,
    ENV_SOCKET,
    ENV_STEP_DEADLINE,
    ENV_VLLM_PLUGINS,
    ENV_WEIGHTS_ID,
    IMAGE_PYTHONPATH_ANNOTATION,
    INJECTED_ANNOTATION,
    MODEL_ARCHITECTURE_ANNOTATION,
    MOUNT_PATH,
    PLUGIN_NAME,
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
from kvoffload_operator.webhook.command_line import CommandLine, Launch, parse_command_line
from kvoffload_operator.webhook.limits import find_excess
from kvoffload_operator.webhook.prediction import EngineFacts, Prediction, find_refusal, predict_layout
from kvoffload_operator.webhook.text_budget import TextBudget

Manifest = Mapping[str, Any]
Operation = dict[str, Any]

PREFERENCE_WEIGHT = 50
KEPT_PYTHONPATH = "KVOFFLOAD_USER_PYTHONPATH"
KEPT_PLUGINS = "KVOFFLOAD_USER_VLLM_PLUGINS"


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


@dataclass(slots=True)
class _Patch:
    """Collects JSON patch operations on one pod."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, path: str, value: Any) -> None:
        self.operations.append({"op": "add", "path": path, "value": value})

    def replace(self, path: str, value: Any) -> None:
        self.operations.append({"op": "replace", "path": path, "value": value})


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
    conflict = _conflict(pod, container, annotations)
    if conflict is not None:
        return _skip(pod, *conflict)
    if spec.mode is Mode.OBSERVE:
        return _skip(pod, SkipReason.POOL_OBSERVED, "the pool's mode is Observe", prediction)
    patch = _Patch()
    _add_volume(patch, pod)
    _add_mount(patch, container, chosen)
    _add_environment(patch, container, chosen, annotations, facts, prediction)
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
    patch = _Patch()
    wanted = {SKIP_REASON_ANNOTATION: str(reason)}
    if prediction is not None:
        wanted[REPLICATED_LAYOUT_ANNOTATION] = prediction.annotation
    _add_annotations(patch, pod, wanted)
    operations = () if find_excess(pod, wanted, patch.operations) else tuple(patch.operations)
    return Outcome(operations, reason, message, prediction)


# --- which container ------------------------------------------------------------------------------------------------


def choose_container(
    containers: Sequence[Manifest], lines: Sequence[CommandLine], named: str
) -> int | tuple[SkipReason, str]:
    """Index of the container that runs vLLM: the one named, or the one that looks like it, or the only one."""
    names = [container["name"] for container in containers]
    if named:
        if named in names:
            return names.index(named)
        return SkipReason.NO_VLLM_CONTAINER, f"{CONTAINER_ANNOTATION} names {named!r}, the pod has {', '.join(names)}"
    launches = [line.launch for line in lines]
    for wanted in (Launch.VLLM, Launch.IMAGE):
        found = [index for index, launch in enumerate(launches) if launch is wanted]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(names[index] for index in found)
            return SkipReason.AMBIGUOUS_CONTAINER, f"{several} could all be vLLM; name one in {CONTAINER_ANNOTATION}"
    by_image = [index for index, one in enumerate(containers) if "vllm" in one.get("image", "").lower()]
    if len(by_image) == 1:
        return by_image[0]
    if len(containers) == 1 and launches[0] is Launch.UNKNOWN:
        return 0  # a launcher: its owner says by the label that it is vLLM
    unread = next((f" as far as it was read ({line.unread})" for line in lines if line.unread), "")
    return (
        SkipReason.NO_VLLM_CONTAINER,
        f"none of {', '.join(names)} starts vLLM{unread}; name it in {CONTAINER_ANNOTATION}",
    )


def read_command_lines(containers: Sequence[Manifest]) -> list[CommandLine]:
    """Each container's vLLM arguments, within what is read of one pod."""
    budget = TextBudget()
    return [
        parse_command_line(
            container.get("command") or (),
            container.get("args") or (),
            literal_environment(container),
            container.get("image", ""),
            budget=budget,
        )
        for container in containers
    ]


def literal_environment(container: Manifest) -> dict[str, str | None]:
    """Variables by name; None where the value comes from elsewhere."""
    return {
        variable["name"]: None if "valueFrom" in variable else variable.get("value", "")
        for variable in container.get("env") or ()
    }


# --- conflicts ------------------------------------------------------------------------------------------------------


def _conflict(pod: Manifest, container: Manifest, annotations: Mapping[str, str]) -> tuple[SkipReason, str] | None:
    for volume in pod["spec"].get("volumes") or ():
        if volume["name"] == VOLUME_NAME and "emptyDir" not in volume:
            return SkipReason.NAME_CONFLICT, f"the pod has a volume {VOLUME_NAME} that is no emptyDir"
        if volume["name"] == VOLUME_NAME and INJECTED_ANNOTATION not in annotations:
            return SkipReason.NAME_CONFLICT, f"the pod brings a volume {VOLUME_NAME} of its own: rename it"
    for mount in container.get("volumeMounts") or ():
        path = mount["mountPath"].rstrip("/")
        if mount["name"] != VOLUME_NAME and (path == MOUNT_PATH or path.startswith(MOUNT_PATH + "/")):
            return SkipReason.NAME_CONFLICT, f"volume {mount['name']} is mounted at {path}, which is ours"
        if mount["name"] == VOLUME_NAME and (path != MOUNT_PATH or mount.get("subPath") or mount.get("subPathExpr")):
            return (
                SkipReason.NAME_CONFLICT,
                f"volume {VOLUME_NAME} is mounted at {path}, in part or elsewhere than at {MOUNT_PATH}: the engine "
                "would not find the daemon's socket",
            )
    for device in container.get("volumeDevices") or ():
        if device["devicePath"] == MOUNT_PATH:
            return SkipReason.NAME_CONFLICT, f"device {device['name']} is at {MOUNT_PATH}, which is ours"
    explained = IMAGE_PYTHONPATH_ANNOTATION in annotations or ENV_PYTHONPATH in literal_environment(container)
    if container.get("envFrom") and not explained:
        return (
            SkipReason.PYTHONPATH_FROM_REFERENCE,
            f"envFrom may set {ENV_PYTHONPATH}, which an injected one would hide; say what it is in the annotation "
            f"{IMAGE_PYTHONPATH_ANNOTATION}, empty if it is not set",
        )
    return None


# --- the patch ------------------------------------------------------------------------------------------------------


def _add_volume(patch: _Patch, pod: Manifest) -> None:
    volumes = pod["spec"].get("volumes")
    ours = {"name": VOLUME_NAME, "emptyDir": {}}
    if not volumes:
        patch.add("/spec/volumes", [ours])
    elif all(volume["name"] != VOLUME_NAME for volume in volumes):
        patch.add("/spec/volumes/-", ours)


def _add_mount(patch: _Patch, container: Manifest, index: int) -> None:
    mounts = container.get("volumeMounts")
    ours = {"name": VOLUME_NAME, "mountPath": MOUNT_PATH, "readOnly": True}
    base = f"/spec/containers/{index}/volumeMounts"
    if not mounts:
        patch.add(base, [ours])
    elif all(mount["name"] != VOLUME_NAME for mount in mounts):
        patch.add(f"{base}/-", ours)


def _add_environment(
    patch: _Patch,
    container: Manifest,
    index: int,
    annotations: Mapping[str, str],
    facts: PoolFacts,
    prediction: Prediction,
) -> None:
    present: Sequence[Manifest] = container.get("env") or ()
    # of a name that stands twice the last one counts
    places = {variable["name"]: place for place, variable in enumerate(present)}
    base = f"/spec/containers/{index}/env"
    changes: list[tuple[str, list[Manifest]]] = []
    image_path = annotations.get(IMAGE_PYTHONPATH_ANNOTATION, "").strip(":")
    changes.append((ENV_PYTHONPATH, _python_path(present, image_path)))
    changes.append((ENV_VLLM_PLUGINS, _plugins(present)))
    absent = {
        ENV_PYTHONHASHSEED: "0",
        ENV_SOCKET: SOCKET_PATH,
        ENV_POOL: facts.name,
        ENV_REPLICATED_LAYOUT: str(prediction.layout),
    }
    if annotations.get(WEIGHTS_ID_ANNOTATION):
        absent[ENV_WEIGHTS_ID] = annotations[WEIGHTS_ID_ANNOTATION]
    if facts.step_deadline_seconds is not None:
        absent[ENV_STEP_DEADLINE] = str(facts.step_deadline_seconds)
    added: list[Manifest] = []
    # in place from the end, so that indices stay right while a kept copy is put before its variable
    for name, variables in sorted(changes, key=lambda change: -places.get(change[0], -1)):
        if not variables:
            continue
        if name not in places:
            added.extend(variables)
            continue
        at = places[name]
        patch.replace(f"{base}/{at}", variables[-1])
        for kept in reversed(variables[:-1]):
            patch.add(f"{base}/{at}", kept)
    added.extend({"name": name, "value": value} for name, value in absent.items() if name not in places)
    if added and not present:
        patch.add(base, added)
    else:
        for variable in added:
            patch.add(f"{base}/-", variable)


def _last(present: Sequence[Manifest], name: str) -> Manifest | None:
    return next((variable for variable in reversed(present) if variable["name"] == name), None)


def _python_path(present: Sequence[Manifest], image_path: str) -> list[Manifest]:
    """PYTHONPATH with our folder first; nothing if it is there already."""
    found = _last(present, ENV_PYTHONPATH)
    if found is None:
        return [{"name": ENV_PYTHONPATH, "value": ":".join(filter(None, [MOUNT_PATH, image_path]))}]
    if "valueFrom" in found:
        kept = {**found, "name": KEPT_PYTHONPATH}
        return [kept, {"name": ENV_PYTHONPATH, "value": f"{MOUNT_PATH}:$({KEPT_PYTHONPATH})"}]
    value = found.get("value", "")
    if MOUNT_PATH in value.split(":"):
        return []
    return [{"name": ENV_PYTHONPATH, "value": ":".join(filter(None, [MOUNT_PATH, value]))}]


def _plugins(present: Sequence[Manifest]) -> list[Manifest]:
    """VLLM_PLUGINS with ours, only where the user limited them."""
    found = _last(present, ENV_VLLM_PLUGINS)
    if found is None:
        return []
    if "valueFrom" in found:
        kept = {**found, "name": KEPT_PLUGINS}
        return [kept, {"name": ENV_VLLM_PLUGINS, "value": f"$({KEPT_PLUGINS}),{PLUGIN_NAME}"}]
    value = found.get("value", "")
    if PLUGIN_NAME in [name.strip() for name in value.split(",")]:
        return []
    return [{"name": ENV_VLLM_PLUGINS, "value": ",".join(filter(None, [value, PLUGIN_NAME]))}]


def _add_affinity(patch: _Patch, pod: Manifest, pool: str, attachment: Attachment) -> None:
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


def _add_annotations(patch: _Patch, pod: Manifest, wanted: Mapping[str, str]) -> None:
    present = pod["metadata"].get("annotations")
    if not present:
        patch.add("/metadata/annotations", dict(wanted))
        return
    for key, value in wanted.items():
        if present.get(key) != value:
            patch.add(annotation_path(key), value)


def annotation_path(key: str) -> str:
    """JSON pointer to an annotation."""
    return f"/metadata/annotations/{key.replace('~', '~0').replace('/', '~1')}"
