"""However much an engine holds, what its scheduler and its workers send is taken by the daemon's own decoder."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_without_vllm import WELCOME, Recorder, make_link, packed
from kvoffload.errors import DaemonUnavailable
from kvoffload.layout.pages import build_part_layout
from kvoffload.protocol.messages import (
    MAX_KEYS,
    Assign,
    Drain,
    EngineLost,
    EngineReady,
    Fail,
    Found,
    FromDaemon,
    Lookup,
    Mapped,
    Message,
    Reassert,
    Report,
    Reserve,
    Reserved,
    Seal,
    Unpin,
)
from kvoffload_engine.reassertion import Held
from kvoffload_engine.transfer.plan import DeviceTensors

MANY = 20_000


def make_worker(engine: SimpleNamespace) -> Any:
    worker = engine.worker.KVOffloadWorker(
        rank=0, socket_path="", make_hello=lambda: None, layout=None, tensors=None, transfer=None
    )
    worker.link.mapping = SimpleNamespace(is_of=lambda *_: True, epochs={1})
    return worker


def offsets_of(messages: list[Any], field: str = "offsets") -> int:
    return sum(len(getattr(message, field)) for message in messages) // 8


@pytest.mark.parametrize(("num_reads", "num_writes"), [(8192, 0), (8193, 0), (MANY, 0), (1, 8193), (MANY, MANY)])
def test_a_scheduler_says_to_a_restarted_daemon_all_that_it_holds(
    engine: SimpleNamespace, num_reads: int, num_writes: int
) -> None:
    link, session = make_link(engine, num_reads, num_writes)
    link._reassertion.begin(session)
    os.close(link._reassertion._lock.descriptor)
    assert {type(message) for message in session.sent} == {Reassert}
    assert (offsets_of(session.sent, "pins"), offsets_of(session.sent, "writes")) == (num_reads, num_writes)
    assert [message.more for message in session.sent] == [True] * (len(session.sent) - 1) + [False]


@pytest.mark.parametrize("count", [8192, 8193, MANY])
def test_a_worker_says_to_a_restarted_daemon_all_that_it_copies(engine: SimpleNamespace, count: int) -> None:
    worker = make_worker(engine)
    for number, is_store in enumerate((True, False)):
        slots = engine.slots.RegionSlots(1, packed(count), None)
        worker._jobs[number] = engine.worker.Job(slots, is_store, None)
    session = Recorder()
    session.num_descriptors = 2
    worker.link._connected(session)
    os.close(worker.link._lock.descriptor)
    *parts, last = session.sent
    assert last == Mapped()
    assert (offsets_of(parts, "pins"), offsets_of(parts, "writes")) == (count, count)
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]


class Broken(Recorder):
    """A session that ends at the first message."""

    def send(self, *_: Message) -> None:
        raise DaemonUnavailable("gone")


def open_descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def test_a_scheduler_whose_session_ends_at_once_keeps_the_lock_of_the_last_one_and_nothing_else(
    engine: SimpleNamespace,
) -> None:
    link, session = make_link(engine, 1, 1)
    link._reassertion.begin(session)
    lock, before = link._reassertion._lock.descriptor, open_descriptors()
    for _ in range(3):
        with pytest.raises(DaemonUnavailable):
            link._reassertion.begin(Broken())
    assert (link._reassertion._lock.descriptor, link._reassertion._last_session) == (lock, session)
    assert open_descriptors() == before
    os.close(lock)


def test_a_worker_whose_session_ends_at_once_keeps_the_lock_of_the_last_one_and_nothing_else(
    engine: SimpleNamespace,
) -> None:
    worker, session = make_worker(engine), Recorder()
    session.num_descriptors = 2
    worker.link._connected(session)
    lock, before = worker.link._lock.descriptor, open_descriptors()
    for _ in range(3):
        broken = Broken()
        broken.num_descriptors = 2
        with pytest.raises(DaemonUnavailable):
            worker.link._connected(broken)
    assert worker.link._lock.descriptor == lock
    assert open_descriptors() == before
    os.close(lock)


def test_a_scheduler_and_a_worker_that_connect_again_let_go_of_the_lock_of_before(engine: SimpleNamespace) -> None:
    (link, _), worker = make_link(engine), make_worker(engine)
    seen = []
    for _ in range(3):
        session = Recorder()
        link._reassertion.begin(session)
        session.num_descriptors = 2
        worker.link._connected(session)
        seen.append(len(open_descriptors()))
    assert len(set(seen)) == 1, "the daemon would believe a process to live that is dead"
    link._reassertion.close()
    os.close(worker.link._lock.descriptor)


def test_a_worker_reports_once_what_it_moved_and_what_failed(engine: SimpleNamespace) -> None:
    worker, session = make_worker(engine), Recorder()
    worker.link._transfer = SimpleNamespace(registration_refused="")
    worker.link._connector = SimpleNamespace(current=lambda: session)
    slots = engine.slots.RegionSlots(2, packed(1), None)
    ended = [(True, 100, ""), (True, 20, ""), (True, 7, "gone"), (False, 3000, ""), (False, 9, "gone"), (False, 9, "x")]
    for number, (is_store, num_bytes, error) in enumerate(ended):
        worker._jobs[number] = engine.worker.Job(slots, is_store, SimpleNamespace(total_bytes=num_bytes), error)
        worker._finish(number, 0.0)
    for _ in range(2):
        worker.link.report(force=True)
    (report,) = [message for message in session.sent if isinstance(message, Report)]
    assert (report.stored_bytes, report.failed_stores) == (120, 1)
    assert (report.loaded_bytes, report.failed_loads) == (3000, 2)
    assert report.note == ""
    assert [type(message) for message in session.sent] == [Seal, Seal, Fail, Report]
    assert worker.take_failed_loads() == {4: False, 5: False}
    assert worker.take_failed_loads() == {}


def test_a_store_that_ended_while_a_session_began_is_sealed_without_another_step(engine: SimpleNamespace) -> None:
    """The connector's thread published the session after the model's thread had found none."""
    worker, session = make_worker(engine), Recorder()
    worker._jobs[1] = engine.worker.Job(engine.slots.RegionSlots(2, packed(3), None), True, engine.worker.EMPTY_PLAN)
    worker.link._connector = SimpleNamespace(current=lambda: None)
    worker._finish(1, 0.0)
    worker.link._connector = SimpleNamespace(current=lambda: session)
    worker.link._tick()
    worker.link._tick()
    (seal,) = [message for message in session.sent if isinstance(message, Seal)]
    assert (seal.epoch, seal.offsets) == (2, packed(3))


@pytest.mark.parametrize(
    ("is_store", "epoch", "is_connected", "is_begun"),
    [
        (True, 2, True, True),
        (True, 1, True, False),
        (True, 2, False, False),
        (False, 1, True, True),
        (False, 1, False, True),
        (False, 7, True, False),
    ],
)
def test_a_store_is_begun_in_its_own_epoch_alone_and_a_load_where_its_file_is_mapped(
    engine: SimpleNamespace, is_store: bool, epoch: int, is_connected: bool, is_begun: bool
) -> None:
    """A daemon that was restarted gives away what a rank has not named as its own."""
    worker, session, started = make_worker(engine), Recorder(), []
    worker._layout = build_part_layout([[(0, 64)]], blocks_per_chunk=1)
    worker._tensors = DeviceTensors(np.array([1 << 20]), np.array([64]), 8)
    worker._transfer = SimpleNamespace(start=lambda job, plan, to_region: started.append((job, to_region)))
    worker.link.mapping = SimpleNamespace(epochs={1, 2}, address=1 << 30, num_bytes=1 << 20)
    known = []

    def current() -> Recorder | None:
        known.append(set(worker._jobs))
        return session if is_connected else None

    worker.link._connector = SimpleNamespace(current=current)
    slots = engine.slots.RegionSlots(epoch, packed(1), engine.slots.SlotRow(4096, (0,), (1,), (0,)))
    device = SimpleNamespace(block_ids=[3], group_sizes=[1], block_indices=[0])
    assert worker.submit_store(5, device, slots) if is_store else worker.submit_load(5, slots, device)
    assert known[0] == {5}, "named to a daemon that comes just now"
    assert started == ([(5, is_store)] if is_begun else [])
    assert set(worker._jobs) == ({5} if is_begun else set()), "what is under way is named to the next daemon"
    assert worker.take_failed_loads() == ({} if is_store or is_begun else {5: False})
    given_up = [message for message in session.sent if isinstance(message, Fail)]
    assert [(message.epoch, message.offsets) for message in given_up] == (
        [(epoch, packed(1))] if is_store and is_connected and not is_begun else []
    )


def test_a_scheduler_says_once_why_not_everything_is_stored(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    link, session = make_link(engine)
    reasons = ("Allocating", "StateFull", "AllLeased", "StateFull", "")
    session.answers = [Reserved(7, 2, b"", reason) for reason in reasons]
    with caplog.at_level("WARNING"):
        link.poll()
        link.poll()
    (record,) = caplog.records
    assert "StateFull: the node daemon's state folder does not take the records of more slots" in record.getMessage()


READY = EngineReady(replicated=True, slot_bytes=4096, part_offsets=(0,), sharers=(1,), sharer_index=(0,))


def hear(link: Any, session: Recorder, *messages: FromDaemon) -> None:
    """The scheduler takes in what its daemon says."""
    session.answers = list(messages)
    link.poll()


def test_a_pool_that_is_active_again_serves_the_engines_that_it_told_to_leave(engine: SimpleNamespace) -> None:
    link, session = make_link(engine)
    link._num_ranks = 1
    hear(link, session, EngineLost("paused"), Drain("the pool's mode is Paused"))
    assert link.serving is None
    hear(link, session, READY)
    assert link.serving is session
    worker = make_worker(engine)
    worker.link._connector = SimpleNamespace(current=lambda: session)
    slots = engine.slots.RegionSlots(2, packed(1), None)
    worker.link.mapping.epochs.add(2)
    for messages, is_usable in (([Drain("the pool's mode is Paused")], False), ([READY], True)):
        worker.link._readable(SimpleNamespace(receive=lambda messages=messages: messages))
        if is_usable:
            assert worker.link.usable_mapping(slots, is_store=True) is worker.link.mapping
        else:
            with pytest.raises(DaemonUnavailable, match="gone or stops"):
                worker.link.usable_mapping(slots, is_store=True)


def test_slots_of_another_row_are_given_back_and_not_written(engine: SimpleNamespace) -> None:
    """The pool's `replicatedLayout` became Never between two rows of one session: its slots are twice as long."""
    link, session = make_link(engine)
    link._num_ranks = 1
    link.reserve()
    hear(link, session, Reserved(session.sent[-1].request, 2, packed(100)))
    link.assign([bytes(64)] * 3, 0)
    session.sent.clear()
    hear(link, session, EngineLost("rank 0 connects again"), msgspec.structs.replace(READY, slot_bytes=8192))
    assert session.sent[0] == Fail(2, packed(100)[3 * 8 :])
    assert link.assign([bytes(64)], 0) == (b"", 0)


