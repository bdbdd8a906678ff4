"""The API server answers 403, 409, 410, 429 and 500, and watches end: the operator comes through."""

import random
from collections.abc import Iterator

import pytest

from e2e.control_plane import ControlPlane, free_port, wait_until
from e2e.faulty_proxy import FaultyProxy
from e2e.operator_pools import leftovers, make_ready, pool_manifest
from e2e.operator_process import running_operator

pytestmark = pytest.mark.e2e

STATUSES = (403, 409, 410, 429, 500)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultyProxy]:
    running = FaultyProxy(control_plane.url, free_port()).start()
    yield running
    running.stop()


def test_every_third_request_fails_and_the_pool_still_becomes_ready_and_goes(
    control_plane: ControlPlane, proxy: FaultyProxy
) -> None:
    dice = random.Random(7)
    at_the_start = iter((409, 403))  # what its first requests meet, before it is a candidate

    def fault(method: str, path: str, number: int) -> int | None:
        if "/leases/" in path or "watch=true" in path:  # the lease has tests of its own
            return None
        if path.endswith("/deployments/kvoffload-operator") and (status := next(at_the_start, None)):
            return status
        return dice.choice(STATUSES) if dice.random() < 1 / 3 else None

    proxy.fault = fault  # from the operator's first request on
    with running_operator(control_plane, "faulty", url=proxy.url, resync_seconds="5"):
        control_plane.apply(pool_manifest("faults"))
        make_ready(control_plane, "faults", seconds=240)
        control_plane.kubectl("delete", "kvpool", "faults")
        wait_until(lambda: not leftovers(control_plane, ["faults"]), "everything of the pool to go")
    assert set(proxy.answered) == set(STATUSES), "each of them was met"


@pytest.mark.parametrize(
    "status", [410, *(pytest.param(one, marks=pytest.mark.long) for one in STATUSES if one != 410)]
)
def test_watches_that_are_refused_for_a_while_are_mended(
    control_plane: ControlPlane, proxy: FaultyProxy, status: int
) -> None:
    with running_operator(control_plane, f"watch-{status}", url=proxy.url, resync_seconds="4") as operator:
        refused = 0

        def fault(method: str, path: str, number: int) -> int | None:
            nonlocal refused
            if "watch=true" in path and refused < 6:
                refused += 1
                return status
            return None

        proxy.fault = fault
        control_plane.apply(pool_manifest("watches"))
        make_ready(control_plane, "watches")
        control_plane.kubectl("delete", "kvpool", "watches")
        wait_until(lambda: not leftovers(control_plane, ["watches"]), "everything of the pool to go")
        assert operator.process.poll() is None, operator.log.read_text()[-2000:]
