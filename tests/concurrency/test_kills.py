"""Case 15: the daemon killed at every step it takes, with engines' copies under way, and restarted at once.

Each round: engine A holds leases and has copies running, the daemon is killed at one of its steps (or at a random
moment), a new one comes up, engine B fills the pool before A has said anything, then A connects again and goes on.
Checked, byte by byte: what A leases keeps its bytes; nothing that A may still write is given to B; every hit of
either has the right bytes; every key that was sealed and not evicted is hit; what A wrote across the restart is not
believed.
"""

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_engine import ByteEngine, key_of
from concurrency.daemon_with_kills import NAMES
from daemon_process import DaemonProcess, hugetlb_mount, wait_until
from kvoffload.errors import KVOffloadError, SessionRefused

CAPACITY_BYTES = 16 << 20
NUM_SLOTS = CAPACITY_BYTES // 65536
ROUNDS_PER_POOL = 8
PROGRAM = [sys.executable, str(Path(__file__).with_name("daemon_with_kills.py"))]


@pytest.fixture(scope="module")
def mount() -> Iterator[Path]:
    with hugetlb_mount(CAPACITY_BYTES) as path:
        yield path


class Rounds:
    """Rounds on one pool."""

    def __init__(self, mount: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="kvo-kill-"))
        self.daemon = DaemonProcess(self.folder, capacity_bytes=CAPACITY_BYTES, mount=mount, program=PROGRAM)
        self.sealed: dict[bytes, None] = {}
        """Keys that were once seen READY, in order."""
        self.given_out = 0
        self.next_key = 0
        path = self.daemon.attach("pod")
        self.first = ByteEngine(path, "first")
        self.second = ByteEngine(path, "second")

    def begin(self) -> None:
        """The first life of the daemon: both engines at work, then it is killed."""
        self.daemon.start()
        self.first.connect()
        self.second.connect()
        self.first.wait_for_room(4)
        self.work(20)
        self.daemon.kill()

    def close(self) -> None:
        self.first.close()
        self.second.close()
        self.daemon.__exit__()
        shutil.rmtree(self.folder)

    def keys(self, count: int) -> list[bytes]:
        self.next_key += count
        return [key_of(number) for number in range(self.next_key - count, self.next_key)]

    def store(self, engine: ByteEngine, count: int) -> None:
        keys = self.keys(count)
        offsets = engine.store(keys)
        self.given_out += len(offsets)
        found = engine.lookup(keys[: len(offsets)])
        while -1 in found:  # a rank's seal comes by its own connection
            found = engine.lookup(keys[: len(offsets)])
        self.sealed.update(dict.fromkeys(keys[: len(offsets)]))
        engine.unpin([offset for offset in found if offset >= 0])

    def work(self, steps: int) -> None:
        """Engine A and B at work; ends with DaemonUnavailable when the daemon is killed."""
        for _ in range(steps):
            engine = self.random.choice([self.first, self.second])
            act = self.random.randrange(6)
            if act <= 1:
                self.store(engine, self.random.randint(1, 8))
            elif act == 2 and self.sealed:
                engine.lookup(self.random.sample(list(self.sealed), min(8, len(self.sealed))))
            elif act == 3 and len(engine.held.pins) > 16:
                engine.unpin(self.random.sample(list(engine.held.pins), 8))
            elif act == 4 and len(engine.held.writes) < 16:
                offsets = engine.begin_store(self.keys(4))
                self.given_out += len(offsets)
                engine.write(0, offsets)
            elif act == 5 and engine.held.writes:
                rank = self.random.randrange(engine.ranks)
                offsets = [o for o, (_, left, _) in engine.held.writes.items() if rank in left]
                engine.write(rank, offsets)
                engine.end_write(rank, offsets, failed=self.random.random() < 0.2)

    def in_use_by(self, engine: ByteEngine) -> set[int]:
        return {*engine.held.pins, *engine.held.writes}

    def fill(self, engine: ByteEngine, other: ByteEngine) -> None:
        """Take all that can be had, while the other engine has not said a word; write over all of it."""
        for _ in range(4):
            offsets = engine.begin_store(self.keys(64))
            self.given_out += len(offsets)
            assert not set(offsets) & self.in_use_by(other), "a slot that another engine may touch was given out"
            for rank in range(engine.ranks):
                engine.write(rank, offsets)
                engine.end_write(rank, offsets)
        other.check_held()

    def run_one(self, kill: str) -> None:
        """One daemon's life, from its restart to its death at the given step, or from outside if that never comes."""
        self.daemon.environment = {"KVO_KILL": kill}
        try:
            self.daemon.start()
            self.recover()
            self.work(30)
        except SessionRefused:
            raise
        except (KVOffloadError, RuntimeError, OSError) as error:
            assert self.daemon.process is not None
            try:
                self.daemon.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{error}; and the daemon lives:\n{self.daemon.log[-3000:]}") from error
            assert self.daemon.process.returncode == -9, f"the daemon ended by itself:\n{self.daemon.log[-3000:]}"
        self.daemon.kill()
        for engine in (self.first, self.second):
            engine.check_held()

    def recover(self) -> None:
        """The second engine comes back first and takes all it can get; then the first says what it still holds."""
        self.second.connect()
        if self.given_out <= NUM_SLOTS // 2:
            keys = list(self.sealed)
            for begin in range(0, len(keys), 64):
                found = self.second.lookup(keys[begin : begin + 64])
                assert -1 not in found, "a key that was sealed and not evicted is not hit"
            self.second.unpin(list(self.second.held.pins))
        if self.random.random() < 0.7:
            self.fill(self.second, self.first)
        self.first.connect()
        self.first.check_held()
        stale = {key for key, _, epoch in self.first.held.writes.values() if epoch != self.first.epoch}
        for rank in range(self.first.ranks):
            offsets = [o for o, (_, left, _) in self.first.held.writes.items() if rank in left]
            self.first.write(rank, offsets)
            self.first.end_write(rank, offsets)
        assert set(self.second.lookup(list(stale))) <= {-1}, "a write across a restart was believed"
        for engine in (self.first, self.second):
            engine.unpin(list(engine.held.pins))
        try:
            wait_until(lambda: len(self.second.reserve_and_return(8)) == 8)
        except AssertionError:
            raise AssertionError(f"no slot is to be had: {self.second.reason}\n{self.daemon.log[-3000:]}") from None


