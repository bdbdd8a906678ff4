"""The index against a simple reference: random engines, sessions, stores, look-ups, deaths and restarts of the daemon.

The reference keeps what each unit of memory holds, as if the engines copied for real. What must always be true:

- a hit has the bytes of its key, written by every rank;
- a slot that somebody may still write, or has leased, is given to nobody;
- what is used, free and spare adds up, for every account;
- the coldest slot is evicted first.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.errors import ProtocolError
from kvoffload_node.index.journal import TenantJournal
from kvoffload_node.index.quotas import Account
from kvoffload_node.index.restore import has_bytes, restore, restored_writes, revive
from kvoffload_node.index.slots import Namespace, Slab, WriteOwner
from kvoffload_node.index.table import Clock
from kvoffload_node.index.tenant import Supply, TenantIndex

EXTENT_BYTES = 65536
NUM_EXTENTS = 5
UNIT_BYTES = 4096
RANKS = 2
SLOT_BYTES = (8192, 20480)
KEYS = [bytes([number]) * 8 for number in range(12)]


@dataclass
class FakeEngine:
    """An engine as the reference knows it."""

    owner: WriteOwner
    account: int
    slot_bytes: int
    namespace: int
    holder: dict[int, int] = field(default_factory=dict)
    reserved: list[int] = field(default_factory=list)
    keys: dict[int, bytes] = field(default_factory=dict)
    """Of slots that it has assigned and not every rank has sealed or failed."""
    left: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that may still write such a slot."""
    stale: set[int] = field(default_factory=set)
    """Of those, slots given out before a restart."""
    alive: bool = True


