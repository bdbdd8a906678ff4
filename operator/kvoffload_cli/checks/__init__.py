"""The checks of `kubectl kvoffload doctor`: facts in, findings out. Pure; each check carries the violation's name.

The order of `CHECKS` is the order in which things depend on each other: the first finding is the one to mend first.
"""

from collections.abc import Iterable

from kvoffload_cli.checks.cluster import several_releases_are_installed, something_is_not_readable
from kvoffload_cli.checks.finding import Check, Finding, Severity
from kvoffload_cli.checks.nodes import (
    kubelet_counts_missing_pages,
    kubelet_root_dir_is_wrong,
    node_is_not_ready,
)
from kvoffload_cli.checks.pods import (
    engine_declined_offload,
    layout_differs_from_prediction,
    pod_is_not_attached,
    pod_is_not_injected,
)
from kvoffload_cli.checks.pools import (
    daemon_does_not_run,
    daemon_pods_are_refused,
    daemons_are_replaced,
    node_is_short_of_pages,
    pool_is_not_ready,
    pool_matches_no_node,
    pools_overlap,
    region_does_not_serve,
)
from kvoffload_cli.checks.release import (
    certificate_expires,
    crd_is_missing_or_outdated,
    kubernetes_is_too_old,
    object_is_unreadable,
    release_is_incomplete,
    rollout_is_unfinished,
    webhook_is_not_asked,
    webhook_is_not_trusted,
)
from kvoffload_cli.facts import ClusterFacts

__all__ = ["CHECKS", "Check", "Finding", "Severity", "run_checks"]

CHECKS: tuple[Check, ...] = (
    something_is_not_readable,
    kubernetes_is_too_old,
    crd_is_missing_or_outdated,
    object_is_unreadable,
    several_releases_are_installed,
    release_is_incomplete,
    rollout_is_unfinished,
    webhook_is_not_trusted,
    webhook_is_not_asked,
    certificate_expires,
    node_is_not_ready,
    pool_matches_no_node,
    pools_overlap,
    node_is_short_of_pages,
    kubelet_root_dir_is_wrong,
    daemon_pods_are_refused,
    daemons_are_replaced,
    daemon_does_not_run,
    kubelet_counts_missing_pages,
    region_does_not_serve,
    pool_is_not_ready,
    pod_is_not_injected,
    pod_is_not_attached,
    engine_declined_offload,
    layout_differs_from_prediction,
)


def run_checks(facts: ClusterFacts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [
        Finding(severity=severity, check=check.__name__, subject=subject, message=message, remedy=remedy)
        for check in checks
        for severity, subject, message, remedy in check(facts)
    ]
