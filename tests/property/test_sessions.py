"""Sessions over the daemon's restarts: random engines whose processes store, read, break off, come back and die, in any
order, against a reference of who may still touch what.

The registry, the recovery, the region and the index are the daemon's own, over files and kernel locks; only sockets are
left out. What must always be true:

- a hit has the bytes of its key, and what is leased keeps them;
- a slot that a process may still write, or whose copy may still land, is given to nobody, whoever has died or has not
  yet spoken to a restarted daemon;
- a sealed key outlives a restart;
- when all have spoken, or are dead and their quarantine is over, nothing is held but what the living hold.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from byte_engine import pack, unpack
from kvoffload.api.pool import Sharing
from kvoffload.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    Bind,
    EngineLost,
    EngineReady,
    Fail,
    Found,
    Generation,
    Hello,
    Lookup,
    Mapped,
    Message,
    Reassert,
    Reserve,
    Reserved,
    Seal,
    Unpin,
)
from kvoffload_node.session import recovery, registry
from kvoffload_node.session.engines import SCHEDULER, EndReason, Session
from kvoffload_node.session.locks import Attachments
from kvoffload_node.session.readiness import announce
from kvoffload_node.session.registry import Registry
from kvoffload_node.session.requests import HANDLERS
from region_on_disk import give_extents, open_region

EXTENT_BYTES = 65536
NUM_EXTENTS = 8
UNIT_BYTES = 4096
RANKS = 2
PART_BYTES = (8192, 12288)
"""By model: what an engine's identity is."""
KEYS = [bytes([number]) * 32 for number in range(12)]
NUMBERS = st.integers(0, 7)
"""Which of the engines, as far as there are so many."""
DEATHS = st.one_of(
    st.just(frozenset(range(SCHEDULER, RANKS))), st.frozensets(st.integers(SCHEDULER, RANKS - 1), min_size=1)
)
MANY_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
QUARANTINE_SECONDS = 5.0


class FakeConnection:
    """A connection without a socket: what the daemon says is kept until it is looked at."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.said: list[Message] = []
        self.session: Session | None = None

    def send(self, message: Message) -> None:
        self.said.append(message)

    def end(self, reason: str) -> None:
        self.registry.disconnected(self.session, reason)


@dataclass(eq=False)
class Process:
    """The scheduler of an engine, or one of its ranks."""

    rank: int
    name: bytes
    locks: list[int] = field(default_factory=list)
    """The last one, and those of before until it has said what it holds."""
    has_spoken: bool = True
    connection: FakeConnection | None = None
    alive: bool = True
    died_at: float = 0.0


@dataclass(eq=False)
class FakeEngine:
    """An engine as the reference knows it: what each of its processes would know."""

    name: str
    pod: str
    model: int
    processes: dict[int, Process]
    epoch: int = 0
    """Of the daemon that its scheduler spoke to last."""
    is_ready: bool = False
    pins: Counter[int] = field(default_factory=Counter)
    """Leased slots."""
    reserved: list[int] = field(default_factory=list)
    keys: dict[int, bytes] = field(default_factory=dict)
    """Of slots that it leases, or that its ranks write."""
    left: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that may still write a slot."""
    given_in: dict[int, int] = field(default_factory=dict)
    """The epoch in which such a slot was given out."""
    unheard: dict[int, set[int]] = field(default_factory=dict)
    """Of them those that have not yet been told to."""
    too_late: list[tuple[int, int, int]] = field(default_factory=list)
    """Rank, epoch and slot of what was heard when another daemon ran: it is given up without a copy."""
    ended_unseen: bool = False
    """The daemon that runs has not seen one of its processes die."""
    is_replaced: bool = False
    """An engine of its name is there: what is left of it does not connect any more."""

    @property
    def slot_bytes(self) -> int:
        return RANKS * PART_BYTES[self.model]

    @property
    def scheduler(self) -> Process:
        return self.processes[SCHEDULER]

    @property
    def is_whole(self) -> bool:
        return all(process.alive for process in self.processes.values())

    @property
    def serves(self) -> bool:
        scheduler = self.scheduler
        return self.is_whole and self.is_ready and scheduler.connection is not None and scheduler.has_spoken


