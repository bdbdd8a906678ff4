"""Counting what service accounts may do and did: the pure part of tests/e2e/test_rbac_use.py."""

import json
from pathlib import Path
from typing import Any

from e2e.rbac_use import Permission, find_granted, find_refused, find_used, read_events

NAMESPACE = "kv"


def event(verb: str, resource: str = "pods", *, account: str = f"{NAMESPACE}:operator", **more: Any) -> dict[str, Any]:
    reference = {"resource": resource, **more.pop("reference", {})}
    return {
        "requestReceivedTimestamp": "2020-11-29T10:00:00.000000Z",
        "requestURI": f"/{resource}",
        "user": {"username": f"system:serviceaccount:{account}"},
        "verb": verb,
        "objectRef": reference,
        "responseStatus": {"code": more.pop("code", 200)},
        **more,
    }


def used(*events: dict[str, Any], release: str = "") -> set[tuple[str, str, str]]:
    found = find_used(events, namespace=NAMESPACE, release_namespace=release)
    return {(one.scope, one.resource, one.verb) for one in found}


def role(kind: str, name: str, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, "rules": list(rules)}


def binding(kind: str, name: str, account: str) -> dict[str, Any]:
    reference = {"kind": kind.removesuffix("Binding"), "name": name}
    return {"kind": kind, "metadata": {"name": name}, "roleRef": reference, "subjects": [{"name": account}]}


def test_every_group_resource_and_verb_of_a_bound_role_is_granted_and_nothing_of_an_unbound_one() -> None:
    rule = {"apiGroups": ["", "apps"], "resources": ["pods", "pods/status"], "verbs": ["get", "patch"]}
    objects = [
        role("ClusterRole", "bound", rule),
        role("Role", "bound", {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["delete"]}),
        role("ClusterRole", "unbound", {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}),
        binding("ClusterRoleBinding", "bound", "operator"),
        binding("RoleBinding", "bound", "operator"),
        {"kind": "Deployment", "metadata": {"name": "bound"}},
    ]
    granted = find_granted(objects)
    assert len(granted) == 2 * 2 * 2 + 1
    assert Permission("operator", "cluster", "apps", "pods/status", "patch") in granted
    assert Permission("operator", "namespace", "apps", "daemonsets", "delete") in granted


def test_a_request_in_the_release_s_namespace_does_not_use_a_cluster_wide_right() -> None:
    inside = event("list", reference={"namespace": NAMESPACE})
    assert used(inside) == {("namespace", "pods", "list")}
    assert used(event("list")) == {("cluster", "pods", "list")}
    assert used(event("list", reference={"namespace": "default"})) == {("cluster", "pods", "list")}


def test_the_release_may_be_in_another_namespace_than_who_asks() -> None:
    inside = event("list", reference={"namespace": "release"})
    assert used(inside, release="release") == {("namespace", "pods", "list")}


def test_a_rule_with_names_is_a_right_for_each_of_them() -> None:
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["a", "b"]}
    objects = [role("Role", "named", rule), binding("RoleBinding", "named", "operator")]
    asked = find_used([event("get", "secrets", reference={"namespace": NAMESPACE, "name": "a"})], namespace=NAMESPACE)
    assert find_granted(objects) - asked == {Permission("operator", "namespace", "", "secrets", "get", "b")}


def test_an_apply_that_made_its_object_used_create_as_well() -> None:
    assert used(event("patch", code=201)) == {("cluster", "pods", "patch"), ("cluster", "pods", "create")}
    assert used(event("patch", code=200)) == {("cluster", "pods", "patch")}


def test_subresources_are_rights_of_their_own() -> None:
    assert used(event("patch", reference={"subresource": "status"})) == {("cluster", "pods/status", "patch")}


def test_what_was_refused_what_others_did_and_probes_are_no_use() -> None:
    discovery = event("get")
    del discovery["objectRef"]["resource"]
    events = [
        event("get", code=403),
        event("get", account="elsewhere:operator"),
        event("get", userAgent="kubectl/v1.37.2"),
        discovery,
    ]
    assert used(*events) == set()
    assert len(find_refused(events, namespace=NAMESPACE)) == 1


def test_a_namespace_that_is_being_deleted_refuses_nobody_for_want_of_a_right() -> None:
    answer = {
        "code": 403,
        "message": "forbidden: unable to create new content in namespace x because it is being terminated",
    }
    ending = event("create", "events")
    ending["responseStatus"] = answer
    assert find_refused([ending], namespace=NAMESPACE) == []


def test_a_log_is_read_from_a_moment_on_with_its_rotated_parts_and_without_a_half_line(tmp_path: Path) -> None:
    early, late = event("get"), event("list")
    late["requestReceivedTimestamp"] = "2020-11-29T11:00:00.000000Z"
    other = event("watch", account="elsewhere:operator")
    rotated, current = tmp_path / "audit-2020-11-29T10-30-00.000.log", tmp_path / "audit.log"
    rotated.write_text(f"{json.dumps(early)}\n{json.dumps(late)}\n")
    current.write_text(f"{json.dumps(other)}\n{json.dumps(late)}\n{json.dumps(late)[:40]}")
    half_past_ten = 1606645800.0
    verbs = [one["verb"] for one in read_events(current, namespace=NAMESPACE, since=half_past_ten)]
    assert verbs == ["list", "list"]
    assert len(read_events(current, namespace=NAMESPACE)) == 3
