"""What our service accounts may do, by the roles that helm renders, beside what they did, by the audit logs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
RELEASE_NAMESPACE = "namespace"
CLUSTER = "cluster"
PROBES = "kubectl/"
"""User agent of the tests' own attempts with our tokens: no use of ours."""


@dataclass(frozen=True, slots=True, order=True)
class Permission:
    """One verb on one resource, for one of our service accounts."""

    account: str
    scope: str
    """`cluster`: by a ClusterRole; `namespace`: by a Role in the release's namespace."""
    group: str
    resource: str
    """With its subresource, `kvoffloadpools/status`."""
    verb: str
    name: str = ""
    """Of the one object that it is for; empty where it is for all of them."""

    def __str__(self) -> str:
        resource = f"{self.resource}{'.' if self.group else ''}{self.group}{'/' if self.name else ''}{self.name}"
        return f"{self.account}: {self.verb} {resource} ({self.scope})"


def find_granted(objects: Iterable[Mapping[str, Any]]) -> set[Permission]:
    """Return what roles and bindings of a rendered chart give to its service accounts."""
    roles = {}
    bindings = []
    for one in objects:
        if one["kind"] in ("Role", "ClusterRole"):
            roles[one["kind"], one["metadata"]["name"]] = one
        elif one["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            bindings.append(one)
    return {
        permission
        for binding in bindings
        for subject in binding["subjects"]
        for permission in find_allowed(
            roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]], account=subject["name"]
        )
    }


def find_allowed(role: Mapping[str, Any], *, account: str) -> set[Permission]:
    """Return what a role gives to an account that it is bound to, by a binding of its own kind."""
    scope = CLUSTER if role["kind"] == "ClusterRole" else RELEASE_NAMESPACE
    return {Permission(account, scope, *what) for rule in role["rules"] for what in _rule_permissions(rule)}


def _rule_permissions(rule: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                for name in rule.get("resourceNames", [""]):
                    yield group, resource, verb, name


def find_used(events: Iterable[Event], *, namespace: str, release_namespace: str = "") -> set[Permission]:
    """Return what the service accounts of a namespace asked for and were given, discovery and tests' probes aside.

    A request inside the release's namespace (the same, if it is not given) would have needed no more than a Role; a
    server-side apply that made its object (201) was checked for `create` as well. Each request of one object stands
    there twice, for a rule that names the object and for one that does not.
    """
    release_namespace = release_namespace or namespace
    used = set()
    for event in events:
        account = account_of(event, namespace=namespace)
        reference = event.get("objectRef", {})
        is_probe = event.get("userAgent", "").startswith(PROBES)
        if account is None or is_probe or is_refused(event) or "resource" not in reference:
            continue
        resource = "/".join(filter(None, (reference["resource"], reference.get("subresource", ""))))
        scope = RELEASE_NAMESPACE if reference.get("namespace") == release_namespace else CLUSTER
        verbs = {event["verb"]}
        if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
            verbs.add("create")
        names = {"", reference.get("name", "")}
        group = reference.get("apiGroup", "")
        used |= {Permission(account, scope, group, resource, verb, name) for verb in verbs for name in names}
    return used


def find_refused(events: Iterable[Event], *, namespace: str) -> list[str]:
    """Return the requests of the namespace's service accounts that were refused: who asked for what, and the answer."""
    return [
        f"{event['requestReceivedTimestamp']} {account}: {event['verb']} {event['requestURI']}: "
        f"{event.get('responseStatus', {}).get('message', '')}"
        for event in events
        if (account := account_of(event, namespace=namespace)) and is_refused(event)
    ]


def account_of(event: Event, *, namespace: str) -> str | None:
    """Return the service account of that namespace who asked, None if it was somebody else."""
    prefix = f"system:serviceaccount:{namespace}:"
    user: str = event["user"].get("username", "")
    return user.removeprefix(prefix) if user.startswith(prefix) else None


def is_refused(event: Event) -> bool:
    """By authentication, RBAC or an admission policy; a namespace that is being deleted takes nothing from anybody."""
    answer = event.get("responseStatus", {})
    return answer.get("code") in (401, 403) and "is being terminated" not in answer.get("message", "")


def read_events(log: Path, *, namespace: str, since: float = 0.0) -> list[Event]:
    """Read an audit log, with the parts that were rotated away: events of a namespace's accounts, from a moment on.

    `since` is in seconds since the epoch. A line that is being written is left out.
    """
    from_stamp = _stamp(since)
    found = []
    for path in sorted(log.parent.glob(f"{log.stem}*{log.suffix}")):
        if path.stat().st_mtime < since:
            continue
        with path.open() as lines:
            for line in lines:
                if f":{namespace}:" in line and line.endswith("}\n"):
                    event: Event = json.loads(line)
                    if event["requestReceivedTimestamp"] >= from_stamp:
                        found.append(event)
    return found


def _stamp(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
