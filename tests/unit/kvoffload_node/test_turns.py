"""How pods share the daemon's thread: who waits, for how long, and that waiting connections go on in turn."""

import asyncio
from typing import Any

import pytest

from kvoffload_node.session.turns import BURST_SECONDS, MAX_SHARE, TURN_SECONDS, Floor, Turns


class Loop:
    """A loop whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Any] = []
        self.later: list[tuple[float, Any]] = []

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)

    def call_later(self, seconds: float, callback: Any) -> None:
        self.later.append((seconds, callback))


class Waiting:
    """A connection that takes so long when it is its turn."""

    def __init__(self, loop: Loop, turns: Turns, seconds: float) -> None:
        self.loop, self.turns, self.seconds, self.served = loop, turns, seconds, 0

    def take_turn(self) -> None:
        self.served += 1
        work(self.loop, self.turns, self.seconds)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr("kvoffload_node.session.turns.perf_counter", lambda: loop.now)
    return loop


def work(loop: Loop, turns: Turns, seconds: float) -> None:
    begun = loop.now
    loop.now += seconds
    turns.spend(begun, loop.now)


def test_a_pod_that_uses_little_never_waits(loop: Loop) -> None:
    floor = Floor()
    modest, other = Turns(floor), Turns(floor)
    for _ in range(1000):
        work(loop, modest, TURN_SECONDS / 10)
        work(loop, other, TURN_SECONDS / 10)
        loop.now += TURN_SECONDS
        for callback in loop.soon:
            callback()
        loop.soon.clear()
    assert loop.later == []


def test_connections_of_one_pod_share_its_turn_and_go_on_one_after_another(loop: Loop) -> None:
    turns = Turns(Floor())
    work(loop, turns, 2 * TURN_SECONDS)
    assert turns.is_over
    connections = [Waiting(loop, turns, 0.6 * TURN_SECONDS) for _ in range(4)]
    for connection in connections:
        turns.wait(connection)  # type: ignore[arg-type]
    (callback,) = loop.soon
    callback()
    assert [connection.served for connection in connections] == [1, 1, 0, 0]
    loop.soon[1]()
    assert [connection.served for connection in connections] == [1, 1, 1, 1]


def test_a_pod_alone_is_never_held_up_by_a_timer(loop: Loop) -> None:
    turns = Turns(Floor())
    loop.now += 1
    for _ in range(100):
        work(loop, turns, 100 * BURST_SECONDS)
        loop.soon.pop()()
    assert loop.later == []


def test_beside_others_a_flood_gets_its_share_and_no_more(loop: Loop) -> None:
    floor = Floor()
    flood, other = Turns(floor), Turns(floor)
    begun, worked = loop.now, 0.0
    while loop.now < begun + 10:
        work(loop, other, TURN_SECONDS / 10)
        if not flood.is_over:
            work(loop, flood, 4 * TURN_SECONDS)
            worked += 4 * TURN_SECONDS
        for callback in loop.soon:
            callback()
        loop.soon.clear()
        if loop.later:
            seconds, callback = loop.later.pop()
            loop.now += seconds
            callback()
    assert worked == pytest.approx(10 * MAX_SHARE, rel=0.05)
