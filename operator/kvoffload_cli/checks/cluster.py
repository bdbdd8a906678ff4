"""Checks of what comes before everything else: what this user may read, and how often the chart is installed. Pure."""

from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.facts import ClusterFacts, Part

BY_VIEW = frozenset({Part.PODS, Part.DEPLOYMENTS, Part.DAEMONSETS})
"""What Kubernetes' own ClusterRole `view` lets people read, where it is bound for the whole cluster."""


def something_is_not_readable(facts: ClusterFacts) -> Found:
    """Something could not be read: it is unknown, and no check judges it."""
    if not facts.unread:
        return
    parts = ", ".join(part for part in Part if part in facts.unread)
    more = f"; {len(facts.unreadable) - 1} more with -o json" if len(facts.unreadable) > 1 else ""
    roles = []
    if facts.unread & {Part.POOLS, Part.REGIONS}:
        roles.append(f"{facts.viewer_role} for pools and regions")
    if facts.unread & BY_VIEW:
        roles.append("view, bound for the whole cluster, for pods, Deployments and DaemonSets")
    if facts.unread - BY_VIEW - {Part.POOLS, Part.REGIONS}:
        roles.append("cluster-admin for all")
    yield (
        Severity.WARNING,
        "access",
        f"not checked: {parts} ({facts.unreadable[0]}{more})",
        f"where it is a lack of rights, ask for the ClusterRole {'; '.join(roles)}",
    )


def several_releases_are_installed(facts: ClusterFacts) -> Found:
    """Two releases of the chart: pools, nodes and pods belong to no namespace, so both act on all of them."""
    releases = sorted({(one.release, one.namespace) for one in facts.workloads if one.release})
    if len(releases) > 1:
        named = ", ".join(f"{release} in namespace {namespace}" for release, namespace in releases)
        yield (
            Severity.ERROR,
            "releases",
            f"the chart is installed {len(releases)} times: {named}; each acts on every pool and pod",
            "keep one: " + " or ".join(f"helm uninstall {release} -n {namespace}" for release, namespace in releases),
        )