class IndexMachine(RuleBasedStateMachine):
    """Random life of one tenant."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvo-index-"))
        self.accounts = [Account(0, "-"), Account(1, "a"), Account(2, "b")]
        self.memory: dict[int, tuple[int, bytes, int] | None] = {}
        """Unit of memory to the namespace, key and rank of what stands there."""
        self.clock = Clock()
        self.last_use: dict[int, int] = {}
        self.uses = 0
        self.next_number = 10
        self.engines: list[FakeEngine] = []
        self.index = self.open_index()
        for position in range(2):
            self.index.add_spare(position)
        self.num_allocated = 2
        for account, slot_bytes in ((1, 0), (1, 0), (2, 1)):
            self.add_engine(account, SLOT_BYTES[slot_bytes])

    def open_index(self) -> TenantIndex:
        journal = TenantJournal(self.folder / "journal", num_extents=NUM_EXTENTS, extent_bytes=EXTENT_BYTES)
        index = TenantIndex(1, extent_bytes=EXTENT_BYTES, clock=self.clock, journal=journal)
        for number, _ in enumerate(SLOT_BYTES, 1):
            index.namespaces[number] = Namespace(number, bytes([number]), 8)
        return index

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.journal.close()
            shutil.rmtree(self.folder)

    # --- the reference ----------------------------------------------------------------------------------------------

    def add_engine(self, account: int, slot_bytes: int) -> None:
        owner = WriteOwner(number=self.next_number, storer=self.next_number, world_size=RANKS)
        self.next_number += 1
        self.engines.append(FakeEngine(owner, account, slot_bytes, SLOT_BYTES.index(slot_bytes) + 1))

    def units(self, offset: int, slot_bytes: int) -> range:
        return range(offset // UNIT_BYTES, (offset + slot_bytes) // UNIT_BYTES)

    def untouchable_units(self) -> set[int]:
        """Units that somebody may still read or write."""
        units: set[int] = set()
        for engine in self.engines:
            for offset in (*engine.holder, *engine.reserved, *(o for o, ranks in engine.left.items() if ranks)):
                units.update(self.units(offset, engine.slot_bytes))
        return units

    def write(self, engine: FakeEngine, offset: int, rank: int, key: bytes) -> None:
        units = self.units(offset, engine.slot_bytes)
        for unit in units[rank::RANKS]:
            self.memory[unit] = (engine.namespace, key, rank)

    def check_bytes(self, engine: FakeEngine, offset: int, key: bytes) -> None:
        units = self.units(offset, engine.slot_bytes)
        for rank in range(RANKS):
            for unit in units[rank::RANKS]:
                assert self.memory.get(unit) == (engine.namespace, key, rank), f"wrong bytes at {offset}"

    def namespace(self, engine: FakeEngine) -> Namespace:
        return self.index.namespaces[engine.namespace]

    def living(self, number: int) -> FakeEngine:
        alive = [engine for engine in self.engines if engine.alive]
        return alive[number % len(alive)]

    def find_extent(self, slab: Slab, account: Account, before: int) -> Supply:
        if self.index.may_evict:
            extent = self.index.cold.coldest(before=before, account=account)
            if extent is not None and extent.slab is not slab:
                offsets = set(extent.offsets(EXTENT_BYTES))
                assert not offsets & self.untouched_slots()
                self.index.evict_extent(extent)
                return Supply.SPARE
        return Supply.NONE

    def untouched_slots(self) -> set[int]:
        return {o for e in self.engines for o in (*e.holder, *e.reserved, *(o for o, r in e.left.items() if r))}

    # --- what engines do --------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 7), count=st.integers(1, 6))
    def reserve(self, number: int, count: int) -> None:
        engine = self.living(number)
        slab = self.index.slab(engine.slot_bytes)
        account = self.accounts[engine.account]
        untouchable = self.untouchable_units()
        before = {o: tick for o, tick in slab.evictable.get(account, {}).items() if not self.index.ready[o].holders}
        had_room = bool(slab.partial or self.index.spare)
        offsets, reason = self.index.reserve(
            slab,
            count,
            owner=engine.owner,
            account=account,
            find_extent=lambda tick: self.find_extent(slab, account, tick),
        )
        assert len(offsets) == count or reason
        assert len(set(offsets)) == len(offsets)
        for offset in offsets:
            assert not untouchable & set(self.units(offset, engine.slot_bytes)), "a slot in use was given out"
            engine.reserved.append(offset)
        evicted = [offset for offset in before if offset in offsets]
        kept = [offset for offset in before if offset in self.index.ready]
        if evicted and kept and not had_room:
            assert max(before[o] for o in evicted) <= min(before[o] for o in kept), "not the coldest was evicted"

    @rule(number=st.integers(0, 7), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def assign(self, number: int, keys: list[bytes]) -> None:
        engine = self.living(number)
        pairs = [(engine.reserved.pop(), key) for key in keys if engine.reserved]
        for offset, key in pairs:
            engine.keys[offset] = key
            engine.left[offset] = set(range(RANKS))
        self.index.assign(engine.owner, self.namespace(engine), pairs)

    @rule(number=st.integers(0, 7), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    def store(self, number: int, keys: list[bytes]) -> None:
        self.reserve(number, len(keys))
        self.assign(number, keys)
        engine = self.living(number)
        for rank in range(RANKS):
            for offset in [o for o, ranks in engine.left.items() if rank in ranks]:
                self.end_one(engine, offset, rank, failed=False)

    @rule(number=st.integers(0, 7), rank=st.integers(0, RANKS - 1), failed=st.booleans(), pick=st.integers(0, 9))
    def end_write(self, number: int, rank: int, failed: bool, pick: int) -> None:
        engine = self.living(number)
        offsets = [offset for offset, ranks in engine.left.items() if rank in ranks]
        if offsets:
            self.end_one(engine, offsets[pick % len(offsets)], rank, failed=failed)

    def end_one(self, engine: FakeEngine, offset: int, rank: int, *, failed: bool) -> None:
        engine.left[offset].discard(rank)
        if offset in engine.stale:
            write = self.index.writes[offset]
            self.index.keep_pending(offset, write, ~(1 << rank))
        elif failed:
            self.index.fail(engine.owner, rank, [offset])
        else:
            self.write(engine, offset, rank, engine.keys[offset])
            self.index.seal(engine.owner, rank, [offset])
        if not engine.left[offset]:
            del engine.left[offset], engine.keys[offset]
            engine.stale.discard(offset)

    @rule(number=st.integers(0, 7), pick=st.integers(0, 9))
    def the_scheduler_gives_up_a_store(self, number: int, pick: int) -> None:
        engine = self.living(number)
        offsets = [offset for offset in engine.left if offset not in engine.stale]
        if offsets:
            offset = offsets[pick % len(offsets)]
            self.index.fail(engine.owner, -1, [offset])
            assert offset in self.index.writes, "ranks may still write it"

    @rule(number=st.integers(0, 7))
    def give_back_credits(self, number: int) -> None:
        engine = self.living(number)
        self.index.fail(engine.owner, -1, engine.reserved)
        engine.reserved.clear()

    @rule(number=st.integers(0, 7), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
    def lookup(self, number: int, keys: list[bytes]) -> None:
        engine = self.living(number)
        ready = self.namespace(engine).ready
        hits = [(ready[key], key) for key in keys if key in ready]
        for offset, key in hits:
            self.check_bytes(engine, offset, key)
        self.index.lease(engine.holder, [offset for offset, _ in hits], engine.owner.storer)

    @rule(number=st.integers(0, 7), pick=st.integers(0, 9), twice=st.booleans())
    def unpin(self, number: int, pick: int, twice: bool) -> None:
        engine = self.living(number)
        if engine.holder:
            offset = list(engine.holder)[pick % len(engine.holder)]
            if twice:
                self.index.pin(engine.holder, [offset])
                self.index.unpin(engine.holder, [offset])
            self.index.unpin(engine.holder, [offset])

    @rule(number=st.integers(0, 7), pick=st.integers(0, 9))
    def drop(self, number: int, pick: int) -> None:
        engine = self.living(number)
        if engine.holder:
            offset = list(engine.holder)[pick % len(engine.holder)]
            self.index.drop(engine.holder, [offset])
            assert offset not in self.namespace(engine).ready.values()

    @rule(number=st.integers(0, 7))
    def a_session_cannot_touch_what_it_does_not_hold(self, number: int) -> None:
        engine = self.living(number)
        foreign = next((o for o in self.index.ready if o not in engine.holder), None)
        if foreign is not None:
            for act in (self.index.pin, self.index.unpin, self.index.drop):
                with pytest.raises(ProtocolError):
                    act(engine.holder, [foreign])
        others = [o for e in self.engines if e is not engine for o in (*e.reserved, *e.left)]
        for offset in others[:2]:
            with pytest.raises(ProtocolError):
                self.index.seal(engine.owner, 0, [offset])
            with pytest.raises(ProtocolError):
                self.index.assign(engine.owner, self.namespace(engine), [(offset, KEYS[0])])

    @rule(number=st.integers(0, 7), rarely=st.integers(0, 3))
    def die_and_be_replaced(self, number: int, rarely: int) -> None:
        if rarely:
            return
        engine = self.living(number)
        engine.alive = False
        self.index.release(engine.holder)
        self.index.end_writes(engine.owner, (1 << RANKS) - 1)
        engine.reserved.clear()
        engine.left.clear()
        assert engine.owner.num_writes == 0
        self.add_engine(engine.account, engine.slot_bytes)

    @rule()
    def allocate_an_extent(self) -> None:
        if self.num_allocated < NUM_EXTENTS:
            self.index.add_spare(self.num_allocated)
            self.num_allocated += 1

    @rule(deaths=st.sets(st.integers(0, 2)), rarely=st.integers(0, 3))
    def restart_the_daemon(self, deaths: set[int], rarely: int) -> None:
        """Killed and started again; some engines died with it, the others say what they hold."""
        if rarely:
            return
        sealed = {n: dict(self.index.namespaces[n].ready) for n in self.index.namespaces}
        self.index.journal.close()
        self.accounts = [Account(0, "-"), Account(1, "a"), Account(2, "b")]
        self.index = self.open_index()
        alive = [engine for engine in self.engines if engine.alive]
        for engine in [alive[number] for number in deaths]:
            engine.alive = False
            engine.holder, engine.reserved, engine.left = {}, [], {}
            self.add_engine(engine.account, engine.slot_bytes)
        survivors = [engine for engine in alive if engine.alive]
        for engine in survivors:
            engine.owner.num_writes = 0
            engine.reserved.clear()
        nobody = WriteOwner(number=0, storer=0, world_size=1)
        restore(self.index, {e.owner.number: e.owner for e in survivors}, self.accounts, nobody)
        assert {n: self.index.namespaces[n].ready for n in self.index.namespaces} == sealed, "a sealed key was lost"
        for engine in survivors:
            for offset in engine.left:
                assert self.index.writes[offset].owner is engine.owner, "a slot that is being written was forgotten"
        for engine in survivors:
            held, engine.holder = engine.holder, {}
            for offset, count in held.items():
                assert has_bytes(self.index, offset, nobody)
                revive(self.index, offset, nobody)
                self.index.lease(engine.holder, [offset] * count)
            engine.reserved.clear()
            engine.stale = set(engine.left)
            for offset, write in restored_writes(self.index, engine.owner):
                ranks = engine.left.get(offset, set())
                self.index.keep_pending(offset, write, sum(1 << rank for rank in ranks))
        self.index.end_writes(nobody, 1)

    # --- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        used: dict[str, int] = {account.namespace: 0 for account in self.accounts}
        for offset, slot in index.ready.items():
            used[slot.account.namespace] += index.extents[offset // EXTENT_BYTES].slab.slot_bytes
        for offset, write in index.writes.items():
            used[write.account.namespace] += index.extents[offset // EXTENT_BYTES].slab.slot_bytes
        assert {account.namespace: account.used_bytes for account in self.accounts} == used
        assert sum(used.values()) == index.used_bytes
        assert len(index.spare) + len(index.extents) == self.num_allocated
        assert not set(index.spare) & set(index.extents)
        leased: dict[int, int] = {}
        for engine in self.engines:
            for offset in engine.holder:
                leased[offset] = leased.get(offset, 0) + 1
        assert leased == {offset: slot.holders for offset, slot in index.ready.items() if slot.holders}
        assert index.num_leased == len(leased)
        evictable = {o for slab in index.slabs.values() for lru in slab.evictable.values() for o in lru}
        assert {o for o in index.ready if o not in leased} <= evictable <= set(index.ready) - index.orphans
        for namespace in index.namespaces.values():
            for key, offset in namespace.ready.items():
                assert index.ready[offset].key == key
        for extent in index.extents.values():
            states = [o in index.ready or o in index.writes for o in extent.offsets(EXTENT_BYTES)]
            assert sum(states) + len(extent.free) == extent.num_slots


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=60, suppress_health_check=list(HealthCheck))


@pytest.mark.long
def test_index_against_the_reference_for_longer() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        IndexMachine,
        settings=settings(max_examples=3000, stateful_step_count=100, suppress_health_check=list(HealthCheck)),
    )
