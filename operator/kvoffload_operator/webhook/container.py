"""One container of a pod: which of them is the engine's, what in it stands against us, and what is added to it. Pure.

Called by `injection.py`, which decides about the pod as a whole. It changes with how engines are started and found, and
with what an engine's container needs to find us; what the pod is given beside it (volume, affinity, annotations) and
which values our variables have is not known here.

The user's values stay: PYTHONPATH is prefixed, VLLM_PLUGINS is added to, and where either comes from a reference it is
kept under another name and referred to.
"""

from collections.abc import Mapping, Sequence

from kvoffload.api.keys import (
    CONTAINER_ANNOTATION,
    ENV_PYTHONPATH,
    ENV_VLLM_PLUGINS,
    IMAGE_PYTHONPATH_ANNOTATION,
    MOUNT_PATH,
    PLUGIN_NAME,
    VOLUME_NAME,
    SkipReason,
)
from kvoffload_operator.webhook.command_line import CommandLine, Launch, parse_command_line
from kvoffload_operator.webhook.patch import Manifest, Patch
from kvoffload_operator.webhook.text_budget import TextBudget

KEPT_PYTHONPATH = "KVOFFLOAD_USER_PYTHONPATH"
KEPT_PLUGINS = "KVOFFLOAD_USER_VLLM_PLUGINS"


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


def find_conflict(container: Manifest, annotations: Mapping[str, str]) -> tuple[SkipReason, str] | None:
    """What in the container stands where our part would, or would be hidden by it; None if nothing."""
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


def add_mount(patch: Patch, container: Manifest, index: int) -> None:
    """Our volume, where the container does not mount it yet; `index` is its place in the pod."""
    mounts = container.get("volumeMounts")
    ours = {"name": VOLUME_NAME, "mountPath": MOUNT_PATH, "readOnly": True}
    base = f"/spec/containers/{index}/volumeMounts"
    if not mounts:
        patch.add(base, [ours])
    elif all(mount["name"] != VOLUME_NAME for mount in mounts):
        patch.add(f"{base}/-", ours)


def add_environment(
    patch: Patch, container: Manifest, index: int, *, image_path: str, wanted: Mapping[str, str]
) -> None:
    """The variables of `wanted` that are absent, PYTHONPATH, and VLLM_PLUGINS where the user limits them.

    `image_path` is the PYTHONPATH of the container's image, which a pod cannot see; empty if it has none.
    """
    present: Sequence[Manifest] = container.get("env") or ()
    # of a name that stands twice the last one counts
    places = {variable["name"]: place for place, variable in enumerate(present)}
    base = f"/spec/containers/{index}/env"
    changes = ((ENV_PYTHONPATH, _python_path(present, image_path)), (ENV_VLLM_PLUGINS, _plugins(present)))
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
    added.extend({"name": name, "value": value} for name, value in wanted.items() if name not in places)
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
