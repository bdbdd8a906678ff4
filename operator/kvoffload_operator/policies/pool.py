"""What is wrong with a pool as a whole. Pure; called by the pool's reconciler, each check named for the violation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffload.api.conditions import PoolReason
from kvoffload.api.keys import APPLY_CRDS_COMMAND
from kvoffload.api.pool import Fallback, KVOffloadPoolSpec, Mode
from kvoffload.units import format_bytes
from kvoffload_operator.observe import ObservedNode, ObservedPool, node_matches

MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class PoolViolation:
    """One thing that is wrong, as reason and message of a condition."""

    reason: PoolReason
    message: str


def matches_no_node(spec: KVOffloadPoolSpec, matching: Sequence[ObservedNode], num_nodes: int) -> PoolViolation | None:
    """No node carries the selector's labels."""
    if matching:
        return None
    selector = ", ".join(f"{key}={value}" for key, value in sorted(spec.node_selector.items())) or "(empty)"
    return PoolViolation(
        PoolReason.NO_MATCHING_NODES,
        f"none of {num_nodes} nodes matches nodeSelector {selector}: label a node with `kubectl label node <name> "
        f"{selector.replace(', ', ' ')}`, or change the selector",
    )


def exceeds_every_node(spec: KVOffloadPoolSpec, matching: Sequence[ObservedNode]) -> PoolViolation | None:
    """The capacity is more than any matching node can give."""
    if not matching or spec.fallback is Fallback.SHARED_MEMORY:
        return None
    most = max(node.allocatable_page_bytes[spec.page_size] for node in matching)
    if most >= spec.capacity:
        return None
    return PoolViolation(
        PoolReason.EXCEEDS_EVERY_NODE,
        f"capacity {format_bytes(spec.capacity)} is more than any of {len(matching)} matching nodes has: the most is "
        f"{format_bytes(most)} of allocatable {spec.page_size.value} pages. Lower the capacity or reserve pages",
    )


def overlaps_another(
    pool: ObservedPool, pools: Mapping[str, ObservedPool], matching: Sequence[ObservedNode]
) -> PoolViolation | None:
    """Another pool matches some of the same nodes: a pod still chooses by name, but both take pages.

    One that only observes takes none.
    """
    overlaps = []
    if pool.spec is None or pool.spec.mode is Mode.OBSERVE:
        return None
    for other in sorted(pools.values(), key=lambda one: one.name):
        if other.name == pool.name or other.spec is None or other.deleting:
            continue
        if other.spec.mode is Mode.OBSERVE:
            continue
        shared = sum(node_matches(node, other.spec.node_selector) for node in matching)
        if shared:
            overlaps.append(f"{other.name} on {shared} nodes")
    if not overlaps:
        return None
    named = ", ".join(overlaps[:MAX_NAMED]) + (
        f" and {len(overlaps) - MAX_NAMED} more" if len(overlaps) > MAX_NAMED else ""
    )
    return PoolViolation(
        PoolReason.OVERLAPS_ANOTHER_POOL,
        f"overlaps {named}: each takes its own pages there. Use different nodeSelectors unless that is meant",
    )


def daemonset_name_is_taken(daemonset: str, namespace: str, conflict: str) -> PoolViolation | None:
    """The API server refused our first apply because somebody else's DaemonSet has the name; `conflict` says whose."""
    if not conflict:
        return None
    return PoolViolation(
        PoolReason.DAEMONSET_NAME_TAKEN,
        f"DaemonSet {namespace}/{daemonset} is there and not this pool's: it is left as it is, and no daemon runs. "
        f"Delete or rename it, or give the pool another name ({conflict})",
    )


def crd_is_outdated(pool: ObservedPool) -> PoolViolation | None:
    """The API server stored none of the fields that it should have defaulted: its CRD is older than this operator."""
    expected = {
        info.alias or name
        for name, info in KVOffloadPoolSpec.model_fields.items()
        if not info.is_required() and info.default is not None
    }
    missing = sorted(expected - pool.spec_fields)
    if not missing:
        return None
    return PoolViolation(
        PoolReason.CRD_OUTDATED,
        f"the installed CRD lacks spec fields {', '.join(missing)}: their defaults are in force and cannot be changed. "
        f"In a clone of this version: `{APPLY_CRDS_COMMAND}`",
    )


def crd_is_newer(pool: ObservedPool) -> PoolViolation | None:
    """The API server stored fields that this operator does not know: its CRD is newer, as after a rollback."""
    known = {info.alias or name for name, info in KVOffloadPoolSpec.model_fields.items()}
    unknown = sorted(pool.spec_fields - known)
    if not unknown:
        return None
    return PoolViolation(
        PoolReason.CRD_NEWER,
        f"the installed CRD is newer than this operator, which ignores spec fields {', '.join(unknown)}: upgrade the "
        "operator, or leave them at their defaults",
    )
