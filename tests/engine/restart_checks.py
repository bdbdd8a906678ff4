"""Manager and workers while the real daemon is stopped, or killed and started again, or its pool is changed. Run by
`check_runner.py`."""

import threading
import time
from collections.abc import Callable

from check_runner import Control, check, run_checks
from toy_engine import HeldTransfer, ToyEngine, keys_of, wait_until
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext


def fill_the_pool(engine: ToyEngine, first: int) -> int:
    """Store new keys until far more was written than the pool holds; returns how many were taken."""
    taken = 0
    for begin in range(first, first + 64 * 60, 60):
        taken += len(engine.store(f"fill-{begin}", keys_of(*range(begin, begin + 60)), list(range(60))))
    return taken


@check
def a_restarted_daemon_has_what_was_stored_and_the_same_engine_stores_again(socket_path: str, control: Control) -> None:
    """First, while the pool has room: a killed daemon forgets the order of uses, and in a full pool the first slots
    that are reserved after it may be those of these keys."""
    with ToyEngine(socket_path) as engine:
        keys, more = keys_of(*range(800, 804)), keys_of(*range(810, 814))
        for index in range(4):
            engine.fill(index, 7 * index)
        engine.store("s", keys, list(range(4)))
        wait_until(lambda: engine.is_hit(keys))
        control.say("kill")
        assert not engine.is_hit(keys)
        control.say("start")
        wait_until(lambda: engine.is_hit(keys))
        assert engine.load("l", keys, list(range(30, 34))) == {}
        assert all(engine.holds(30 + index, 7 * index) for index in range(4))
        wait_until(lambda: engine.is_hit(more) or bool(engine.store(f"m{time.monotonic_ns()}", more, list(range(4)))))
        wait_until(lambda: engine.is_hit(more))