def test_a_session_that_has_ended_gives_no_slot_to_a_store(engine: SimpleNamespace) -> None:
    link, session = make_link(engine)
    link._credits._slots.extend([1, 2, 3])

    def send(*_: Message) -> None:
        raise DaemonUnavailable("the daemon closed the connection")

    session.send = send
    assert link.assign([bytes(64)], 0) == (b"", 0)


def test_a_look_up_keeps_the_row_that_its_slots_have(engine: SimpleNamespace) -> None:
    link, session = make_link(engine)
    link._num_ranks, before = 1, link.row
    answer = link.look_up([bytes(64)], 0)
    found = Found(session.sent[-1].request, packed(1))
    hear(link, session, found, EngineLost("rank 0 connects again"), msgspec.structs.replace(READY, slot_bytes=8192))
    assert answer.hits == {bytes(64)}
    assert (answer.row, link.row.slot_bytes) == (before, 8192)


def unpin(link: Any, _: SimpleNamespace) -> None:
    link.unpin(Held(packed(MANY), 1, link.session))
    link.flush()


def assign(link: Any, _: SimpleNamespace) -> None:
    link._credits._slots.extend(range(MAX_KEYS))
    link.assign([bytes(64)] * MANY, 0)


def begin_generation(link: Any, _: SimpleNamespace) -> None:
    link._credits._slots.extend(range(MAX_KEYS))
    link.begin_generation()


