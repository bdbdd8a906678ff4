"""What is wrong with a KVOffloadPool's spec, beyond types and bounds. Pure.

The API server says most of this by CEL; it is said again here for what an older CRD let in, for what CEL cannot say
(label syntax, selectors that can select nothing), and as warnings that an administrator sees at `kubectl apply`.
Errors accumulate: all of them are told at once. Called by the validating webhook and by the pool's reconciler.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.api.model import LABEL_KEY_PATTERN, MAX_BYTE_COUNT
from kvoffload.api.pool import (
    MAX_POOL_NAME_LENGTH,
    POOL_NAME_PATTERN,
    Fallback,
    HugetlbfsMount,
    KVOffloadPoolSpec,
    LabelSelector,
    Mode,
    ReclaimPolicy,
    Sharing,
    Toleration,
)
from kvoffload.units import format_bytes, nearest_multiples

_LABEL_KEY = re.compile(LABEL_KEY_PATTERN)
MAX_LABEL_NAME_LENGTH = 63


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field that cannot be acted on."""

    field: str
    message: str

    def __str__(self) -> str:
        """Field and message, as the API server writes them."""
        return f"{self.field}: {self.message}"


@dataclass(frozen=True, slots=True)
class Validation:
    """All errors and warnings of one spec."""

    errors: tuple[FieldError, ...]
    warnings: tuple[str, ...]


def validate_pool_spec(spec: KVOffloadPoolSpec) -> Validation:
    """Check one spec."""
    errors = [
        *validate_capacity(spec),
        *validate_quotas(spec),
        *(
            FieldError(f"spec.nodeSelector[{key}]", error)
            for key in spec.node_selector
            if (error := label_key_error(key))
        ),
        *validate_selector("spec.namespaceSelector", spec.namespace_selector),
        *validate_tolerations(spec.tolerations),
    ]
    return Validation(tuple(errors), tuple(pool_warnings(spec)))


def validate_pool_name(name: str) -> list[FieldError]:
    """A DNS label: regions, labels and folders on the nodes are named by it."""
    if len(name) <= MAX_POOL_NAME_LENGTH and re.match(POOL_NAME_PATTERN, name):
        return []
    found = f"{name!r} must be a DNS label (lower case letters, digits and -) of at most {MAX_POOL_NAME_LENGTH} "
    return [FieldError("metadata.name", f"{found}characters, it has {len(name)}: make a pool of another name")]


def validate_capacity(spec: KVOffloadPoolSpec) -> list[FieldError]:
    """A positive multiple of the page size, and no more than a region can say."""
    page_bytes = spec.page_size.num_bytes
    if spec.capacity > MAX_BYTE_COUNT:
        found = f"{spec.capacity} bytes is more than {MAX_BYTE_COUNT} (1Ei), the most that a node can give: lower it"
        return [FieldError("spec.capacity", found)]
    if spec.capacity > 0 and spec.capacity % page_bytes == 0:
        return []
    below, above = nearest_multiples(spec.capacity, page_bytes)
    nearest = format_bytes(above or page_bytes) if below == 0 else f"{format_bytes(below)} and {format_bytes(above)}"
    return [
        FieldError(
            "spec.capacity",
            f"{spec.capacity} bytes is not a positive multiple of the page size {spec.page_size.value} ({page_bytes} "
            f"bytes): the nearest multiples are {nearest}",
        )
    ]


def show_bytes(num_bytes: int) -> str:
    """Exactly so many, with a unit: `2Gi`, `1000 bytes`."""
    text = format_bytes(num_bytes)
    return f"{text} bytes" if text.isdigit() else text


