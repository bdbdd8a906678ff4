"""Two replicas under one Lease: killed, stopped or cut off, the first is followed in 15 s and never writes again."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.control_plane import ControlPlane, event_time, free_port, wait_until
from e2e.faulty_proxy import FaultyProxy
from e2e.operator_pools import QUICK, leftovers, make_ready, pool_manifest
from e2e.operator_process import OperatorProcess, free_lease, running_operator, start_operator

pytestmark = pytest.mark.e2e

TAKEOVER_SECONDS = 15.0


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultyProxy]:
    running = FaultyProxy(control_plane.url, free_port()).start()
    yield running
    running.stop()


def wake(first: OperatorProcess, proxy: FaultyProxy) -> None:
    """Let whatever held it up end: the moment at which a former leader is dangerous."""
    proxy.is_cut_off = False
    if first.process.poll() is None:
        first.process.send_signal(signal.SIGCONT)


@pytest.mark.alone  # it is timed: a lease of 12 s, and 15 s until somebody else leads
@pytest.mark.parametrize(
    "hold_up",
    [
        pytest.param(
            lambda first, proxy: first.process.send_signal(signal.SIGKILL), id="killed", marks=pytest.mark.long
        ),
        pytest.param(lambda first, proxy: first.process.send_signal(signal.SIGSTOP), id="stopped"),
        pytest.param(lambda first, proxy: setattr(proxy, "is_cut_off", True), id="cut-off"),
    ],
)
def test_the_second_takes_over_in_time_and_the_first_never_writes_again(
    control_plane: ControlPlane, proxy: FaultyProxy, hold_up: Callable[[OperatorProcess, FaultyProxy], None]
) -> None:
    first = start_operator(control_plane, "first", url=proxy.url)
    second = None
    try:
        wait_until(lambda: first.is_leader, "the first to lead")
        second = start_operator(control_plane, "second")
        # it must have seen who holds the lease, or its wait begins later than a running replica's would
        log = second.log
        wait_until(lambda: "second stands by" in log.read_text(), "the second to have seen the lease")
        held_up_at = time.time()
        hold_up(first, proxy)
        took = wait_until(lambda: holder(control_plane) == "second", "the second to lead")
        assert took <= TAKEOVER_SECONDS
        taken_at = time.time()
        # work that a waking leader would do at once if it believed itself
        control_plane.apply(pool_manifest("takeover"))
        wait_until(lambda: control_plane.find("kvregion", "takeover.n1") is not None, "the second to work")
        wake(first, proxy)
        if first.process.poll() is None:
            wait_until(lambda: first.process.poll() is not None, "the first to see that it lost and end")
        events = control_plane.audit(user="system:serviceaccount:kvoffload-system:kvoffload-operator", since=held_up_at)
        late = [
            f"{event['verb']} {event['requestURI']}"
            for event in events
            if event["userAgent"] == "kvoffload-operator/first"
            and event_time(event) >= taken_at
            and event["responseStatus"]["code"] < 300  # it may have read the lease before it was stopped: a conflict
        ]
        assert late == []
        assert [event for event in events if event["userAgent"] == "kvoffload-operator/second"], (
            "the audit names replicas"
        )
    finally:
        for one in (first, second):
            if one is not None:
                one.stop(signal.SIGKILL)
        free_lease(control_plane)
        control_plane.kubectl("delete", "kvpool", "takeover", "--ignore-not-found")
        control_plane.kubectl("delete", "daemonset", "-n", "kvoffload-system", "-l", "kvoffload.io/daemon-of=takeover")
        control_plane.kubectl("label", "node", "n1", "n2", "daemon.kvoffload.io/takeover-", check=False)


def holder(plane: ControlPlane) -> str:
    lease = plane.find("lease", "kvoffload-operator", "-n", "kvoffload-system")
    return str(lease["spec"].get("holderIdentity", "")) if lease else ""


def test_a_leader_that_is_told_to_end_gives_its_lease_back_and_tells_of_no_error(control_plane: ControlPlane) -> None:
    with running_operator(control_plane, "told", **QUICK) as operator:
        control_plane.apply(pool_manifest("told"))
        make_ready(control_plane, "told")
        operator.stop()
        assert operator.process.returncode == 0
        assert holder(control_plane) == ""
        assert " ERROR " not in operator.log.read_text()
        with running_operator(control_plane, "next", **QUICK):
            control_plane.kubectl("delete", "kvpool", "told")
            wait_until(lambda: not leftovers(control_plane, ["told"]), "everything of the pool to go")
