"""Manifests that the operator builds, pinned; and what must hold for each of them."""

from typing import Any

import pytest
import yaml

from golden_files import assert_golden
from kvoffload_operator.resources.daemonset import SPEC_HASH_ANNOTATION, build_daemonset
from kvoffload_operator.resources.region import build_region, build_region_spec
from operator_builders import daemonset_options, spec_of

CASES: dict[str, dict[str, Any]] = {
    "daemonset": {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "daemonset-managed-1gi": {"pageSize": "1Gi", "hugetlbfsMount": "Managed"},
    "daemonset-shared-memory": {"fallback": "SharedMemory"},
}


def build(spec: dict[str, Any]) -> dict[str, Any]:
    parsed = spec_of(**spec)
    return build_daemonset("main", parsed, capacity_bytes=parsed.capacity, options=daemonset_options())


@pytest.mark.parametrize("name", CASES)
def test_the_daemonset_is_as_pinned(name: str) -> None:
    assert_golden(yaml.safe_dump(build(CASES[name]), sort_keys=False), f"operator/{name}.yaml")


@pytest.mark.parametrize("spec", CASES.values(), ids=list(CASES))
def test_no_container_that_stays_has_a_capability_or_a_writable_root(spec: dict[str, Any]) -> None:
    for container in build(spec)["spec"]["template"]["spec"]["containers"]:
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False


def test_only_managed_mounts_bring_a_privileged_container() -> None:
    assert "initContainers" not in build(CASES["daemonset"])["spec"]["template"]["spec"]
    (mounter,) = build(CASES["daemonset-managed-1gi"])["spec"]["template"]["spec"]["initContainers"]
    assert mounter["securityContext"] == {"privileged": True}
    assert "pagesize=1G" in mounter["command"][-1]


def test_daemon_and_attacher_see_only_what_is_theirs() -> None:
    daemon, attacher = build(CASES["daemonset"])["spec"]["template"]["spec"]["containers"]
    assert {mount["name"] for mount in daemon["volumeMounts"]} == {"hugepages", "state", "handoff"}
    assert {mount["name"] for mount in attacher["volumeMounts"]} == {"handoff", "kubelet-pods"}


def test_the_opt_in_label_never_stands_on_our_own_pods() -> None:
    built = build(CASES["daemonset"])
    assert "kvoffload.io/pool" not in built["metadata"]["labels"] | built["spec"]["template"]["metadata"]["labels"]


def test_the_digest_follows_the_spec_and_nothing_else() -> None:
    digests = {name: build(spec)["metadata"]["annotations"][SPEC_HASH_ANNOTATION] for name, spec in CASES.items()}
    assert len(set(digests.values())) == len(CASES)
    assert build(CASES["daemonset"])["metadata"]["annotations"][SPEC_HASH_ANNOTATION] == digests["daemonset"]


def test_the_site_s_labels_are_on_daemonset_and_pods_and_select_nothing() -> None:
    options = daemonset_options(labels={"team": "ml", "app.kubernetes.io/name": "mine"})
    built = build_daemonset("main", spec_of(), capacity_bytes=1 << 30, options=options)
    for metadata in (built["metadata"], built["spec"]["template"]["metadata"]):
        assert metadata["labels"]["team"] == "ml"
        assert metadata["labels"]["app.kubernetes.io/name"] == "kvoffload"
    assert set(built["spec"]["selector"]["matchLabels"]) == {"kvoffload.io/daemon-of"}


def test_the_site_s_annotations_are_on_the_pods_and_roll_them() -> None:
    plain = build(CASES["daemonset"])
    options = daemonset_options(pod_annotations={"sidecar.istio.io/inject": "false"})
    built = build_daemonset("main", spec_of(), capacity_bytes=1 << 30, options=options)
    assert built["spec"]["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert set(built["metadata"]["annotations"]) == {SPEC_HASH_ANNOTATION}
    assert built["metadata"]["annotations"] != plain["metadata"]["annotations"]


def test_shared_memory_counts_as_memory_and_asks_for_no_huge_page() -> None:
    daemon = build(CASES["daemonset-shared-memory"])["spec"]["template"]["spec"]["containers"][0]
    assert not [name for name in daemon["resources"]["limits"] if name.startswith("hugepages")]
    assert daemon["resources"]["limits"]["memory"] == str((1 << 30) + (1 << 30)), "the limit of 1Gi and the capacity"
    assert daemon["resources"]["requests"]["memory"] == str((128 << 20) + (1 << 30))


def test_a_region_says_every_limit() -> None:
    spec = spec_of(quotas=[{"namespace": "a", "guaranteed": "64Mi"}, {"namespace": "b", "limit": "2Gi"}])
    region = build_region("main", "uid", build_region_spec("main", "node-1", spec))
    assert region["spec"]["quotas"] == [
        {"namespace": "a", "guaranteedBytes": 64 << 20, "limitBytes": 1 << 30},
        {"namespace": "b", "guaranteedBytes": 0, "limitBytes": 1 << 30},
    ]
    assert region["metadata"]["ownerReferences"][0]["kind"] == "KVOffloadPool"
    assert_golden(yaml.safe_dump(region, sort_keys=False), "operator/region.yaml")
