"""What the scheduler's side remembers of requests, loads and stores, beside a daemon that a test speaks for."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine_without_vllm import Recorder, make_ready
from kvoffload.protocol.messages import Assign, Fail, Found, Lookup, Reserve, Reserved, Unpin

KEYS = [bytes([number]) * 32 for number in range(8)]


class Scheduler:
    """A manager, and the daemon's answers to it."""

    def __init__(self, engine: SimpleNamespace) -> None:
        self.manager = engine.manager.KVOffloadManager(step_seconds=0.0)
        self.session: Recorder = make_ready(engine, self.manager.link)
        self.results = engine.manager.LookupResult

    def last(self, kind: type) -> Any:
        return [message for message in self.session.sent if isinstance(message, kind)][-1]

    def offsets(self, kind: type) -> list[int]:
        """All offsets in messages of this kind."""
        return [o for m in self.session.sent if isinstance(m, kind) for o in np.frombuffer(m.offsets, "<i8").tolist()]

    def give_slots(self, offsets: Sequence[int]) -> None:
        self.manager.link.reserve()
        number = self.last(Reserve).request
        self.session.answers.append(Reserved(number, 2, np.array(offsets, "<i8").tobytes()))

    def ask(self, name: str, keys: list[bytes], offsets: Sequence[int] = (), *, is_private: bool = False) -> list[str]:
        """Look these keys up in a step; the daemon answers these offsets, or not yet."""
        if name not in self.manager._requests:
            self.manager.begin_request(name, is_private=is_private)
        self.manager.begin_lookup(name, keys)
        if offsets:
            found = Found(self.last(Lookup).request, np.array(offsets, "<i8").tobytes())
            self.session.answers.append(found)
            self.manager.begin_lookup(name, keys)
        return [self.manager.lookup(key, SimpleNamespace(req_id=name)).name for key in keys]

    def end_step(self) -> None:
        self.manager.on_schedule_end(SimpleNamespace())
        self.manager.end_step()

    def load(self, name: str, keys: list[bytes]) -> Any:
        return self.manager.prepare_load(keys, SimpleNamespace(req_id=name))

    def store(self, name: str, keys: list[bytes]) -> list[bytes] | None:
        """Keys that are given slots; None: asked again in the next step."""
        output = self.manager.prepare_store(keys, SimpleNamespace(req_id=name))
        return None if output is None else output.keys_to_store

    def complete(self, name: str, keys: list[bytes], *, success: bool = True) -> None:
        self.manager.complete_store(keys, SimpleNamespace(req_id=name), success=success)


@pytest.fixture
def scheduler(engine: SimpleNamespace) -> Scheduler:
    return Scheduler(engine)


def test_what_a_load_takes_stays_leased_until_all_ranks_have_done_with_it_and_the_rest_goes_back(
    scheduler: Scheduler,
) -> None:
    assert scheduler.ask("a", KEYS[:4], [100, 200, -1, 300]) == ["HIT", "HIT", "MISS", "HIT"]
    slots = scheduler.load("a", KEYS[:1])
    assert (slots.epoch, slots.offsets) == (2, np.array([100], "<i8").tobytes())
    scheduler.end_step()
    assert sorted(scheduler.offsets(Unpin)) == [200, 300]
    scheduler.manager.on_request_finished(SimpleNamespace(req_id="a"))
    assert sorted(scheduler.offsets(Unpin)) == [200, 300], "workers may still read it"
    scheduler.manager.receives_finished(["a"])
    scheduler.manager.receives_finished(["a"])
    assert sorted(scheduler.offsets(Unpin)) == [100, 200, 300]


def test_a_load_of_a_key_that_is_not_leased_is_one_that_every_worker_fails(scheduler: Scheduler) -> None:
    scheduler.ask("a", KEYS[:2], [100, 200])
    assert scheduler.load("a", [KEYS[0], KEYS[7]]).epoch == 0
    scheduler.manager.receives_finished(["a"])
    assert scheduler.offsets(Unpin) == [100], "what is not leased is not given back"
    scheduler.ask("b", KEYS[:2], [100, 200])
    scheduler.session.is_open = False
    assert scheduler.load("b", KEYS[:2]).epoch == 0


def test_the_answer_is_waited_for_in_later_steps_and_its_leases_go_back_when_it_comes_too_late(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, engine: SimpleNamespace
) -> None:
    now = 0.0
    monkeypatch.setattr(engine.manager, "time", SimpleNamespace(monotonic=lambda: now))
    scheduler.manager._retry_seconds = 0.05
    for _ in range(2 * engine.manager.MAX_RETRIES):  # steps alone, or time alone, are not enough
        assert scheduler.ask("a", KEYS[:2]) == ["RETRY", "RETRY"]
        scheduler.end_step()
    now = 0.05
    assert scheduler.ask("a", KEYS[:2]) == ["MISS", "MISS"]
    (lookup,) = [message for message in scheduler.session.sent if isinstance(message, Lookup)]
    scheduler.session.answers.append(Found(lookup.request, np.array([100, -1], "<i8").tobytes()))
    scheduler.manager.link.poll()
    scheduler.end_step()
    assert scheduler.offsets(Unpin) == [100]