class SessionMachine(RuleBasedStateMachine):
    """Random life of a daemon's pods."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvo-sessions-"))
        self.now = 0.0
        self.patches = pytest.MonkeyPatch()
        for module in (registry, recovery):
            self.patches.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.memory: dict[int, tuple[int, bytes, int]] = {}
        """Unit of memory to the model, key and rank of what stands there."""
        self.engines: list[FakeEngine] = []
        self.next_process = 0
        self.open_daemon()
        give_extents(self.region.tenant_for("team", "uid"), NUM_EXTENTS, with_pages=True)
        for number, (model, pod) in enumerate(((0, "one"), (0, "two"), (1, "one"))):
            self.add_engine(f"engine-{number}", model, pod)

    def teardown(self) -> None:
        if hasattr(self, "region"):
            try:
                self.when_all_have_spoken_only_what_the_living_hold_is_held()
            finally:
                self.region.abandon()
                for engine in self.engines:
                    for process in engine.processes.values():
                        self.let_go(process)
                self.patches.undo()
                shutil.rmtree(self.folder)

    # --- the daemon -------------------------------------------------------------------------------------------------

    def open_daemon(self) -> None:
        self.region = open_region(self.folder, extent_bytes=EXTENT_BYTES, num_extents=NUM_EXTENTS, sharing=Sharing.POOL)
        self.attachments = Attachments(self.folder / "attachments")
        self.registry = Registry(
            region=self.region, attachments=self.attachments, quarantine_seconds=QUARANTINE_SECONDS
        )
        self.region.reserve_pages()
        for uid in ("one", "two"):
            self.registry.add_pod(uid, "team", uid, "auto")

    @property
    def index(self) -> Any:
        (tenant,) = self.region.extents.tenants.values()
        return tenant.index

    def sealed(self) -> dict[bytes, dict[bytes, int]]:
        """READY keys by the digest of their namespace."""
        return {one.digest: dict(one.ready) for one in self.index.namespaces.values() if one.ready}

    # --- the reference ----------------------------------------------------------------------------------------------

    def add_engine(self, name: str, model: int, pod: str) -> None:
        processes = {}
        for rank in (SCHEDULER, *range(RANKS)):
            self.next_process += 1
            processes[rank] = Process(rank, self.next_process.to_bytes(16, "little"))
        engine = FakeEngine(name, pod, model, processes)
        self.engines.append(engine)
        for process in processes.values():
            self.connect(engine, process)

    def units(self, offset: int, slot_bytes: int) -> range:
        return range(offset // UNIT_BYTES, (offset + slot_bytes) // UNIT_BYTES)

    def units_of_rank(self, engine: FakeEngine, offset: int, rank: int) -> range:
        return self.units(offset + rank * PART_BYTES[engine.model], PART_BYTES[engine.model])

    def may_write(self, engine: FakeEngine, offset: int) -> list[int]:
        """Ranks whose copy into this slot may still land: of a dead process while it is in quarantine."""
        ranks = [engine.processes[rank] for rank in engine.left[offset]]
        return [one.rank for one in ranks if one.alive or self.now < one.died_at + QUARANTINE_SECONDS]

    def units_in_use(self) -> set[int]:
        units: set[int] = set()
        for engine in self.engines:
            held = {*engine.pins, *(offset for offset in engine.left if self.may_write(engine, offset))}
            if any(engine.processes[rank].alive for rank in range(RANKS)):  # else nobody can be told to write them
                held.update(engine.reserved)
            for offset in held:
                units.update(self.units(offset, engine.slot_bytes))
        return units

    def check_bytes(self, engine: FakeEngine, offset: int, key: bytes) -> None:
        for rank in range(RANKS):
            for unit in self.units_of_rank(engine, offset, rank):
                assert self.memory.get(unit) == (engine.model, key, rank), f"wrong bytes of {key[:1]!r} at {offset}"

    def pick(self, number: int, *, serving: bool = False) -> FakeEngine | None:
        """A whole engine; with `serving`, one whose scheduler may ask for something."""
        found = [engine for engine in self.engines if (engine.serves if serving else engine.is_whole)]
        return found[number % len(found)] if found else None

    def pick_process(self, number: int, rank: int) -> tuple[FakeEngine, Process] | None:
        """One that lives; what is left of a broken engine connects again too."""
        found = [engine for engine in self.engines if engine.processes[rank].alive and not engine.is_replaced]
        return (found[number % len(found)], found[number % len(found)].processes[rank]) if found else None

    # --- how processes speak ----------------------------------------------------------------------------------------

    def say_hello(self, engine: FakeEngine, process: Process) -> None:
        hello = Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            engine_id=engine.name,
            role="scheduler" if process.rank == SCHEDULER else "worker",
            rank=process.rank,
            world_size=RANKS,
            identity=bytes([engine.model]) * 32,
            part="" if process.rank == SCHEDULER else f"rank-{process.rank}",
            part_bytes=0 if process.rank == SCHEDULER else PART_BYTES[engine.model],
            process=process.name,
        )
        connection = FakeConnection(self.registry)
        session, lock = self.registry.greet(self.registry.pods[engine.pod], hello, connection)  # type: ignore[arg-type]
        connection.session, process.connection = session, connection
        process.locks.append(lock)
        process.has_spoken = False
        if process.rank == SCHEDULER:
            engine.is_ready = False
            announce(session)

    def speak(self, engine: FakeEngine, process: Process, *, at_once: bool = True) -> None:
        """Say what is held, and let go of the locks of before, as the engine's connector does."""
        was_here = len(process.locks) > 1
        if process.rank == SCHEDULER:
            if was_here:
                self.reassert(process, list(engine.pins.elements()), list(engine.left), engine.epoch, at_once=at_once)
                engine.reserved.clear()
            engine.epoch = self.region.epoch
        else:
            if was_here:
                writes = [offset for offset, ranks in engine.left.items() if process.rank in ranks]
                self.reassert(process, [], writes, engine.epoch, at_once=at_once)
            self.say(process, Mapped())
        while len(process.locks) > 1:
            os.close(process.locks.pop(0))
        process.has_spoken = True
        self.hear(engine)

    def connect(self, engine: FakeEngine, process: Process) -> None:
        """As far as it is not."""
        if process.connection is None:
            self.say_hello(engine, process)
        if not process.has_spoken:
            self.speak(engine, process)

    def let_go(self, process: Process) -> None:
        while process.locks:
            os.close(process.locks.pop())

    def reassert(self, process: Process, pins: list[int], writes: list[int], epoch: int, *, at_once: bool) -> None:
        parts = [(pins, writes)] if at_once else [(pins[::2], writes[1::2]), (pins[1::2], writes[::2])]
        for number, (of_pins, of_writes) in enumerate(parts, 1):
            self.say(process, Reassert(epoch, pack(of_pins), pack(of_writes), more=number < len(parts)))

    def say(self, process: Process, message: Message) -> None:
        connection = process.connection
        assert connection is not None
        assert connection.session is not None
        if connection.session.is_unconfirmed:
            self.registry.confirm(connection.session)
        HANDLERS[type(message)](connection, connection.session, message)  # type: ignore[arg-type]

    def ask(self, engine: FakeEngine, message: Message, answer: type) -> Any:
        self.say(engine.scheduler, message)
        assert engine.scheduler.connection is not None
        said = engine.scheduler.connection.said.pop()
        assert isinstance(said, answer)
        return said

    def hear(self, engine: FakeEngine) -> None:
        """What the daemon has told the scheduler: whether the engine may be served."""
        connection = engine.scheduler.connection
        if connection is None:
            engine.is_ready = False
            return
        if not engine.scheduler.has_spoken:
            return  # first it says what it holds
        is_new = False
        for message in connection.said:
            assert isinstance(message, EngineReady | EngineLost)
            engine.is_ready = is_new = isinstance(message, EngineReady)
        if is_new:
            self.say(engine.scheduler, Bind(b"none", 32))
        connection.said = []

    def hear_all(self) -> None:
        for engine in self.engines:
            self.hear(engine)

    # --- what engines do --------------------------------------------------------------------------------------------

    @rule(number=NUMBERS, count=st.integers(1, 8))
    def reserve(self, number: int, count: int) -> None:
        if (engine := self.pick(number, serving=True)) is None:
            return
        in_use = self.units_in_use()
        reserved = self.ask(engine, Reserve(1, count), Reserved)
        offsets = unpack(reserved.offsets)
        assert len(offsets) == count or reserved.reason
        for offset in offsets:
            assert not in_use.intersection(self.units(offset, engine.slot_bytes)), "a slot in use was given out"
            engine.reserved.append(offset)

    @rule(number=NUMBERS, keys=MANY_KEYS, late=st.sets(st.integers(0, RANKS - 1)))
    def begin_store(self, number: int, keys: list[bytes], late: Set[int] = frozenset()) -> None:
        """Some ranks are told later."""
        self.reserve(number, len(keys))
        self.assign(number, keys, late)

    @rule(number=NUMBERS)
    def take_all_that_can_be_had(self, number: int) -> None:
        """And give it back: `reserve` asserts that nobody has it."""
        if (engine := self.pick(number, serving=True)) is not None:
            before = len(engine.reserved)
            self.reserve(number, 64)
            self.say(engine.scheduler, Fail(engine.epoch, pack(engine.reserved[before:])))
            del engine.reserved[before:]

    def assign(self, number: int, keys: list[bytes], late: Set[int]) -> None:
        if (engine := self.pick(number, serving=True)) is None:
            return
        pairs = [(engine.reserved.pop(), key) for key in keys if engine.reserved]
        for offset, key in pairs:
            engine.keys[offset], engine.left[offset] = key, set(range(RANKS))
            engine.given_in[offset], engine.unheard[offset] = engine.epoch, set(late)
        for rank in set(range(RANKS)) - late:
            self.give_up_what_came_too_late(engine, engine.processes[rank])
        offsets, names = [offset for offset, _ in pairs], b"".join(key for _, key in pairs)
        self.say(engine.scheduler, Assign(engine.epoch, pack(offsets), names))

    @rule(number=NUMBERS, rank=st.integers(0, RANKS - 1), count=st.integers(1, 8), failed=st.booleans())
    def end_writes(self, number: int, rank: int, count: int, failed: bool) -> None:
        engine = self.pick(number)
        if engine is None or engine.processes[rank].connection is None or not engine.processes[rank].has_spoken:
            return
        process = engine.processes[rank]
        self.give_up_what_came_too_late(engine, process)
        for offset in [offset for offset, ranks in engine.left.items() if rank in ranks][:count]:
            engine.unheard[offset].discard(rank)
            if not failed:
                self.land(engine, offset, rank)
            epoch, packed = engine.given_in[offset], pack([offset])
            self.say(process, Fail(epoch, packed) if failed else Seal(epoch, packed))
            self.is_done(engine, offset, rank)

    def give_up_what_came_too_late(self, engine: FakeEngine, process: Process) -> None:
        """A rank hears in order: before it begins what it is told next."""
        for one in [one for one in engine.too_late if one[0] == process.rank]:
            self.say(process, Fail(one[1], pack([one[2]])))
            engine.too_late.remove(one)

    def is_done(self, engine: FakeEngine, offset: int, rank: int) -> None:
        engine.left[offset].discard(rank)
        if not engine.left[offset]:
            del engine.left[offset], engine.given_in[offset], engine.unheard[offset]

    def store(self, number: int, keys: list[bytes]) -> None:
        self.begin_store(number, keys)
        for rank in range(RANKS):
            self.end_writes(number, rank, 100, failed=False)

    def land(self, engine: FakeEngine, offset: int, rank: int) -> None:
        for unit in self.units_of_rank(engine, offset, rank):
            self.memory[unit] = (engine.model, engine.keys[offset], rank)

    @rule()
    def every_copy_lands_that_may(self) -> None:
        """Also those of processes that have died, and of which nobody has spoken since a restart."""
        for engine in self.engines:
            for offset in engine.left:
                for rank in set(self.may_write(engine, offset)) - engine.unheard[offset]:
                    self.land(engine, offset, rank)

    @rule(number=NUMBERS, keys=MANY_KEYS)
    def look_up(self, number: int, keys: list[bytes]) -> None:
        if (engine := self.pick(number, serving=True)) is None:
            return
        found = self.ask(engine, Lookup(1, b"".join(keys)), Found)
        for offset, key in zip(unpack(found.offsets), keys, strict=True):
            if offset >= 0:
                self.check_bytes(engine, offset, key)
                assert offset not in engine.left, "a slot that is still being written was hit"
                engine.pins[offset] += 1
                engine.keys[offset] = key

    @rule(
        number=NUMBERS,
        other=NUMBERS,
        keys=MANY_KEYS,
    )
    def store_and_read(self, number: int, other: int, keys: list[bytes]) -> None:
        self.store(number, keys)
        self.look_up(other, keys)

    @rule(number=NUMBERS, pick=st.integers(0, 9), drops=st.booleans())
    def unpin(self, number: int, pick: int, drops: bool) -> None:
        engine = self.pick(number, serving=True)
        if engine is None or not engine.pins:
            return
        offset = list(engine.pins)[pick % len(engine.pins)]
        if drops:
            self.say(engine.scheduler, Fail(engine.epoch, pack([offset]), drop=True))
        self.say(engine.scheduler, Unpin(pack([offset])))
        engine.pins -= Counter([offset])

    @rule(number=NUMBERS)
    def reset(self, number: int) -> None:
        if (engine := self.pick(number, serving=True)) is not None:
            self.say(engine.scheduler, Fail(engine.epoch, pack(engine.reserved)))
            engine.reserved.clear()
            self.say(engine.scheduler, Generation())

    # --- ends -------------------------------------------------------------------------------------------------------

    @rule(number=NUMBERS, ranks=st.permutations(range(SCHEDULER, RANKS)), silent=st.booleans(), at_once=st.booleans())
    def connect_again(self, number: int, ranks: list[int], silent: bool, at_once: bool) -> None:
        """While the connection of before is still there, or after it has broken, or to a restarted daemon: two of an
        engine's processes, of which one may be slow to say what it holds."""
        for is_last, rank in enumerate(ranks[:2]):
            if found := self.pick_process(number, rank):
                self.say_hello(*found)
                if not (is_last and silent):
                    self.speak(*found, at_once=at_once)

    @rule(first=NUMBERS)
    def all_connect_that_do_not(self, first: int) -> None:
        engines = [engine for engine in self.engines if not engine.is_replaced]
        for engine in engines[first % len(engines) :] + engines[: first % len(engines)]:
            for process in engine.processes.values():
                if process.alive:
                    self.connect(engine, process)

    @rule(number=NUMBERS, rank=st.integers(SCHEDULER, RANKS - 1))
    def break_off(self, number: int, rank: int) -> None:
        if found := self.pick_process(number, rank):
            self.lose(found[1])

    def lose(self, process: Process) -> None:
        if process.connection is not None:
            connection, process.connection = process.connection, None
            self.registry.disconnected(connection.session, EndReason.PEER_CLOSED)
            self.hear_all()

    @rule(number=NUMBERS, ranks=DEATHS, keys=MANY_KEYS)
    def die_in_the_middle_of_a_store(self, number: int, ranks: Set[int], keys: list[bytes]) -> None:
        self.begin_store(number, keys)
        if (engine := self.pick(number)) is not None:
            for rank in ranks:
                self.die(engine, engine.processes[rank])

    @rule()
    def the_broken_are_replaced(self) -> None:
        """By engines of their names, unless their end was not seen (a real engine draws another name): what is left of
        the old ones is in nobody's way."""
        for engine in [one for one in self.engines if not one.is_whole and not one.is_replaced]:
            engine.is_replaced = True
            self.add_engine(engine.name + "'" * engine.ended_unseen, engine.model, engine.pod)

    def die(self, engine: FakeEngine, process: Process) -> None:
        if not process.alive:
            return
        process.alive, process.died_at = False, self.now
        self.let_go(process)
        if process.rank == SCHEDULER:
            engine.pins.clear()
        self.lose(process)
        if not any(one.alive for one in engine.processes.values()):
            engine.reserved.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, QUARANTINE_SECONDS + 1]), number=NUMBERS, takes=st.booleans())
    def sweep(self, seconds: float, number: int = 0, takes: bool = True) -> None:
        self.now += seconds
        self.registry.sweep()
        self.hear_all()
        if takes:
            self.take_all_that_can_be_had(number)

    @rule(
        number=NUMBERS,
        keys=MANY_KEYS,
        late=st.sets(st.integers(0, RANKS - 1)),
        deaths=st.dictionaries(NUMBERS, DEATHS, max_size=2),
        all_speak=st.booleans(),
    )
    def restart(
        self, number: int, keys: list[bytes], late: Set[int], deaths: dict[int, Set[int]], all_speak: bool
    ) -> None:
        """The daemon is killed while an engine stores, and started again; some processes have died with it."""
        self.begin_store(number, keys, late)
        sealed, epoch = self.sealed(), self.region.epoch
        for engine in self.engines:
            engine.reserved.clear()  # nobody was told to write them
            for offset, ranks in [(offset, set(ranks)) for offset, ranks in engine.unheard.items()]:
                for rank in ranks:
                    engine.too_late.append((rank, engine.given_in[offset], offset))
                    self.is_done(engine, offset, rank)
            for process in engine.processes.values():
                process.connection = None
            self.hear(engine)
        for dying, ranks in deaths.items():
            if (engine := self.pick(dying)) is not None:
                for rank in ranks:
                    self.die(engine, engine.processes[rank])
        for engine in self.engines:
            engine.ended_unseen = not engine.is_whole
        self.region.abandon()
        self.open_daemon()
        assert self.region.epoch > epoch
        assert self.sealed() == sealed, "a sealed key was lost, or one that was not sealed is believed"
        assert not self.index.may_evict or not any(
            process.alive for engine in self.engines for process in engine.processes.values()
        ), "nothing is evicted before all have spoken"
        if all_speak:
            self.all_connect_that_do_not(number)
            self.sweep(0.0, number)

    @rule()
    def when_all_have_spoken_only_what_the_living_hold_is_held(self) -> None:
        self.the_broken_are_replaced()
        for engine in self.engines:
            for process in engine.processes.values():
                if engine.is_whole:
                    self.connect(engine, process)
                else:
                    self.die(engine, process)
        for _ in range(2):
            self.sweep(QUARANTINE_SECONDS + 1, takes=False)
        self.engines = [engine for engine in self.engines if engine.is_whole]
        assert self.index.may_evict
        assert {engine.engine_id for engine in self.registry.engines.values()} == {one.name for one in self.engines}
        assert set(self.index.writes) == {o for one in self.engines for o in (*one.reserved, *one.left)}
        assert self.index.num_leased == len({o for one in self.engines for o in one.pins})
        assert {number for number, slot in self.index.ready.items() if slot.holders} == {
            offset for engine in self.engines for offset in engine.pins
        }
        assert self.index.orphans <= {offset for engine in self.engines for offset in engine.pins}
        assert len(list(self.attachments.folder.iterdir())) == 2 * len(self.engines) * (RANKS + 1)
        (tenant,) = self.region.extents.tenants.values()
        assert tenant.num_workers == len(self.engines) * RANKS
        assert all(engine.is_ready for engine in self.engines)

    @invariant()
    def what_is_leased_keeps_its_bytes(self) -> None:
        for engine in getattr(self, "engines", []):
            for offset in engine.pins:
                self.check_bytes(engine, offset, engine.keys[offset])

    @invariant()
    def who_is_served_has_all_its_ranks(self) -> None:
        for engine in getattr(self, "engines", []):
            if engine.serves:
                assert all(process.connection is not None for process in engine.processes.values())


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=100, stateful_step_count=80, suppress_health_check=list(HealthCheck))


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


@pytest.mark.long
def test_sessions_against_the_reference_for_longer() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(max_examples=2000, stateful_step_count=100, suppress_health_check=list(HealthCheck)),
    )
