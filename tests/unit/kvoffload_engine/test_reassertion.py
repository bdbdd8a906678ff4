"""What the scheduler tells a session of before, and which session leases what afterwards."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.errors import DaemonUnavailable
from kvoffload.protocol.messages import Message, Reassert
from kvoffload_engine.offsets import pack
from kvoffload_engine.reassertion import Held, Reassertion


class FakeSession:
    """A session in this epoch of the daemon."""

    def __init__(self, epoch: int, *, is_broken: bool = False) -> None:
        self.welcome = SimpleNamespace(epoch=epoch)
        self.is_broken = is_broken
        self.sent: list[Any] = []

    def take_descriptors(self) -> list[int]:
        self.taken = [os.open("/dev/null", os.O_RDONLY)]
        return self.taken

    def send(self, *messages: Message) -> None:
        if self.is_broken:
            raise DaemonUnavailable("gone")
        self.sent += messages


class Engine:
    """An engine's loads and stores under way, and what it tells."""

    def __init__(self) -> None:
        self.loads: list[Held] = []
        self.writes: list[Held] = []
        self.reassertion = Reassertion(lambda: (list(self.loads), list(self.writes)))

    def begin(self, epoch: int, *, is_broken: bool = False) -> FakeSession:
        session = FakeSession(epoch, is_broken=is_broken)
        self.reassertion.begin(session)  # type: ignore[arg-type]
        return session

    def begin_load(self, offset: int, session: Any) -> Held:
        self.loads.append(held := Held(pack([offset]), session.welcome.epoch, session))
        return held


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.reassertion.close()


def is_leased(engine: Engine, session: Any, held: Held) -> bool:
    return engine.reassertion.is_leased_by(session, held)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_first_session_is_told_nothing(engine: Engine) -> None:
    assert engine.begin(1).sent == []


def test_a_session_that_begins_when_the_scheduler_has_ended_leaves_no_lock_behind(engine: Engine) -> None:
    engine.begin(1)
    engine.reassertion.close()
    begun = engine.begin(2)
    assert not any(map(is_open, begun.taken))


def test_a_load_is_told_to_each_session_that_begins_while_it_is_under_way(engine: Engine) -> None:
    first = engine.begin(1)
    load = engine.begin_load(64, first)
    engine.writes.append(Held(pack([128]), 1))
    for epoch in (2, 3):
        session = engine.begin(epoch)
        assert session.sent == [Reassert(1, pack([64]), pack([128]))]
        assert is_leased(engine, session, load)
        assert not engine.reassertion.ended_meanwhile()


def test_a_load_of_a_session_that_had_ended_is_leased_by_no_later_one(engine: Engine) -> None:
    first = engine.begin(1)
    second = engine.begin(2)
    late = engine.begin_load(64, first)
    third = engine.begin(3)
    assert third.sent == [Reassert(2, b"", b"")]
    assert not is_leased(engine, second, late)
    assert not is_leased(engine, third, late)


def test_what_ended_before_the_scheduler_saw_the_session_is_given_back_by_it(engine: Engine) -> None:
    first = engine.begin(1)
    ended, _ = engine.begin_load(64, first), engine.begin_load(128, first)
    engine.begin(2)
    engine.loads.remove(ended)
    assert engine.reassertion.ended_meanwhile() == {ended}


def test_a_session_that_ends_before_it_is_told_does_not_lose_the_loads_for_the_next_one(engine: Engine) -> None:
    load = engine.begin_load(64, engine.begin(1))
    with pytest.raises(DaemonUnavailable):
        engine.begin(2, is_broken=True)
    session = engine.begin(3)
    assert session.sent == [Reassert(1, pack([64]), b"")]
    assert is_leased(engine, session, load)