def test_a_store_whose_slots_are_late_is_put_off_twice_and_then_given_up(scheduler: Scheduler) -> None:
    scheduler.manager.link._budget._step_seconds = 1.0  # the circuit stays closed
    scheduler.manager.begin_request("a", is_private=False)
    assert [scheduler.store("a", KEYS[:2]) for _ in range(3)] == [None, None, []]


def test_each_key_is_stored_once_and_again_only_where_that_came_to_nothing(scheduler: Scheduler) -> None:
    scheduler.give_slots([0, 4096, 8192, 12288])
    scheduler.ask("a", KEYS[:3], [-1, 50_000, -1])
    assert scheduler.store("a", KEYS[:3]) == [KEYS[0], KEYS[2]], "the region has the other"
    assert (scheduler.last(Assign).epoch, scheduler.last(Assign).keys) == (2, KEYS[0] + KEYS[2])
    scheduler.manager.begin_request("b", is_private=False)
    assert scheduler.store("b", KEYS[:1]) == [], "it is being stored"
    scheduler.complete("a", KEYS[:1])
    scheduler.complete("a", KEYS[2:3], success=False)
    assert scheduler.store("a", KEYS[:3]) == [KEYS[2]]
    assert scheduler.offsets(Assign) == [0, 4096, 8192]
    assert scheduler.store("b", KEYS[:1]) == [KEYS[0]], "as far as it knows; the daemon keeps one of them"


def test_of_private_keys_nothing_is_remembered_for_shared_ones(scheduler: Scheduler) -> None:
    scheduler.give_slots([0, 4096])
    scheduler.ask("a", KEYS[:1], [-1], is_private=True)
    assert scheduler.last(Lookup).namespace == 1
    assert scheduler.store("a", KEYS[:1]) == KEYS[:1]
    assert scheduler.last(Assign).namespace == 1
    scheduler.ask("b", KEYS[:1], [-1])
    assert scheduler.last(Lookup).namespace == 0
    assert scheduler.store("b", KEYS[:1]) == KEYS[:1]
    assert scheduler.last(Assign).namespace == 0


def test_a_request_that_nobody_told_of_stores_nothing_since_its_keys_may_be_private(scheduler: Scheduler) -> None:
    scheduler.give_slots([0, 4096])
    scheduler.ask("a", KEYS[:1], [-1])
    scheduler.manager.on_request_finished(SimpleNamespace(req_id="a"))
    assert scheduler.store("a", KEYS[:1]) == []
    assert scheduler.offsets(Assign) == []


def test_keys_of_failed_loads_are_neither_hit_nor_stored_and_of_too_many_the_oldest_are_tried_again(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, engine: SimpleNamespace
) -> None:
    monkeypatch.setattr(engine.manager, "MAX_BARRED_KEYS", 2)
    scheduler.give_slots([0, 4096])
    for number in range(3):
        scheduler.ask(f"r{number}", KEYS[number : number + 1], [100 + number])
        scheduler.load(f"r{number}", KEYS[number : number + 1])
        scheduler.manager.load_failed(f"r{number}", bytes_are_wrong=number == 2)
        scheduler.manager.receives_finished([f"r{number}"])
    assert scheduler.ask("again", KEYS[:4], [100, 101, 102, 103]) == ["HIT", "MISS", "MISS", "HIT"]
    dropped = [message for message in scheduler.session.sent if isinstance(message, Fail)]
    assert [(m.drop, np.frombuffer(m.offsets, "<i8").tolist()) for m in dropped] == [(True, [102])]
    scheduler.ask("other", KEYS[1:4], [-1, -1, -1])
    assert scheduler.store("other", KEYS[1:4]) == [KEYS[3]]
    scheduler.manager.reset_cache()
    scheduler.end_step()
    assert scheduler.ask("after", KEYS[1:3], [101, 102]) == ["HIT", "HIT"]


def test_a_request_that_was_there_when_the_weights_changed_stores_nothing_and_a_later_one_does(
    scheduler: Scheduler,
) -> None:
    scheduler.manager.begin_request("old", is_private=False)
    scheduler.manager.weights_changed()
    scheduler.give_slots([0, 4096])
    scheduler.manager.begin_request("new", is_private=False)
    assert scheduler.store("old", KEYS[:1]) == []
    assert scheduler.store("new", KEYS[:1]) == KEYS[:1]
