"""Who is refused and why: versions, engines of a node and of a pod, rows and credits that are too large; and engines
that are left alone, which take nobody's place."""

import os
import time
from pathlib import Path

import pytest

from byte_engine import ByteEngine, key_of, unpack
from daemon_process import DaemonProcess, TestEngine, connect, wait_until
from kvoffload.errors import KVOffloadError, SessionRefused
from kvoffload.protocol.client import Session
from kvoffload.protocol.messages import MAX_KEYS, Bind, Hello, Lookup, Mapped, Refused, Reserve, Reserved, Unpin
from small_pool import CAPACITY_BYTES, NUM_SLOTS, attach, fill, hello, start


def test_a_refused_hello_says_why(folder: Path) -> None:
    with start(folder, None, maxEngines=1) as daemon:
        path = daemon.attach("pod")
        engine = TestEngine(path)
        cases = [
            (hello(protocol_min=7, protocol_max=9), "ProtocolVersion", "7 to 9"),
            (hello(), "TooManyEngines", "maxEnginesPerNode is 1"),
            (hello(engine_id="engine", world_size=3), "RankConflict", "3 ranks"),
        ]
        for message, reason, words in cases:
            with pytest.raises(SessionRefused, match=words) as refused:
                Session.connect(str(path), message)
            assert refused.value.reason.value == reason
            assert daemon.metrics()[f'kvoffload_refusals_total{{reason="{reason}"}}'] == 1
        engine.close()


def left_alone(number: int) -> Hello:
    """As the engine agent says it."""
    return hello(
        engine_id=f"without-{number}", reason="MultiNode", message="2 nodes", model="m", process=bytes([number] * 16)
    )


def test_engines_that_are_left_alone_take_no_place_and_are_told_apart(folder: Path) -> None:
    with start(folder, None, maxEngines=2) as daemon:
        path = daemon.attach("pod")
        alone = Session.connect(str(path), left_alone(1))
        other = daemon.attach("other")
        engines = [TestEngine(path), TestEngine(other)]
        assert daemon.metrics()['kvoffload_engines{layout="left-alone"}'] == 1
        assert daemon.metrics()['kvoffload_engines{layout="pending"}'] == 0
        assert daemon.metrics()['kvoffload_engines{layout="replicated"}'] == 2
        with pytest.raises(SessionRefused, match="of this pod are attached"):
            Session.connect(str(path), left_alone(2))
        for engine in (*engines, alone):
            engine.close()


