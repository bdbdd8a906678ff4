"""Specs and statuses that an older or newer CRD let in: what cannot be acted on is a condition, the rest is planned."""

from typing import Any

import pytest

from kvoffload_operator.reconcilers.pool import plan_pool
from operator_builders import pool_manifest
from pool_pass import OPTIONS, facts, status_condition


def test_an_invalid_spec_is_a_condition_and_changes_nothing_else() -> None:
    bad = pool_manifest()
    bad["spec"]["capacity"] = (1 << 30) + 1
    plan = plan_pool(facts(bad), OPTIONS)
    found = status_condition(plan, "Ready")
    assert found.reason == "InvalidSpec"
    assert "nearest multiples are 1Gi and 1026Mi" in found.message
    assert (plan.daemonset, plan.nodes, plan.regions_to_delete) == (None, (), ())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (pool_manifest(capacity="4Ei"), "4611686018427387904 bytes is more than 1152921504606846976 (1Ei)"),
        (pool_manifest("a" * 41), "of at most 40 characters, it has 41: make a pool of another name"),
        (pool_manifest("a.b"), "'a.b' must be a DNS label"),
    ],
    ids=["capacity", "long name", "name with a dot"],
)
def test_what_an_older_crd_lets_in_and_no_region_can_say_is_a_condition(bad: dict[str, Any], message: str) -> None:
    found = status_condition(plan_pool(facts(bad, regions={}), OPTIONS), "Ready")
    assert found.reason == "InvalidSpec"
    assert message in found.message


def test_the_largest_capacity_is_planned() -> None:
    plan = plan_pool(facts(pool_manifest(capacity="1Ei"), regions={}), OPTIONS)
    assert status_condition(plan, "HugepagesAvailable").reason == "ExceedsEveryNode"
    assert plan.nodes[0].region is not None


def test_a_status_of_another_version_is_written_anew() -> None:
    given = pool_manifest() | {"status": {"usedBytes": 2**62, "observedGeneration": 1}}
    plan = plan_pool(facts(given), OPTIONS)
    assert status_condition(plan, "Ready").reason == "AllNodesReady"


def test_a_spec_that_does_not_parse_is_a_condition_too() -> None:
    bad = pool_manifest()
    bad["spec"]["mode"] = "Sideways"
    found = status_condition(plan_pool(facts(bad), OPTIONS), "Ready")
    assert found.reason == "InvalidSpec"
    assert "spec.mode" in found.message


def test_case_29_fields_that_an_older_crd_dropped_are_named_and_no_limit_is_lost() -> None:
    old = pool_manifest(quotas=[{"namespace": "x", "guaranteed": "1Mi"}])
    for field in ("maxEnginesPerNode", "sharing"):
        del old["spec"][field]
    plan = plan_pool(facts(old), OPTIONS)
    found = status_condition(plan, "Degraded")
    assert (found.status, found.reason) == ("True", "CRDOutdated")
    assert "maxEnginesPerNode, sharing" in found.message
    written = plan.nodes[0].region
    assert written is not None
    assert written["spec"]["maxEngines"] == 64
    assert written["spec"]["quotas"] == [{"namespace": "x", "guaranteedBytes": 1 << 20, "limitBytes": 1 << 30}]


def test_fields_of_a_newer_crd_are_named_where_the_operator_ignores_them() -> None:
    found = status_condition(plan_pool(facts(pool_manifest(tier="Fast")), OPTIONS), "Degraded")
    assert (found.status, found.reason) == ("True", "CRDNewer")
    assert "spec fields tier" in found.message


def test_a_pool_whose_fields_are_all_stored_is_not_called_outdated() -> None:
    assert status_condition(plan_pool(facts(), OPTIONS), "Degraded").status == "False"