def validate_quotas(spec: KVOffloadPoolSpec) -> list[FieldError]:
    """Guarantees fit into the capacity and below their limits, and each namespace has one quota."""
    errors = []
    guaranteed = sum(quota.guaranteed for quota in spec.quotas)
    if guaranteed > spec.capacity:
        errors.append(
            FieldError(
                "spec.quotas",
                f"{show_bytes(guaranteed)} are guaranteed in all, the capacity is {show_bytes(spec.capacity)}: raise "
                "capacity or lower guaranteed",
            )
        )
    seen: set[str] = set()
    for index, quota in enumerate(spec.quotas):
        if quota.limit is not None and quota.guaranteed > quota.limit:
            errors.append(
                FieldError(
                    f"spec.quotas[{index}].guaranteed",
                    f"{show_bytes(quota.guaranteed)} is more than the limit {show_bytes(quota.limit)}: raise limit or "
                    "lower guaranteed",
                )
            )
        if quota.namespace in seen:
            errors.append(FieldError(f"spec.quotas[{index}].namespace", f"{quota.namespace} has a quota already"))
        seen.add(quota.namespace)
    return errors


def validate_selector(field: str, selector: LabelSelector | None) -> list[FieldError]:
    """Keys are label keys; In and NotIn have values, Exists and DoesNotExist none."""
    if selector is None:
        return []
    errors = [
        FieldError(f"{field}.matchLabels[{key}]", error)
        for key in selector.match_labels
        if (error := label_key_error(key))
    ]
    for index, requirement in enumerate(selector.match_expressions):
        path = f"{field}.matchExpressions[{index}]"
        if error := label_key_error(requirement.key):
            errors.append(FieldError(f"{path}.key", error))
        takes_values = requirement.operator in ("In", "NotIn")
        if takes_values and not requirement.values:
            errors.append(FieldError(f"{path}.values", f"operator {requirement.operator} needs at least one value"))
        if not takes_values and requirement.values:
            errors.append(FieldError(f"{path}.values", f"operator {requirement.operator} takes no values"))
    return errors


def validate_tolerations(tolerations: Sequence[Toleration]) -> list[FieldError]:
    """What the API server takes in the daemons' pods: it would refuse the pool's whole DaemonSet for one bad field."""
    errors = []
    for index, one in enumerate(tolerations):
        path = f"spec.tolerations[{index}]"
        if one.key and (error := label_key_error(one.key)):
            errors.append(FieldError(f"{path}.key", error))
        if not one.key and one.operator != "Exists":
            errors.append(FieldError(f"{path}.operator", "must be Exists where key is empty, which means every taint"))
        if one.value and one.operator == "Exists":
            errors.append(FieldError(f"{path}.value", f"must be empty with operator Exists, it is {one.value!r}"))
        if one.toleration_seconds is not None and one.effect != "NoExecute":
            found = one.effect or "empty"
            errors.append(FieldError(f"{path}.effect", f"must be NoExecute with tolerationSeconds, it is {found}"))
    return errors


def label_key_error(key: str) -> str:
    """Why this is no label key; empty if it is one."""
    name = key.rpartition("/")[2]
    if _LABEL_KEY.match(key) and len(name) <= MAX_LABEL_NAME_LENGTH:
        return ""
    return (
        f"{key!r} is no label key: write [prefix/]name, the name at most {MAX_LABEL_NAME_LENGTH} letters, digits, - _ ."
    )


def pool_warnings(spec: KVOffloadPoolSpec) -> list[str]:
    """What is allowed and may surprise."""
    warnings = []
    if not spec.node_selector:
        warnings.append("spec.nodeSelector is empty: every node of the cluster gives memory to this pool")
    if spec.fallback is Fallback.SHARED_MEMORY:
        warnings.append("spec.fallback SharedMemory uses 4 KiB pages on tmpfs: slower to map, and charged as memory")
    if spec.hugetlbfs_mount is HugetlbfsMount.MANAGED:
        warnings.append("spec.hugetlbfsMount Managed runs a privileged init container on each node")
    if spec.sharing is Sharing.POOL:
        warnings.append("spec.sharing Pool lets pods of every allowed namespace hit each other's blocks")
    if spec.reclaim_policy is ReclaimPolicy.RETAIN:
        warnings.append("spec.reclaimPolicy Retain keeps the pages on the nodes after this pool is deleted")
    if spec.mode is Mode.OBSERVE:
        warnings.append("spec.mode Observe makes nothing: it only reports what nodes would give")
    return warnings