def test_an_id_that_is_left_alone_gets_no_rank(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        with pytest.raises(KVOffloadError):
            connect(path, hello(engine_id="without-1", role="worker", rank=0, part="all", part_bytes=4096))
        assert daemon.metrics()['kvoffload_sessions_closed_total{reason="Malformed"}'] == 1


def test_an_engine_that_is_left_alone_does_not_hold_up_eviction_after_a_restart(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        alone = Session.connect(str(path), left_alone(1))
        engine = attach(path, "a")
        fill(engine, NUM_SLOTS, salt=1)
        engine.close()
        daemon.kill()
        daemon.start()
        again = attach(path, "b")
        fill(again, NUM_SLOTS, salt=2)
        again.close()
        alone.close()


def test_one_pod_has_half_of_the_engines_that_a_node_may_have(folder: Path) -> None:
    with start(folder, None, maxEngines=4) as daemon:
        greedy, modest = daemon.attach("greedy"), daemon.attach("modest")
        engines = [TestEngine(greedy, engine_id=f"e{number}", ranks=1) for number in range(2)]
        with pytest.raises(SessionRefused, match="one pod may have 2 of the 4 ") as refused:
            Session.connect(str(greedy), hello(engine_id="third"))
        assert refused.value.reason.value == "TooManyEnginesInPod"
        assert daemon.metrics()['kvoffload_refusals_total{reason="TooManyEnginesInPod"}'] == 1
        engines += [TestEngine(modest, engine_id=f"e{number}", ranks=1) for number in range(2)]
        for engine in engines:
            engine.close()


def locks_of(path: Path, message: Hello) -> list[int]:
    """Say hello and hang up: the descriptors that came, or SessionRefused."""
    session = Session.connect(str(path), message)
    session.close()
    return session.take_descriptors()


def locks_of_all(path: Path, messages: list[Hello], locks: list[int]) -> None:
    for message in messages:
        locks += locks_of(path, message)


def test_engines_that_keep_their_locks_and_hang_up_are_bounded(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        connect(path, hello(engine_id="first")).close()
        hellos = [hello(engine_id="same", process=number.to_bytes(16, "little")) for number in range(100)]
        locks: list[int] = []
        with pytest.raises(SessionRefused, match="without a connection"):
            locks_of_all(path, hellos, locks)
        assert 16 <= len(locks) < 64
        engine = TestEngine(daemon.attach("other"))
        while locks:
            os.close(locks.pop())
        wait_until(lambda: attachments(daemon) == 3)
        engine.close()


def attachments(daemon: DaemonProcess) -> int:
    return len(list((daemon.state / "attachments").glob("*.json")))


def test_a_process_that_says_hello_without_end_leaves_little_behind(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        message = hello(process=b"p" * 16)
        connect(path, message).close()
        locks = locks_of(path, message)
        for _ in range(50):
            for lock in locks_of(path, message):
                os.close(lock)
        assert attachments(daemon) < 5, "the one lock that is held, the newest one, and one that was just let go of"
        with pytest.raises(SessionRefused, match="holds 16 attachments"):
            locks_of_all(path, [message] * 50, locks)
        for lock in locks:
            os.close(lock)
        wait_until(lambda: attachments(daemon) == 0)
        TestEngine(path).close()


def test_a_row_larger_than_an_extent_is_refused_with_both_numbers(folder: Path) -> None:
    with start(folder, None) as daemon:
        path = daemon.attach("pod")
        large = hello(role="worker", rank=0, part="all", part_bytes=CAPACITY_BYTES)
        worker = connect(path, large)
        worker.send(Mapped())
        refused = worker.wait_for(Refused, 30)
        assert refused.reason == "SlotTooLarge"
        assert str(CAPACITY_BYTES) in refused.message
        assert str(worker.welcome.extent_bytes) in refused.message
        worker.close()


def test_one_engine_cannot_reserve_the_whole_pool(folder: Path) -> None:
    with start(folder, None) as daemon:
        engine = TestEngine(daemon.attach("pod"), part_bytes=4096, ranks=1)
        total = 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            engine.scheduler.send(Reserve(1, 512))
            reserved = engine.scheduler.wait_for(Reserved, 5)
            total += len(unpack(reserved.offsets))
            if reserved.reason == "Rate":
                break
        assert total == CAPACITY_BYTES // 4096 // 4
        engine.close()


def test_20000_leases_are_kept_over_a_restart_and_go_back(folder: Path) -> None:
    capacity_bytes, num_leases = 96 << 20, 20_000
    with DaemonProcess(folder, capacity_bytes=capacity_bytes) as daemon:
        path = daemon.attach("pod")
        engine = ByteEngine(path, "a", ranks=1, part_bytes=4096)
        engine.connect()
        keys = fill(engine, num_leases, salt=1, at_once=2048)
        pieces = [keys[at : at + MAX_KEYS] for at in range(0, num_leases, MAX_KEYS)]
        for piece in pieces:
            assert -1 not in engine.lookup(piece)
        daemon.kill()
        daemon.start()
        engine.connect()
        assert daemon.metrics()['kvoffload_slots{state="leased"}'] == num_leases
        other = ByteEngine(path, "b", ranks=1, part_bytes=4096)
        other.connect()
        fill(other, capacity_bytes // 4096 - num_leases, salt=2, at_once=2048)
        wait_until(lambda: other.reserve_and_return(1) != [])
        other.store([key_of(number, salt=3) for number in range(2048)])  # in the place of its own alone
        engine.check_held()
        held = list(engine.held.pins)
        for at in range(0, num_leases, MAX_KEYS):
            engine.unpin(held[at : at + MAX_KEYS])
        wait_until(lambda: daemon.metrics()['kvoffload_slots{state="leased"}'] == 0)
        assert daemon.metrics()['kvoffload_sessions_closed_total{reason="Malformed"}'] == 0
        other.close()
        engine.close()


def attach_many(daemon: DaemonProcess, num_engines: int, ranks: int) -> None:
    paths = [daemon.attach(f"pod-{number}") for number in range(4)]
    engines = [
        TestEngine(paths[number % 4], engine_id=f"e{number}", ranks=ranks, part_bytes=8192)
        for number in range(num_engines)
    ]
    assert daemon.metrics()['kvoffload_engines{layout="replicated"}'] == num_engines
    for engine in engines:
        engine.scheduler.send(Bind(b"none", 32), Lookup(1, bytes(32)), Unpin(b""))
    with pytest.raises(SessionRefused, match="maxEnginesPerNode"):
        Session.connect(str(paths[0]), hello(engine_id="one too many"))
    for engine in engines:
        engine.close()
    wait_until(lambda: daemon.metrics()['kvoffload_engines{layout="replicated"}'] == 0)
    wait_until(lambda: not list((daemon.state / "attachments").iterdir()))


def test_many_engines_attach_at_once_up_to_the_limit(folder: Path) -> None:
    with start(folder, None, maxEngines=8) as daemon:
        attach_many(daemon, 8, ranks=8)


@pytest.mark.long
def test_64_engines_of_eight_ranks(folder: Path) -> None:
    with start(folder, None, maxEngines=64) as daemon:
        attach_many(daemon, 64, ranks=8)
