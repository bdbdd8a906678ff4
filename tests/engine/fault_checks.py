"""Manager and workers beside a scripted daemon that is slow, silent or talks nonsense. Run by `check_runner.py`."""

from check_runner import Control, check, run_checks
from toy_device import ToyDevice
from toy_engine import ToyEngine, keys_of, wait_until
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext

from kvoffload_engine.transfer.cuda import DeviceTransfer

NONSENSE = (
    "unknown-type",
    "no-msgpack",
    "half-frame",
    "huge-length",
    "empty-frame",
    "too-many-offsets",
    "no-offsets",
    "offsets-cut-short",
    "offsets-outside",
    "slots-of-no-bytes",
    "row-of-no-ranks",
    "part-before-its-slot",
)
"""Faults of `scripted_daemon`."""


@check
def a_thousand_keys_are_held_up_by_one_deadline(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        keys = keys_of(*range(1000))
        engine.is_hit(keys)
        control.say("delay 0.005")
        for request in range(20):
            for _ in range(3):
                results = engine.look_up(f"r{request}", keys)
                engine.step()
                if results[0] is not LookupResult.RETRY:
                    break
        control.say("normal")
        engine.assert_one_deadline_a_step()


@check
def a_late_answer_means_retry_for_a_while_and_then_a_miss(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        keys = engine.ensure_stored(keys_of(1))
        control.say("silent")
        seen = [LookupResult.RETRY]
        while seen[-1] is LookupResult.RETRY:
            seen.append(engine.look_up("r", keys)[0])
            engine.step()
        assert seen[1:3] == [LookupResult.RETRY, LookupResult.RETRY], seen
        assert seen[-1] is LookupResult.MISS, seen
        engine.assert_one_deadline_a_step()
        engine.waits = [[]]
        for index in range(100):
            assert engine.look_up(f"open-{index}", keys) == [LookupResult.MISS]
            engine.step()
        assert not any(engine.waits), "an open circuit waits for nothing"
        control.say("normal")
        control.say("close")
        wait_until(lambda: engine.is_hit(keys))


@check
def an_answer_that_comes_between_two_steps_is_used_in_the_second_and_its_leases_go_back(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        known = engine.ensure_stored(keys_of(6, 7))
        asked = control.dump()["lookups"]
        control.say("delay 0.05")
        assert engine.look_up("late", known) == [LookupResult.RETRY] * 2
        engine.step()
        wait_until(lambda: control.dump()["leases"] == 2)
        assert engine.look_up("late", known) == [LookupResult.HIT] * 2
        assert control.dump()["lookups"] == asked + 1
        engine.step()
        control.say("normal")
        wait_until(lambda: control.dump()["leases"] == 0)


@check
def the_circuit_closes_when_late_answers_have_come_and_their_leases_go_back(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        keys = engine.ensure_stored(keys_of(2))
        control.say("delay 0.1")
        for index in range(6):
            engine.look_up(f"late-{index}", keys)
            engine.step()
            engine.manager.on_request_finished(ReqContext(req_id=f"late-{index}"))
        control.say("normal")
        wait_until(lambda: engine.is_hit(keys))
        wait_until(lambda: control.dump()["leases"] == 0)


@check
def every_step_keeps_its_deadline_with_a_slow_daemon(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path, step_seconds=0.002) as engine:
        known = engine.ensure_stored(keys_of(6, 7))
        for delay in ("0.001", "0.005", "0.05", "1"):
            control.say(f"delay {delay}")
            engine.busy_steps(60, known)
        engine.assert_one_deadline_a_step()
        control.say("normal")
        wait_until(lambda: engine.is_hit(known))
        wait_until(lambda: control.dump()["leases"] == 0)


@check
def nonsense_ends_the_session_and_neither_the_engine_nor_the_deadline_of_a_step(
    socket_path: str, control: Control
) -> None:
    for number, nonsense in enumerate(NONSENSE):
        with ToyEngine(socket_path, step_seconds=0.002) as engine:
            known = engine.ensure_stored(keys_of(6, 7))
            try:
                control.say(nonsense)
                engine.busy_steps(40, known)
                control.say("close")  # so that what is said to a new session is nonsense too
                engine.busy_steps(80, known)
                engine.assert_one_deadline_a_step()
                assert engine.look_up("n", keys_of(4)) == [LookupResult.MISS], nonsense
                engine.step()
                control.say("normal")
                control.say("close")
                engine.ensure_stored(
                    keys_of(100 + number, 200 + number)
                )  # others: keys of a load that failed are a miss
            except Exception as error:
                raise AssertionError(nonsense) from error


@check
def a_store_that_cannot_be_begun_between_two_sessions_is_given_up_in_the_next(
    socket_path: str, control: Control
) -> None:
    with ToyEngine(socket_path) as engine:
        keys = keys_of(5)
        failed_before = control.dump()["failed"]
        engine.look_up("s", keys)
        wait_until(lambda: engine.manager.link.wait_for_slots(1))
        output = engine.manager.prepare_store(keys, ReqContext(req_id="s"))
        assert output.keys_to_store == keys
        engine.step()
        control.say("silent")  # so that nobody connects again before the test says so
        control.say("close")
        wait_until(lambda: all(worker.link._connector.current() is None for worker in engine.workers))
        spec = GPULoadStoreSpec([0], group_sizes=[1], block_indices=[0])
        for worker in engine.workers:
            worker.submit_store(1, spec, output.store_spec)
            assert [one.job_id for one in worker.get_finished()] == [1]
        engine.manager.complete_store(set(keys), ReqContext(req_id="s"))
        control.say("normal")
        wait_until(lambda: control.dump()["failed"] == failed_before + 2)
        wait_until(lambda: engine.manager.link.poll() is not None and engine.manager.link.row is not None)
        assert not engine.is_hit(keys)


@check
def requests_that_end_at_any_point_leave_no_lease(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine:
        keys = keys_of(*range(10, 20))
        engine.store("s", keys, list(range(10)))
        wait_until(lambda: engine.is_hit(keys))
        engine.look_up("never-scheduled", keys)
        engine.manager.on_request_finished(ReqContext(req_id="never-scheduled"))
        engine.step()
        engine.prepare_load("loading", keys[:4])
        engine.step()
        engine.manager.on_request_finished(ReqContext(req_id="loading"))
        assert control.dump()["leases"] == 4, "a load under way keeps what it reads"
        engine.manager.receives_finished(["loading"])
        assert control.dump()["leases"] == 0
        engine.prepare_load("reset", keys[:3])
        engine.step()
        engine.manager.reset_cache()
        assert control.dump()["leases"] == 3, "a reset does not take away what a load reads"
        engine.manager.receives_finished(["reset"])
        assert control.dump()["leases"] == 0


@check
def a_wrong_byte_is_dropped_for_all_when_the_load_says_so(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine:
        keys = keys_of(4)
        engine.store("s", keys, [0])
        wait_until(lambda: engine.is_hit(keys))
        engine.prepare_load("l", keys)
        engine.step()
        engine.manager.load_failed("l", bytes_are_wrong=True)
        engine.manager.receives_finished(["l"])
        wait_until(lambda: control.dump()["dropped"] == 1)


@check
def an_extent_is_given_back_after_its_copies_are_done_and_its_registration_is_gone(
    socket_path: str, control: Control
) -> None:
    device = ToyDevice()
    with ToyEngine(socket_path, ranks=1, identity=b"r" * 32, transfers=[DeviceTransfer(device)]) as engine:
        keys = keys_of(700)
        engine.store("s", keys, [0])
        wait_until(lambda: engine.is_hit(keys) and len(device.registered) == 1)
        slots = engine.prepare_load("l", keys)
        engine.step()
        device.calls.clear()
        device.copies_are_done = False
        engine.workers[0].submit_load(7, slots, GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0]))
        device.may_unregister.clear()
        before = control.dump()["revoked"]
        control.say("revoke")
        wait_until(lambda: "unregister" in device.calls)
        assert device.calls == ["copy", "synchronize", "unregister"]
        for _ in range(20):
            assert control.dump()["revoked"] == before, "the daemon may punch while the pages are registered"
        device.may_unregister.set()
        wait_until(lambda: control.dump()["revoked"] == before + 1)
        assert not device.registered


@check
def more_is_stored_than_there_are_slots_and_nothing_breaks(socket_path: str, control: Control) -> None:
    with ToyEngine(socket_path) as engine:
        stored = sum(
            len(engine.store(f"s{index}", keys_of(*range(1000 + 40 * index, 1040 + 40 * index)), list(range(40))))
            for index in range(200)
        )
        assert 0 < stored < 8000


if __name__ == "__main__":
    run_checks(with_control=True)
