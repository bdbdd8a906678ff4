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

from collections import Counter
from collections.abc import Set

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from byte_engine import pack, unpack
from kvoffload.protocol.messages import (
    Assign,
    Fail,
    Found,
    Generation,
    Lookup,
    Reserve,
    Reserved,
    Seal,
    Unpin,
)
from kvoffload_node.session.engines import SCHEDULER
from session_life import KEYS, QUARANTINE_SECONDS, RANKS, Life

NUMBERS = st.integers(0, 7)
"""Which of the engines, as far as there are so many."""
DEATHS = st.one_of(
    st.just(frozenset(range(SCHEDULER, RANKS))), st.frozensets(st.integers(SCHEDULER, RANKS - 1), min_size=1)
)
MANY_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)


class SessionMachine(Life, RuleBasedStateMachine):
    """Random life of a daemon's pods."""

    @initialize()
    def start(self) -> None:
        self.begin()

    def teardown(self) -> None:
        if hasattr(self, "region"):
            try:
                self.when_all_have_spoken_only_what_the_living_hold_is_held()
            finally:
                self.end()

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

    def store(self, number: int, keys: list[bytes]) -> None:
        self.begin_store(number, keys)
        for rank in range(RANKS):
            self.end_writes(number, rank, 100, failed=False)

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


@pytest.mark.long
def test_sessions_against_the_reference_for_longer() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(max_examples=2000, stateful_step_count=100, suppress_health_check=list(HealthCheck)),
    )