def run(mount: Path, kills: list[str], seed: int) -> None:
    rounds: Rounds | None = None
    try:
        for number, kill in enumerate(kills):
            if number % ROUNDS_PER_POOL == 0:
                if rounds:
                    ended, rounds = rounds, None
                    ended.close()
                rounds = Rounds(mount, seed + number)
                rounds.begin()
                print(f"{number} of {len(kills)} rounds", flush=True)  # seen with -s, and where a round fails
            assert rounds is not None
            try:
                rounds.run_one(kill)
            except AssertionError as error:
                raise AssertionError(f"round {number}, killed at {kill}: {error}") from error
    finally:
        if rounds:
            rounds.close()


@pytest.mark.hugepages
def test_a_daemon_killed_at_each_step_loses_no_sealed_key_and_gives_out_nothing_in_use(mount: Path) -> None:
    chosen = random.Random(4)
    run(mount, [f"{name}:{chosen.randint(1, 6)}" for name in chosen.sample(NAMES, 10)], seed=1)


@pytest.mark.hugepages
@pytest.mark.long
@pytest.mark.parametrize("quarter", range(4))
def test_a_thousand_kills(mount: Path, quarter: int) -> None:
    chosen = random.Random(5)
    kills = [f"{name}:{count}" for name in NAMES for count in (1, 2, 5, 13)]
    kills += [f"{chosen.choice(NAMES)}:{chosen.randint(1, 60)}" for _ in range(1000 - len(kills))]
    run(mount, kills[quarter::4], seed=100 + 1000 * quarter)
