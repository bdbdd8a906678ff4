"""Checks of what comes before everything else: what this user may read, and how often the chart is installed. Pure."""

from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.facts import ClusterFacts, Part

OF_VIEWER = frozenset({Part.POOLS, Part.REGIONS})
"""What the chart's ClusterRole for application owners lets people read; the one for `doctor` has all but the try."""


def something_is_not_readable(facts: ClusterFacts) -> Found:
    """Something could not be read: it is unknown, and no check judges it."""
    if not facts.unread:
        return
    parts = ", ".join(part for part in Part if part in facts.unread)
    more = f"; {len(facts.unreadable) - 1} more with -o json" if len(facts.unreadable) > 1 else ""
    roles = []
    missing = facts.unread - {Part.WEBHOOK_CALL}
    if missing and missing <= OF_VIEWER:
        roles.append(f"the ClusterRole {facts.viewer_role}")
    elif missing:
        roles.append(f"the ClusterRole and the Role {facts.viewer_role.replace('-viewer', '-doctor')}")
    if Part.WEBHOOK_CALL in facts.unread:
        roles.append("the right to create pods in the namespace default, to try the webhook")
    yield (
        Severity.WARNING,
        "access",
        f"not checked: {parts} ({facts.unreadable[0]}{more})",
        f"where it is a lack of rights, ask for {' and '.join(roles)}",
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
