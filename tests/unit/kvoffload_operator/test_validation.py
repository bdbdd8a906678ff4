"""What is wrong with a pool beyond the schema, all at once."""

from typing import Any

import pytest

from kvoffload.api.pool import KVOffloadPoolSpec
from kvoffload_operator.webhook.validation import label_key_error, validate_pool_spec
from operator_builders import spec_of


def errors(**spec: Any) -> list[str]:
    return [str(error) for error in validate_pool_spec(spec_of(**spec)).errors]


def test_a_good_spec_has_no_errors_and_only_deserved_warnings() -> None:
    validation = validate_pool_spec(spec_of(nodeSelector={"gpu": "yes"}))
    assert validation.errors == ()
    assert validation.warnings == ()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"capacity": 104857601}, "spec.capacity: 104857601 bytes is not a positive multiple of the page size 2Mi"),
        ({"capacity": 104857601}, "the nearest multiples are 100Mi and 102Mi"),
        ({"capacity": 1}, "the nearest multiples are 2Mi"),
        ({"capacity": 0}, "the nearest multiples are 2Mi"),
        ({"capacity": "64Mi", "pageSize": "1Gi"}, "the nearest multiples are 1Gi"),
        ({"quotas": [{"namespace": "a", "guaranteed": "2Gi"}]}, "spec.quotas: 2Gi are guaranteed in all"),
        (
            {"quotas": [{"namespace": "a", "guaranteed": "2Mi", "limit": "1Mi"}]},
            "spec.quotas[0].guaranteed: 2Mi is more than the limit 1Mi",
        ),
        ({"quotas": [{"namespace": "a"}, {"namespace": "a"}]}, "spec.quotas[1].namespace: a has a quota already"),
        ({"nodeSelector": {"a b": "c"}}, "spec.nodeSelector[a b]: 'a b' is no label key"),
        (
            {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["x"]}]}},
            "spec.namespaceSelector.matchExpressions[0].values: operator Exists takes no values",
        ),
        (
            {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "NotIn"}]}},
            "operator NotIn needs at least one value",
        ),
        ({"namespaceSelector": {"matchLabels": {"-": "c"}}}, "spec.namespaceSelector.matchLabels[-]"),
    ],
)
def test_an_error_names_field_value_and_remedy(spec: dict[str, Any], said: str) -> None:
    assert any(said in error for error in errors(**spec)), errors(**spec)


def test_all_errors_are_told_at_once() -> None:
    assert len(errors(capacity=1, nodeSelector={"a b": "c"}, quotas=[{"namespace": "a", "guaranteed": "1Gi"}])) == 3


@pytest.mark.parametrize("field", ["fallback", "hugetlbfsMount", "sharing", "reclaimPolicy", "mode"])
def test_what_may_surprise_is_a_warning(field: str) -> None:
    values = {
        "fallback": "SharedMemory",
        "hugetlbfsMount": "Managed",
        "sharing": "Pool",
        "reclaimPolicy": "Retain",
        "mode": "Observe",
    }
    (warning,) = validate_pool_spec(spec_of(nodeSelector={"x": "y"}, **{field: values[field]})).warnings
    assert f"spec.{field} {values[field]}" in warning


@pytest.mark.parametrize(
    ("key", "good"),
    [("a", True), ("a.b/c_d.E-f", True), ("kubernetes.io/hostname", True), ("", False), ("a b", False), ("/a", False),
     ("a/", False), ("-a", False), ("A.b/c", False), ("x/" + "a" * 63, True), ("x/" + "a" * 64, False)],
)  # fmt: skip
def test_label_keys_are_kubernetes_own(key: str, good: bool) -> None:
    assert (label_key_error(key) == "") is good


def test_the_model_takes_what_the_validator_must_judge() -> None:
    assert KVOffloadPoolSpec.model_validate({"capacity": 3}).capacity == 3


@pytest.mark.parametrize(
    ("toleration", "error"),
    [
        ({"key": "a", "operator": "Exists", "value": "x"}, "spec.tolerations[0].value: must be empty with operator"),
        ({"key": "", "operator": "Equal"}, "spec.tolerations[0].operator: must be Exists where key is empty"),
        ({"key": "a b"}, "spec.tolerations[0].key: 'a b' is no label key"),
        ({"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}, "must be NoExecute with tolerationSeconds"),
        ({"operator": "Exists", "tolerationSeconds": 5}, "spec.tolerations[0].effect: must be NoExecute"),
        ({"operator": "Exists"}, ""),
        ({"key": "a/b", "operator": "Equal", "value": "x", "effect": "NoExecute", "tolerationSeconds": 0}, ""),
    ],
)
def test_tolerations_are_those_that_a_pod_may_have(toleration: dict[str, Any], error: str) -> None:
    found = errors(tolerations=[toleration])
    assert len(found) == bool(error)
    assert all(error in one for one in found)
