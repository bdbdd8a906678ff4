"""Lives of sessions that the random ones of `test_sessions` rarely meet, or that are known to have gone wrong."""

from collections.abc import Iterator, Set

import pytest

from kvoffload_node.session.engines import SCHEDULER
from property.test_sessions import SessionMachine
from session_life import KEYS, QUARANTINE_SECONDS, RANKS, FakeEngine


@pytest.fixture
def life() -> Iterator[SessionMachine]:
    """For lives that were rare, or are known to have gone wrong. Engines 0 and 1 share keys; at its end only what the
    living hold is held."""
    machine = SessionMachine()
    machine.start()
    yield machine
    machine.teardown()


def restart(life: SessionMachine, deaths: dict[int, Set[int]] | None = None) -> None:
    """Of the daemon, while engine 2 stores; nobody has spoken yet."""
    life.restart(2, KEYS[11:], frozenset(), deaths or {}, all_speak=False)


def connect(life: SessionMachine, engine: FakeEngine, *ranks: int) -> None:
    for rank in ranks:
        life.connect(engine, engine.processes[rank])


def test_a_part_that_was_sealed_before_a_restart_keeps_no_slot_from_being_free(life: SessionMachine) -> None:
    """One rank had written its part, and has nothing more to say of it; the other ends it after the restart."""
    life.begin_store(0, KEYS[:2])
    life.end_writes(0, 1, 2, failed=False)
    restart(life)
    life.all_connect_that_do_not(0)
    life.end_writes(0, 0, 2, failed=False)
    for rank in range(RANKS):
        life.end_writes(2, rank, 1, failed=False)
    assert life.index.writes == {}


def test_what_a_living_rank_writes_is_nobodys_after_the_quarantine_of_a_dead_one(life: SessionMachine) -> None:
    life.begin_store(0, KEYS[:4])
    engine = life.engines[0]
    life.die(engine, engine.processes[0])
    life.sweep(QUARANTINE_SECONDS + 1, number=1)
    assert set(life.index.writes) == set(engine.left)
    life.every_copy_lands_that_may()


@pytest.mark.parametrize("dead", [{0}, {0, 1, SCHEDULER}])
def test_what_processes_that_died_while_no_daemon_ran_began_to_write_is_in_quarantine(
    life: SessionMachine, dead: Set[int]
) -> None:
    life.begin_store(0, KEYS[:4])
    life.end_writes(0, 1, 4, failed=False)
    engine = life.engines[0]
    restart(life, {0: dead})
    life.all_connect_that_do_not(0)
    life.sweep(QUARANTINE_SECONDS - 1, number=1)
    assert set(engine.left) <= set(life.index.writes)
    life.every_copy_lands_that_may()
    life.sweep(2.0, number=1)


def test_a_process_that_has_only_said_hello_to_a_restarted_daemon_still_holds_all_that_it_did(
    life: SessionMachine,
) -> None:
    life.store_and_read(0, 1, KEYS[:2])
    life.begin_store(0, KEYS[4:8])
    life.end_writes(0, 1, 4, failed=False)
    restart(life)
    slow, reader = life.engines[0], life.engines[1]
    life.say_hello(slow, slow.processes[0])
    life.say_hello(reader, reader.scheduler)
    connect(life, slow, SCHEDULER, 1)
    connect(life, reader, 0, 1)
    connect(life, life.engines[2], SCHEDULER, 0, 1)
    assert not life.index.may_evict
    life.sweep(QUARANTINE_SECONDS + 1, number=1)
    life.every_copy_lands_that_may()
    life.speak(reader, reader.scheduler)
    life.say_hello(slow, slow.processes[0])
    life.sweep(QUARANTINE_SECONDS + 1, number=1)
    life.speak(slow, slow.processes[0])
    assert life.index.may_evict
    life.say_hello(slow, slow.processes[0])
    life.say_hello(slow, slow.scheduler)
    life.speak(slow, slow.scheduler)
    life.sweep(QUARANTINE_SECONDS + 1, number=0)
    life.every_copy_lands_that_may()


def test_what_was_dropped_under_a_reader_is_its_own_until_it_has_spoken_and_let_go(life: SessionMachine) -> None:
    life.store_and_read(0, 0, KEYS[:1])
    life.look_up(1, KEYS[:1])
    reader = life.engines[1]
    life.unpin(0, 0, drops=True)
    restart(life)
    connect(life, life.engines[0], SCHEDULER, 0, 1)
    connect(life, life.engines[2], SCHEDULER, 0, 1)
    life.sweep(QUARANTINE_SECONDS + 1, number=0)
    connect(life, reader, SCHEDULER, 0, 1)
    life.sweep(QUARANTINE_SECONDS + 1, number=0)
    life.what_is_leased_keeps_its_bytes()
    life.unpin(1, 0, drops=False)
    assert life.index.orphans == set()
    life.take_all_that_can_be_had(0)


def test_a_slot_that_is_leased_twice_is_leased_twice_after_a_restart(life: SessionMachine) -> None:
    life.store_and_read(0, 0, KEYS[:1])
    life.look_up(0, KEYS[:1])
    restart(life)
    life.all_connect_that_do_not(0)
    life.unpin(0, 0, drops=False)
    life.take_all_that_can_be_had(1)
    life.what_is_leased_keeps_its_bytes()
    life.unpin(0, 0, drops=False)
    assert life.index.num_leased == 0


def test_an_engine_is_served_again_when_all_its_ranks_are_back(life: SessionMachine) -> None:
    """And not when one of two has connected again."""
    engine = life.engines[0]
    for rank in range(RANKS):
        life.lose(engine.processes[rank])
    connect(life, engine, 0)
    assert not engine.is_ready
    assert life.registry.traffic.reserve(life.registry.pods["one"].engines[engine.name], 1) == ([], "NotReady")
    connect(life, engine, 1)
    assert engine.is_ready


def test_credits_end_with_the_schedulers_connection(life: SessionMachine) -> None:
    life.reserve(0, 3)
    life.connect_again(0, [SCHEDULER, 0, 1], silent=False, at_once=True)
    assert life.index.writes == {}
