"""A daemon and its engines without sockets, and a reference of who may still touch what: for `property.test_sessions`.

The registry, the recovery, the region and the index are the daemon's own, over files and kernel locks. `FakeEngine` and
`Process` know what a real engine's processes would know, and speak as its connectors do; `Life` compares.
"""

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from byte_engine import pack
from kvoffload.api.pool import Sharing
from kvoffload.protocol.messages import (
    PROTOCOL_VERSION,
    Bind,
    EngineLost,
    EngineReady,
    Fail,
    Hello,
    Mapped,
    Message,
    Reassert,
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


class Life:
    """Of a daemon's pods, and what must be true of it."""

    def begin(self) -> None:
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

    def end(self) -> None:
        """Let go of everything, whatever is held."""
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

    # --- what processes do --------------------------------------------------------------------------------------------

    def give_up_what_came_too_late(self, engine: FakeEngine, process: Process) -> None:
        """A rank hears in order: before it begins what it is told next."""
        for one in [one for one in engine.too_late if one[0] == process.rank]:
            self.say(process, Fail(one[1], pack([one[2]])))
            engine.too_late.remove(one)

    def is_done(self, engine: FakeEngine, offset: int, rank: int) -> None:
        engine.left[offset].discard(rank)
        if not engine.left[offset]:
            del engine.left[offset], engine.given_in[offset], engine.unheard[offset]

    def land(self, engine: FakeEngine, offset: int, rank: int) -> None:
        for unit in self.units_of_rank(engine, offset, rank):
            self.memory[unit] = (engine.model, engine.keys[offset], rank)

    def lose(self, process: Process) -> None:
        if process.connection is not None:
            connection, process.connection = process.connection, None
            self.registry.disconnected(connection.session, EndReason.PEER_CLOSED)
            self.hear_all()

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
