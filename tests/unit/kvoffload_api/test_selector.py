"""What a label selector takes, and which namespaces a pool allows: webhook and attacher ask the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.api.pool import LabelSelector, allows_namespace


@pytest.mark.parametrize(
    ("selector", "taken"),
    [
        ({}, True),
        ({"matchLabels": {"team": "ml"}}, True),
        ({"matchLabels": {"team": "web"}}, False),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["ml", "x"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["ml"]}]}, False),
        ({"matchExpressions": [{"key": "absent", "operator": "NotIn", "values": ["ml"]}]}, True),
        ({"matchExpressions": [{"key": "absent", "operator": "In", "values": ["ml"]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"team": "ml"}, "matchExpressions": [{"key": "x", "operator": "Exists"}]}, False),
    ],
)
def test_a_selector_takes_what_kubernetes_would_take(selector: dict[str, object], taken: bool) -> None:
    assert LabelSelector.model_validate(selector).selects({"team": "ml"}) is taken


LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)


@given(LABELS, st.sampled_from("abc"), st.lists(st.sampled_from("xyz"), min_size=1, max_size=2))
def test_each_operator_is_the_opposite_of_its_negation(labels: dict[str, str], key: str, values: list[str]) -> None:
    def holds(operator: str, given: list[str]) -> bool:
        expression = {"key": key, "operator": operator, "values": given}
        return LabelSelector.model_validate({"matchExpressions": [expression]}).selects(labels)

    assert holds("In", values) is not holds("NotIn", values)
    assert holds("Exists", []) is not holds("DoesNotExist", [])
    assert holds("In", values) == (labels.get(key) in values)


@given(LABELS, LABELS)
def test_an_empty_selector_selects_everything_and_labels_must_all_match(
    labels: dict[str, str], wanted: dict[str, str]
) -> None:
    assert LabelSelector().selects(labels)
    selector = LabelSelector.model_validate({"matchLabels": wanted})
    assert selector.selects(labels) == (wanted.items() <= labels.items())


@pytest.mark.parametrize("namespace", ["team", "kube-system", "kvoffload-system"])
@pytest.mark.parametrize(
    ("selector", "allowed"),
    [
        (None, {"team"}),
        ({}, {"team", "kube-system", "kvoffload-system"}),
        ({"matchLabels": {"gpu": "yes"}}, {"team", "kube-system", "kvoffload-system"}),
        ({"matchLabels": {"gpu": "no"}}, set()),
    ],
)
def test_a_selector_alone_decides_and_without_one_the_system_s_namespaces_are_left_out(
    namespace: str, selector: dict[str, object] | None, allowed: set[str]
) -> None:
    given_selector = None if selector is None else LabelSelector.model_validate(selector)
    labels = {"gpu": "yes"}
    found = allows_namespace(given_selector, namespace, labels, operator_namespace="kvoffload-system")
    assert found is (namespace in allowed)