@check
def leased_slots_keep_their_bytes_while_another_engine_needs_their_space(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        keys = keys_of(*range(700, 708))
        for index in range(8):
            engine.fill(index, 5 * index)
        engine.store("s", keys, list(range(8)))
        wait_until(lambda: engine.is_hit(keys))
        slots = engine.prepare_load("l", keys)
        engine.step()
        assert fill_the_pool(other, 10_000) > 1400
        assert engine.submit_load("l", slots, list(range(20, 28))) == {}
        assert all(engine.holds(20 + index, 5 * index) for index in range(8))


@check
def a_stopped_daemon_costs_the_first_request_two_deadlines_and_the_others_nothing(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path, step_seconds=0.25) as engine:
        keys = engine.ensure_stored(keys_of(750))
        control.say("stop")
        engine.waits = [[]]
        for index in range(6):
            name, wanted = f"r{index}", keys_of(760 + index)
            while engine.look_up(name, wanted)[0] is LookupResult.RETRY:
                engine.step()
            output = engine.manager.prepare_store(wanted, ReqContext(req_id=name))
            assert output is None or output.keys_to_store == []
            engine.step()
            engine.manager.on_request_finished(ReqContext(req_id=name))
        control.say("continue")
        engine.assert_one_deadline_a_step()
        assert sum(map(bool, engine.waits)) == 2, engine.waits
        wait_until(lambda: engine.is_hit(keys))


@check
def every_step_keeps_its_deadline_while_the_daemon_is_stopped(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        known = engine.ensure_stored(keys_of(770, 771))
        control.say("stop")
        engine.busy_steps(100, known)
        control.say("continue")
        engine.assert_one_deadline_a_step()
        wait_until(lambda: engine.is_hit(known))


@check
def every_step_keeps_its_deadline_when_the_daemon_is_killed_between_two_steps_and_comes_back(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        known = engine.ensure_stored(keys_of(770, 771))
        engine.busy_steps(10, known)
        control.say("kill")
        engine.busy_steps(100, known)
        starting = threading.Thread(target=control.say, args=("start",))
        starting.start()
        while starting.is_alive():
            engine.busy_steps(10, known)
        engine.assert_one_deadline_a_step()
        wait_until(lambda: engine.is_hit(known))


@check
def every_step_keeps_its_deadline_when_the_daemon_is_killed_while_it_owes_an_answer(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        known = engine.ensure_stored(keys_of(770, 771))
        control.say("stop")
        assert engine.look_up("owed", known) == [LookupResult.RETRY] * 2
        engine.step()
        control.say("kill")
        engine.busy_steps(100, known)
        asked_again = engine.look_up("owed", known)
        engine.step()
        control.say("start")
        engine.assert_one_deadline_a_step()
        assert asked_again == [LookupResult.MISS] * 2
        wait_until(lambda: engine.is_hit(known))


@check
def an_engine_that_ends_with_copies_under_way_finishes_them_and_holds_nothing(
    socket_path: str, control: Control
) -> None:
    known, new = keys_of(780, 781), keys_of(782)
    with ToyEngine(socket_path) as other:
        for index in range(2):
            other.fill(index, 11 * index)
        other.ensure_stored(known)
    with ToyEngine(socket_path, transfers=[HeldTransfer(), HeldTransfer()]) as engine:
        slots = engine.prepare_load("l", known)
        engine.look_up("s", new)
        wait_until(lambda: engine.manager.link.wait_for_slots(1))
        output = engine.manager.prepare_store(new, ReqContext(req_id="s"))
        assert output.keys_to_store == new
        engine.step()
        engine.fill(5, 77)
        for worker in engine.workers:
            worker.submit_load(1, slots, GPULoadStoreSpec([20, 21], group_sizes=[2], block_indices=[0]))
            worker.submit_store(2, GPULoadStoreSpec([5], group_sizes=[1], block_indices=[0]), output.store_spec)
            assert worker.get_finished() == []
        assert control.dump()['kvoffload_slots{state="leased"}'] == 2
    assert all(engine.holds(20 + index, 11 * index) for index in range(2))
    states = ("leased", "writing", "orphaned")
    wait_until(lambda: not any(control.dump()[f'kvoffload_slots{{state="{state}"}}'] for state in states))
    with ToyEngine(socket_path) as other:
        assert fill_the_pool(other, 400_000) > 1400
        wait_until(lambda: not other.is_hit(known))
        other.fill(7, 78)
        other.store("s", keys_of(783), [7])
        wait_until(lambda: other.is_hit(keys_of(783)))


@check
def a_load_that_spans_a_restart_reads_its_own_bytes_while_another_engine_fills_the_pool(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        keys = keys_of(*range(900, 908))
        for index in range(8):
            engine.fill(index, 9 * index)
        engine.store("s", keys, list(range(8)))
        wait_until(lambda: engine.is_hit(keys))
        slots = engine.prepare_load("l", keys)
        engine.step()
        control.say("kill")
        control.say("start")
        wait_until(lambda: bool(other.store(f"o{time.monotonic_ns()}", keys_of(time.monotonic_ns()), [0])))
        fill_the_pool(other, 100_000)
        wait_until(lambda: engine.workers[0].link._connector.current() and engine.workers[1].link._connector.current())
        assert engine.submit_load("l", slots, list(range(20, 28))) == {}
        assert all(engine.holds(20 + index, 9 * index) for index in range(8))
        wait_until(lambda: fill_the_pool(other, 200_000 + time.monotonic_ns() % 10**9) > 0)


@check
def a_store_that_spans_a_restart_is_dropped_and_harms_nobody(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        keys, theirs = keys_of(1000, 1001), keys_of(*range(1010, 1020))
        engine.look_up("s", keys)
        wait_until(lambda: engine.manager.link.wait_for_slots(2))
        output = engine.manager.prepare_store(keys, ReqContext(req_id="s"))
        assert output.keys_to_store == keys
        engine.step()
        control.say("kill")
        control.say("start")
        for index in range(10):
            other.fill(index, 3 * index)
        wait_until(
            lambda: other.is_hit(theirs) or bool(other.store(f"o{time.monotonic_ns()}", theirs, list(range(10))))
        )
        engine.fill(0, 99)
        spec = GPULoadStoreSpec([0, 0], group_sizes=[2], block_indices=[0])
        for worker in engine.workers:
            worker.submit_store(1, spec, output.store_spec)
            assert [one.job_id for one in worker.get_finished()] == [1]
        engine.manager.complete_store(set(keys), ReqContext(req_id="s"))
        wait_until(lambda: other.is_hit(theirs))
        assert other.load("l", theirs, list(range(40, 50))) == {}
        assert all(other.holds(40 + index, 3 * index) for index in range(10))
        wait_until(lambda: engine.manager.link.poll() is not None and engine.manager.link.row is not None)
        assert not engine.is_hit(keys)


def reconnect(engine: ToyEngine, meanwhile: Callable[[], object]) -> None:
    """End the scheduler's session, and do this when its connector has seen what is under way and the scheduler has not
    yet seen the new session."""
    link = engine.manager.link
    reassertion = link._reassertion
    holdings, ended = reassertion._holdings, link.session
    seen, done = threading.Event(), threading.Event()

    def see_and_wait() -> object:
        found = holdings()
        if threading.current_thread() is not threading.main_thread():
            seen.set()
            assert done.wait(10)
        return found

    reassertion._holdings = see_and_wait
    ended.close("ended by the check")
    assert seen.wait(10)
    meanwhile()
    done.set()
    wait_until(lambda: link.poll() not in (None, ended) and link.row is not None)


@check
def a_load_prepared_while_the_scheduler_reconnects_leaves_the_new_session_alone(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path) as engine:
        keys, others = keys_of(1100, 1101), keys_of(1102)
        engine.ensure_stored(keys + others)
        assert engine.look_up("l", keys) == [LookupResult.HIT] * 2
        slots = []
        reconnect(engine, lambda: slots.append(engine.manager.prepare_load(keys, ReqContext(req_id="l"))))
        reconnect(engine, lambda: None)
        session = engine.manager.link.session
        assert list(engine.submit_load("l", slots[0], [30, 31])) == [engine.jobs]
        assert engine.is_hit(others)
        assert engine.manager.link.poll() is session


@check
def a_load_that_ends_while_the_scheduler_reconnects_gives_its_leases_back(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        keys = keys_of(1110, 1111)
        engine.ensure_stored(keys)
        slots = engine.prepare_load("l", keys)
        engine.step()
        reconnect(engine, lambda: engine.submit_load("l", slots, [30, 31]))
        engine.step()
        wait_until(
            lambda: fill_the_pool(other, 300_000 + time.monotonic_ns() % 10**9) > 1400 and not other.is_hit(keys)
        )


@check
def a_pool_that_was_paused_serves_the_same_engines_when_it_is_active_again(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine:
        keys = engine.ensure_stored(keys_of(1200, 1201))
        session = engine.manager.link.session
        control.say("pause")
        wait_until(lambda: not engine.is_hit(keys))
        assert engine.store("p", keys_of(1202), [0]) == []
        control.say("resume")
        wait_until(lambda: engine.is_hit(keys))
        engine.ensure_stored(keys_of(1203))
        assert engine.manager.link.session is session


@check
def a_cache_that_is_reset_while_no_session_is_there_is_not_hit_over_the_next_one(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        keys = engine.ensure_stored(keys_of(*range(1330, 1334)))
        session = engine.manager.link.session
        session.close("ended by the check")
        engine.manager.reset_cache()
        wait_until(lambda: engine.manager.link.poll() not in (None, session) and engine.manager.link.row is not None)
        assert not engine.is_hit(keys)
        assert other.is_hit(keys)
        engine.ensure_stored(keys)


@check
def a_store_that_one_rank_had_ended_when_the_daemon_was_killed_holds_nothing_when_all_have(
    socket_path: str, control: Control
) -> None:
    """Its Seal went to the daemon that is dead: to the next one that rank does not name the store any more."""
    with ToyEngine(socket_path) as engine:
        keys = keys_of(1340, 1341)
        engine.look_up("s", keys)
        wait_until(lambda: engine.manager.link.wait_for_slots(2))
        output = engine.manager.prepare_store(keys, ReqContext(req_id="s"))
        assert output.keys_to_store == keys
        spec = GPULoadStoreSpec([0, 1], group_sizes=[2], block_indices=[0])
        first, second = engine.workers
        first.submit_store(1, spec, output.store_spec)
        assert len(first.get_finished()) == 1
        control.say("kill")
        control.say("start")
        wait_until(lambda: engine.manager.link.poll() is not None and engine.manager.link.row is not None)
        second.submit_store(1, spec, output.store_spec)
        assert len(second.get_finished()) == 1
        engine.manager.complete_store(set(keys), ReqContext(req_id="s"))

        def holds_only_unused_slots() -> bool:
            engine.manager.link.poll()
            return control.dump()['kvoffload_slots{state="writing"}'] == len(engine.manager.link._credits)

        wait_until(holds_only_unused_slots)


@check
def slots_of_a_row_that_was_replaced_overwrite_nobody_s_bytes(socket_path: str, control: Control) -> None:
    """The pool's `replicatedLayout` becomes Never, and a rank connects again: the engine's slots are twice as long
    from now on, and those that it held unused lie before slots of another engine."""
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        engine.ensure_stored(keys_of(1210))
        wait_until(lambda: engine.manager.link.wait_for_slots(60))
        theirs = keys_of(*range(1220, 1250))
        for index in range(30):
            other.fill(index, 3 * index)
        other.store("s", theirs, list(range(30)))
        wait_until(lambda: other.is_hit(theirs))
        before = engine.manager.link.row
        control.say("never replicate")
        engine.workers[0].link._connector.current().close("ended by the check")
        wait_until(lambda: engine.manager.link.poll() is not None and engine.manager.link.row not in (None, before))
        control.say("replicate")
        assert engine.manager.link.row.slot_bytes == 2 * before.slot_bytes
        for index in range(64):
            engine.fill(index, 99)
        mine = engine.ensure_stored(keys_of(*range(1260, 1324)))
        assert other.load("l", theirs, list(range(32, 62))) == {}
        assert all(other.holds(32 + index, 3 * index) for index in range(30))
        assert engine.load("l", mine[:30], list(range(32, 62))) == {}
        assert all(engine.holds(32 + index, 99) for index in range(30))


if __name__ == "__main__":
    run_checks(with_control=True)
