"""Names of regions and the rule by which conditions change."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.api import keys
from kvoffload.api.conditions import MAX_MESSAGE_LENGTH, Condition, PoolReason, RegionReason, transition
from kvoffload.api.region import MAX_NAME_LENGTH, KVOffloadRegion, RegionEngine, region_name

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
DNS_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
nodes = st.lists(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), min_size=1, max_size=6).map(
    lambda parts: ".".join(parts)[:253].rstrip("-.")
)


@given(labels, nodes)
def test_a_regions_name_is_one_that_kubernetes_takes(pool: str, node: str) -> None:
    name = region_name(pool, node)
    assert len(name) <= MAX_NAME_LENGTH
    assert DNS_SUBDOMAIN.match(name), name
    assert name.startswith(f"{pool}.")


@given(labels, nodes, labels, nodes)
def test_two_pairs_of_pool_and_node_never_share_a_region(pool: str, node: str, other: str, elsewhere: str) -> None:
    if (pool, node) != (other, elsewhere):
        assert region_name(pool, node) != region_name(other, elsewhere)


def test_long_nodes_that_differ_at_their_end_have_different_regions() -> None:
    pool, node = "p" * 40, "n" * 240
    first, second = region_name(pool, node + ".a"), region_name(pool, node + ".b")
    assert first != second
    assert len(first) <= MAX_NAME_LENGTH


def make(status: str, *, at: datetime, previous: list[Condition], message: str = "m") -> Condition:
    return transition(previous, type="Ready", status=status, reason="Serving", message=message, generation=3, now=at)


def test_the_transition_time_moves_only_with_the_status() -> None:
    first = make("False", at=NOW, previous=[])
    same = make("False", at=NOW + timedelta(hours=1), previous=[first], message="other")
    changed = make("True", at=NOW + timedelta(hours=2), previous=[same])
    assert first.last_transition_time == NOW.replace(microsecond=0)
    assert same.last_transition_time == first.last_transition_time
    assert same.message == "other"
    assert changed.last_transition_time == NOW.replace(microsecond=0) + timedelta(hours=2)


def test_a_condition_survives_the_way_through_a_manifest_unchanged() -> None:
    condition = make("True", at=NOW, previous=[])
    assert Condition.model_validate(condition.to_manifest()) == condition


def test_a_message_that_is_too_long_is_cut() -> None:
    assert len(make("True", at=NOW, previous=[], message="x" * 10_000).message) == MAX_MESSAGE_LENGTH


def test_reasons_are_camel_case() -> None:
    for reason in (*PoolReason, *RegionReason, *keys.SkipReason):
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", reason), reason


def test_a_region_is_read_as_the_api_server_sends_it_and_ignores_fields_of_newer_versions() -> None:
    manifest = {
        "metadata": {"name": "p.n", "uid": "u", "generation": 4, "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "poolName": "p",
            "nodeName": "n",
            "capacityBytes": 2**53 + 2,
            "pageSizeBytes": 2 << 20,
            "quotas": [{"namespace": "a", "guaranteedBytes": 1, "limitBytes": 2}],
            "somethingNew": True,
        },
        "status": {"engines": [{"podNamespace": "a", "podName": "b", "podUID": "c", "engineID": "d"}]},
    }
    region = KVOffloadRegion.from_manifest(manifest)
    assert region.deleting
    assert region.spec.capacity_bytes == 2**53 + 2
    assert region.status.engines[0].pod_uid == "c"
    assert region.spec.to_manifest()["quotas"] == [{"namespace": "a", "guaranteedBytes": 1, "limitBytes": 2}]


@pytest.mark.parametrize(
    ("predicted", "confirmed", "left_alone", "mispredicted"),
    [
        ("replicated", "per-rank", False, True),
        ("replicated", "shared", False, True),
        ("replicated", "replicated", False, False),
        ("replicated", "", False, False),
        ("replicated", "left-alone", True, False),
        ("replicated", "of-a-newer-version", False, False),
        ("auto", "per-rank", False, False),
        ("", "shared", False, False),
    ],
)
def test_an_engine_says_whether_it_was_promised_more_and_whether_it_stays_out(
    predicted: str, confirmed: str, left_alone: bool, mispredicted: bool
) -> None:
    who = {"podNamespace": "a", "podName": "b", "podUID": "c", "engineID": "d"}
    engine = RegionEngine.model_validate(who | {"predictedLayout": predicted, "confirmedLayout": confirmed})
    assert (engine.is_left_alone, engine.is_mispredicted) == (left_alone, mispredicted)