@pytest.mark.parametrize(
    ("act", "kind", "count"),
    [(unpin, Unpin, MANY), (assign, Assign, MAX_KEYS), (begin_generation, Fail, MAX_KEYS)],
    ids=["unpin", "assign", "begin_generation"],
)
def test_offsets_are_sent_within_the_bounds(engine: SimpleNamespace, act: Any, kind: type[Message], count: int) -> None:
    link, session = make_link(engine)
    act(link, engine)
    assert offsets_of([message for message in session.sent if type(message) is kind]) == count


def test_a_look_up_asks_for_as_many_keys_as_a_message_takes_and_a_reserve_for_no_more(engine: SimpleNamespace) -> None:
    link, session = make_link(engine)
    link._credits.wanted = MAX_KEYS
    link.look_up([bytes(64)] * MANY, 0)
    link.reserve()
    lookup, reserve = session.sent
    assert isinstance(lookup, Lookup)
    assert isinstance(reserve, Reserve)
    assert (len(lookup.keys), reserve.count) == (64 * MAX_KEYS, MAX_KEYS)


def test_a_region_of_fewer_than_eight_slots_is_asked_for_one_and_then_not_for_none(engine: SimpleNamespace) -> None:
    """A second Reserve would be of no slot, which the protocol does not allow: the daemon would end the session."""
    link, session = make_link(engine)
    link.row = engine.slots.SlotRow(WELCOME.region_bytes // 3, (0,), (1,), (0,))
    link.reserve()
    (reserve,) = session.sent
    hear(link, session, Reserved(reserve.request, 2, packed(1)))
    link.reserve()
    assert [(message.request, message.count) for message in session.sent] == [(reserve.request, 1)]
