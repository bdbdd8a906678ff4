"""However much an engine holds, what its scheduler and its workers send is taken by the daemon's own decoder."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffload.errors import DaemonUnavailable
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import (
    MAX_KEYS,
    PROTOCOL_VERSION,
    Assign,
    Drain,
    EngineLost,
    EngineReady,
    Fail,
    Found,
    FromDaemon,
    FromEngine,
    Lookup,
    Mapped,
    Message,
    Reassert,
    Reserve,
    Reserved,
    Seal,
    Unpin,
    Welcome,
)
from kvoffload_engine.reassertion import Held

MANY = 20_000
WELCOME = Welcome(protocol=PROTOCOL_VERSION, epoch=2, region_bytes=1 << 40, extent_bytes=1 << 26)


class Recorder:
    """A session whose daemon decodes everything at once and answers nothing."""

    welcome = WELCOME
    is_open = True

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, *messages: Message) -> None:
        decode = msgspec.msgpack.Decoder(FromEngine).decode
        for message in messages:
            payload = msgspec.msgpack.encode(message)
            pack_frame(payload)
            self.sent.append(decode(payload))

    def receive(self, _: float) -> list[Message]:
        return []

    def take_descriptors(self) -> list[int]:
        return [os.open("/dev/null", os.O_RDONLY) for _ in range(self.num_descriptors)]

    num_descriptors = 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The engine's modules, with empty classes in the place of vLLM's."""
    names = ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.base")
    modules = {name: ModuleType(name) for name in names}
    for name in ("GPULoadStoreSpec", "LoadStoreSpec", "OffloadingWorker", "TransferResult"):
        setattr(modules["vllm.v1.kv_offload.base"], name, type(name, (SimpleNamespace,), {}))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = {
        name: importlib.import_module(f"kvoffload_engine.{name}") for name in ("link", "slots", "worker", "worker_link")
    }
    yield SimpleNamespace(**ours)
    for name in ours:
        del sys.modules[f"kvoffload_engine.{name}"]


def packed(count: int) -> bytes:
    return np.arange(count, dtype="<i8").tobytes()


def make_link(engine: SimpleNamespace, num_reads: int = 0, num_writes: int = 0) -> tuple[Any, Recorder]:
    """A link whose engine became ready, and that holds so much since epoch 1."""
    last = Recorder()
    reads, writes = [Held(packed(num_reads), 1, last)], [Held(packed(1), 1)] * num_writes
    link, session = engine.link.DaemonLink(step_seconds=0.0, holdings=lambda: (reads, writes)), Recorder()
    link._connector = SimpleNamespace(current=lambda: session)
    link.poll()
    link.row, link._is_bound = engine.slots.SlotRow(4096, (0,), (1,), (0,)), True
    link._reassertion._last_session = last
    return link, session


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


def test_a_scheduler_says_once_why_not_everything_is_stored(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    link, session = make_link(engine)
    reasons = ("Allocating", "StateFull", "AllLeased", "StateFull", "")
    session.receive = lambda _: [Reserved(7, 2, b"", reason) for reason in reasons]
    with caplog.at_level("WARNING"):
        link.poll()
        link.poll()
    (record,) = caplog.records
    assert "StateFull: the node daemon's state folder does not take the records of more slots" in record.getMessage()


READY = EngineReady(replicated=True, slot_bytes=4096, part_offsets=(0,), sharers=(1,), sharer_index=(0,))


def hear(link: Any, session: Any, *messages: FromDaemon) -> None:
    """The scheduler takes in what its daemon says."""
    session.receive = lambda _: messages
    link.poll()
    session.receive = lambda _: []


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
    session.receive = lambda _: [Reserved(reserve.request, 2, packed(1))]
    link.poll()
    link.reserve()
    assert [(message.request, message.count) for message in session.sent] == [(reserve.request, 1)]
