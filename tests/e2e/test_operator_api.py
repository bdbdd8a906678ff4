"""Manifests at a real API server: what is taken, what is refused and in which words, and who may write what."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.control_plane import NAMESPACE, ControlPlane, region_report
from e2e.operator_pools import pool_manifest

pytestmark = pytest.mark.e2e


def pool(name: str = "api-test", **spec: Any) -> dict[str, Any]:
    return pool_manifest(name, **spec)


def try_apply(plane: ControlPlane, manifest: dict[str, Any]) -> str:
    """What kubectl says, without anything being stored."""
    arguments = ["apply", "--dry-run=server", "-f", "-"]
    return plane.kubectl(*arguments, stdin=json.dumps(manifest), check=False)


@pytest.mark.parametrize(
    "spec",
    [
        {"capacity": 107374182400},
        {"capacity": "100Gi"},
        {"capacity": "0.5Gi"},
        {"capacity": "1Gi", "pageSize": "1Gi"},
        {"capacity": 2**53 + 2**21},
        {
            "quotas": [
                {"namespace": "a", "guaranteed": "32Mi", "limit": "64Mi"},
                {"namespace": "b", "guaranteed": "32Mi"},
            ]
        },
        {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}},
        {"nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}], "mode": "Observe"},
    ],
)
def test_a_good_pool_is_taken(control_plane: ControlPlane, spec: dict[str, Any]) -> None:
    assert "created (server dry run)" in try_apply(control_plane, pool(**spec))


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (pool(capacity=104857601), ["spec.capacity", "104857601", "nearest multiples are 100Mi and 102Mi"]),
        (pool(capacity="1e11"), ["spec.capacity", "1e11", "nearest multiples are 95366Mi and 95368Mi"]),
        (pool(capacity="100G"), ["spec.capacity", "100G", "nearest multiples are"]),
        (pool(capacity=-1), ["spec.capacity", "-1", "nearest multiples are 2Mi and 4Mi"]),
        (pool(capacity=0), ["spec.capacity", "not a positive multiple"]),
        (pool(capacity=2**53 + 1), ["spec.capacity", str(2**53 + 1), "nearest multiples are 8589934592Mi and"]),
        (
            pool(capacity="64Mi", pageSize="1Gi"),
            ["spec.capacity", "64Mi", "page size 1Gi", "multiples are 1Gi and 2Gi"],
        ),
        (pool(capacity=1.5), ["spec.capacity"]),
        (pool(capacity="many"), ["spec.capacity", "many"]),
        (pool(pageSize="4Ki"), ["spec.pageSize", "4Ki", '"2Mi", "1Gi"']),
        (pool(mode="Off"), ["spec.mode", "Off", '"Active", "Observe", "Paused"']),
        (pool(maxEnginesPerNode=0), ["spec.maxEnginesPerNode", "greater than or equal to 1"]),
        (
            pool(quotas=[{"namespace": "a", "guaranteed": "48Mi"}, {"namespace": "b", "guaranteed": "32Mi"}]),
            ["spec.quotas", "80Mi are guaranteed", "capacity is 64Mi", "raise capacity or lower guaranteed"],
        ),
        (pool(quotas=[{"namespace": "a", "guaranteed": "1Gi"}]), ["1Gi are guaranteed in all, the capacity is 64Mi"]),
        (pool(quotas=[{"namespace": "a", "guaranteed": "100M"}]), ["100000000 bytes are guaranteed in all"]),
        (
            pool(quotas=[{"namespace": "a", "guaranteed": "32Mi", "limit": "16Mi"}]),
            ["spec.quotas[0].guaranteed", "32Mi of namespace a", "limit 16Mi", "raise limit"],
        ),
        (pool(quotas=[{"namespace": "a"}, {"namespace": "a"}]), ["spec.quotas[1]", "Duplicate"]),
        (pool("a.b"), ["metadata.name a.b", "DNS label", "40 characters"]),
        (pool("x" * 41), ["metadata.name", "40 characters"]),
        (pool(capacityy="1Gi"), ["capacityy", "unknown field"]),
    ],
)
def test_a_bad_pool_is_refused_with_field_value_and_remedy(
    control_plane: ControlPlane, manifest: dict[str, Any], said: list[str]
) -> None:
    answer = try_apply(control_plane, manifest)
    assert "created" not in answer
    for words in said:
        assert words in answer, answer


@pytest.mark.parametrize("capacity", ["256MB", "many", "256 Mi"])
def test_a_capacity_that_is_no_quantity_is_one_message_with_the_units_that_are(
    control_plane: ControlPlane, capacity: str
) -> None:
    answer = try_apply(control_plane, pool(capacity=capacity))
    assert answer.count("Invalid value") == 1, answer
    assert (
        f"{capacity} is no quantity; write Ki, Mi, Gi, Ti, Pi, Ei (powers of 1024), k, M, G, T, P, E (of 1000), or "
        "bytes without a suffix"
    ) in answer


@pytest.fixture
def stored(control_plane: ControlPlane) -> Iterator[str]:
    control_plane.apply(pool(nodeSelector={"nowhere": "yes"}))
    yield "api-test"
    control_plane.kubectl("delete", "kvpool", "api-test")


def test_defaults_are_stored_and_numbers_stay_exact(control_plane: ControlPlane, stored: str) -> None:
    spec = control_plane.get("kvpool", stored)["spec"]
    assert spec["maxEnginesPerNode"] == 64
    assert (spec["pageSize"], spec["mode"], spec["sharing"], spec["quotas"]) == ("2Mi", "Active", "Namespace", [])
    big = 2**53 + 2**21
    control_plane.kubectl("patch", "kvpool", stored, "--type=merge", "-p", json.dumps({"spec": {"capacity": big}}))
    assert control_plane.get("kvpool", stored)["spec"]["capacity"] == big


@pytest.mark.parametrize(("field", "value"), [("pageSize", "1Gi"), ("sharing", "Pool")])
def test_what_cannot_change_says_what_to_do_instead(
    control_plane: ControlPlane, stored: str, field: str, value: str
) -> None:
    change = json.dumps({"spec": {field: value, "capacity": "1Gi"}})
    answer = control_plane.kubectl("patch", "kvpool", stored, "--type=merge", "-p", change, check=False)
    assert f"{field} cannot be changed from" in answer
    assert "make a second pool" in answer


def test_explain_reads_as_documentation(control_plane: ControlPlane) -> None:
    text = " ".join(control_plane.kubectl("explain", "kvpool.spec").split())
    assert "capacity is the bytes of huge pages on each node, a multiple of pageSize" in text


# --- who may write a region's status -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regions(control_plane: ControlPlane) -> Iterator[dict[str, dict[str, Any]]]:
    """A region for each of two nodes, with the operator's condition in the first."""
    for node in ("n1", "n2"):
        control_plane.apply(
            {
                "apiVersion": "kvoffload.io/v1alpha1",
                "kind": "KVOffloadRegion",
                "metadata": {"name": f"vap.{node}"},
                "spec": {"poolName": "vap", "nodeName": node, "capacityBytes": 2 << 20, "pageSizeBytes": 2 << 20},
            }
        )
    node_ready = {
        "type": "NodeReady",
        "status": "True",
        "reason": "DaemonRunning",
        "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    apply_status(control_plane, "vap.n1", [node_ready], manager="kvoffload-operator")
    yield {name: control_plane.get("kvregion", f"vap.{name}") for name in ("n1", "n2")}
    control_plane.kubectl("delete", "kvregion", "vap.n1", "vap.n2")


def apply_status(plane: ControlPlane, name: str, listed: list[dict[str, Any]], *, manager: str, token: str = "") -> str:
    manifest = {
        "apiVersion": "kvoffload.io/v1alpha1",
        "kind": "KVOffloadRegion",
        "metadata": {"name": name},
        "status": {"conditions": listed},
    }
    arguments = ["apply", "--server-side", "--subresource=status", f"--field-manager={manager}", "-f", "-"]
    return plane.kubectl(*arguments, stdin=json.dumps(manifest), check=False, token=token)


@pytest.fixture(scope="module")
def tokens(control_plane: ControlPlane) -> Iterator[dict[str, str]]:
    """Tokens of node daemons: bound to a pod of each node, and one that is bound to none."""
    account = ["create", "token", "kvoffload-node", "-n", NAMESPACE, "--duration=1h"]
    found = {"unbound": control_plane.kubectl(*account).strip()}
    for node in ("n1", "n2"):
        control_plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"vap-{node}", "namespace": NAMESPACE},
                "spec": {
                    "nodeName": node,
                    "serviceAccountName": "kvoffload-node",
                    "containers": [{"name": "c", "image": "x"}],
                },
            }
        )
        found[node] = control_plane.kubectl(
            *account, "--bound-object-kind=Pod", f"--bound-object-name=vap-{node}"
        ).strip()
    yield found
    for node in ("n1", "n2"):
        control_plane.kubectl("delete", "pod", f"vap-{node}", "-n", NAMESPACE, "--force", "--grace-period=0")


READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Serving",
    "message": "m",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def test_a_daemon_writes_the_status_of_its_own_node_s_region(
    control_plane: ControlPlane, regions: dict[str, Any], tokens: dict[str, str]
) -> None:
    answer = control_plane.kubectl(
        "apply", "--server-side", "--subresource=status", "--field-manager=kvoffload-node", "-f", "-",
        stdin=json.dumps(region_report(control_plane, regions["n1"])), token=tokens["n1"],
    )  # fmt: skip
    assert "serverside-applied" in answer
    types = {one["type"] for one in control_plane.get("kvregion", "vap.n1")["status"]["conditions"]}
    assert types == {"Ready", "NodeReady"}


@pytest.mark.parametrize(("token", "said"), [("n2", "bound to node n2"), ("unbound", "bound to node (none)")])
def test_another_node_s_token_and_an_unbound_one_are_refused(
    control_plane: ControlPlane, regions: dict[str, Any], tokens: dict[str, str], token: str, said: str
) -> None:
    answer = apply_status(control_plane, "vap.n1", [READY], manager="kvoffload-node", token=tokens[token])
    assert "denied request" in answer
    assert said in answer
    assert "region vap.n1 is of node n1" in answer


def test_a_daemon_cannot_change_the_operator_s_condition_even_by_force(
    control_plane: ControlPlane, regions: dict[str, Any], tokens: dict[str, str]
) -> None:
    forged = {**READY, "type": "NodeReady", "message": "forged"}
    patch = json.dumps({"status": {"conditions": [forged]}})
    # not by kubectl, which reads the status first: a daemon may not
    request = urllib.request.Request(
        f"{control_plane.url}/apis/kvoffload.io/v1alpha1/kvoffloadregions/vap.n1/status",
        patch.encode(),
        {"Content-Type": "application/merge-patch+json", "Authorization": f"Bearer {tokens['n1']}"},
        method="PATCH",
    )
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, context=context, timeout=10)
    with refused.value:
        answer = refused.value.read().decode()
    assert "condition NodeReady is the operator's" in answer


