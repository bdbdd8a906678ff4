"""The election's promise: never two that may write, however the first was held up. One store, fake clocks."""

import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvoffload_operator.kube import DEPLOYMENTS, ApiServerError, Resource
from kvoffload_operator.leader import Election, LeaseTimes, NotLeader

TIMES = LeaseTimes(lease=10.0, renew_deadline=7.0, retry=1.5)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LeaseStore:
    """One Lease with the API server's optimistic locking, and the candidates' Deployment."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.is_reachable = True
        self.deployment: dict[str, Any] | None = {"metadata": {"uid": "deployment-uid"}}

    async def get(self, resource: Resource, name: str, namespace: str = "") -> dict[str, Any] | None:
        self._check()
        return copy.deepcopy(self.deployment if resource is DEPLOYMENTS else self.lease)

    async def create(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise ApiServerError(409, "AlreadyExists", "exists")
        return self._store(manifest)

    async def replace(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self._check()
        if manifest["metadata"]["resourceVersion"] != str(self.version):
            raise ApiServerError(409, "Conflict", "changed")
        return self._store(manifest)

    def _store(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def _check(self) -> None:
        if not self.is_reachable:
            raise ApiServerError(0, "ClientConnectorError", "no route")


def candidate(store: LeaseStore, name: str, clock: Clock) -> Election:
    return Election(store, name="l", namespace="n", identity=name, times=TIMES, clock=clock)  # type: ignore[arg-type]


async def attempt(election: Election) -> bool:
    return await election._try()  # one round of acquire() and hold(), without their pauses


async def assert_followed(first: Election, second: Election, clock: Clock) -> None:
    """The first does nothing from now on, as a stopped process: the second leads within 15 s, and never beside it."""
    both, taken_after = [], None
    for tick in range(200):
        if taken_after is None and await attempt(second):
            taken_after = tick / 10
        both.append(first.is_leader and second.is_leader)
        clock.now += 0.1
    assert not any(both)
    assert taken_after is not None
    assert taken_after <= 15.0


async def test_the_first_candidate_leads_and_the_second_waits() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(first)
    assert not await attempt(second)
    first.check()
    with pytest.raises(NotLeader):
        second.check()


async def test_the_lease_goes_with_the_deployment_and_is_not_made_again_after_it() -> None:
    store, clock = LeaseStore(), Clock()
    first = candidate(store, "a", clock)
    assert await attempt(first)
    assert store.lease is not None
    (owner,) = store.lease["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Deployment", "l", "deployment-uid")
    store.deployment = store.lease = None  # helm uninstalled, the API server collected the lease
    assert not await attempt(first)
    assert store.lease is None


async def test_a_lease_of_a_deployment_that_was_made_anew_goes_over_to_it() -> None:
    store, clock = LeaseStore(), Clock()
    before, after = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(before)
    await before.release()
    store.deployment = {"metadata": {"uid": "another-uid"}}
    assert await attempt(after)
    assert store.lease is not None
    assert [owner["uid"] for owner in store.lease["metadata"]["ownerReferences"]] == ["another-uid"]


async def test_a_lease_that_is_deleted_under_its_leader_is_no_other_s_before_the_leader_s_time_is_over() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(first)
    assert not await attempt(second)
    for _ in range(8):  # the second is slow and sees none of these
        clock.now += 1.5
        assert await attempt(first)
    store.lease = None
    await assert_followed(first, second, clock)


async def test_a_leader_that_renews_is_never_replaced() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    for _ in range(50):
        assert await attempt(first)
        assert not await attempt(second)
        clock.now += 1.5


async def test_a_leader_that_is_stopped_may_not_write_before_another_may() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(first)
    await assert_followed(first, second, clock)
    with pytest.raises(NotLeader):
        first.check()


async def test_a_leader_that_is_cut_off_stops_by_itself_and_does_not_come_back_over_another() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(first)
    store.is_reachable = False
    clock.now += TIMES.renew_deadline
    assert not await attempt(first)
    assert not first.is_leader
    store.is_reachable = True
    assert not await attempt(second), "it has only now seen the lease"
    clock.now += TIMES.lease
    assert await attempt(second)
    assert not await attempt(first)
    assert not first.is_leader


async def test_another_clock_s_time_is_not_believed() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(first)
    assert store.lease is not None
    store.lease["spec"]["renewTime"] = "1990-01-01T00:00:00.000000Z"
    assert not await attempt(second)


async def test_a_released_lease_is_taken_at_once() -> None:
    store, clock = LeaseStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    assert await attempt(first)
    assert not await attempt(second)
    await first.release()
    assert not first.is_leader
    assert await attempt(second)
    assert store.lease is not None
    assert store.lease["spec"]["leaseTransitions"] == 1


class OvertakenStore(LeaseStore):
    """Between one read and the write that follows from it, somebody else is quicker."""

    overtake: Callable[[], Awaitable[bool]] | None = None

    async def get(self, resource: Resource, name: str, namespace: str = "") -> dict[str, Any] | None:
        seen = await super().get(resource, name, namespace)
        overtake, self.overtake = self.overtake, None
        if overtake is not None:
            assert await overtake()
        return seen


@pytest.mark.parametrize("is_new", [True, False], ids=["no lease yet", "a lease that is over"])
async def test_of_two_that_try_at_once_one_wins(is_new: bool) -> None:
    store, clock = OvertakenStore(), Clock()
    first, second = candidate(store, "a", clock), candidate(store, "b", clock)
    if not is_new:
        assert await attempt(candidate(store, "gone", clock))
        for one in (first, second):
            assert not await attempt(one)
        clock.now += TIMES.lease
    store.overtake = lambda: attempt(first)
    assert not await attempt(second)
    assert first.is_leader
    assert not second.is_leader


def test_times_that_would_let_two_write_are_refused() -> None:
    with pytest.raises(ValueError, match="must not exceed the lease"):
        Election(
            LeaseStore(),  # type: ignore[arg-type]
            name="l",
            namespace="n",
            identity="a",
            times=LeaseTimes(lease=10.0, renew_deadline=9.0, retry=2.0),
        )