@pytest.mark.parametrize(
    ("account", "verb", "resource", "allowed"),
    [
        ("kvoffload-node", "patch", "kvoffloadregions.kvoffload.io/status", True),
        ("kvoffload-node", "patch", "kvoffloadregions.kvoffload.io", False),
        ("kvoffload-node", "delete", "kvoffloadregions.kvoffload.io", False),
        ("kvoffload-node", "get", "secrets", False),
        ("kvoffload-node", "patch", "pods", False),
        ("kvoffload-webhook", "get", "kvoffloadpools.kvoffload.io", True),
        ("kvoffload-webhook", "patch", "kvoffloadpools.kvoffload.io", False),
        ("kvoffload-webhook", "list", "secrets", False),
        ("kvoffload-operator", "patch", "nodes", True),
        ("kvoffload-operator", "patch", "pods", False),
        ("kvoffload-operator", "delete", "pods", False),
        ("kvoffload-operator", "list", "secrets", False),
        ("kvoffload-operator", "create", "clusterroles.rbac.authorization.k8s.io", False),
        ("kvoffload-operator", "delete", "kvoffloadpools.kvoffload.io", False),
    ],
)
def test_permissions_are_no_more_than_the_work_needs(
    control_plane: ControlPlane, account: str, verb: str, resource: str, allowed: bool
) -> None:
    who = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
    kind, _, subresource = resource.partition("/")
    extra = [f"--subresource={subresource}"] if subresource else []
    answer = control_plane.kubectl("auth", "can-i", verb, kind, *extra, who, check=False)
    assert answer.split()[0] == ("yes" if allowed else "no"), answer
