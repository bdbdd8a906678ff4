"""Requests aborted, requests preempted, the daemon killed and the engine ended in the middle of transfers, on an engine
of its own with a small pool; afterwards a second engine gets all of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import EngineProcess, eventually, make_prompt, wait_for_slots

from daemon_process import DaemonProcess, TestEngine
from kvoffload.protocol.messages import OFFSET_BYTES, Reserve, Reserved

pytestmark = [pytest.mark.engine, pytest.mark.alone]
POOL_BYTES = 8 << 20
CHUNK_BYTES = 65536
"""128 in the pool; a prompt of 300 tokens has 9."""
OPTIONS = {"model": "tiny-llama", "block_size": 32, "num_gpu_blocks_override": 40, "max_num_seqs": 6}
"""40 blocks: of six requests that grow to more than 300 tokens the scheduler has to preempt some."""


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("small-pool"), capacity_bytes=POOL_BYTES) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(small_pool: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("held"), socket=small_pool.attach("pod-held"), **OPTIONS) as engine:
        yield engine


def expected_tokens(engine: EngineProcess, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What these prompts give without any look-up that hits."""
    got = engine.generate_cold(prompts, max_tokens=max_tokens, cache_salt="apart")
    assert not any(got.cached)
    return got.tokens


def assert_nothing_is_held(engine: EngineProcess, pool: DaemonProcess) -> None:
    assert wait_for_slots(pool, "leased", 0)
    # What is reserved for stores to come counts as being written: an eighth of the region at most.
    assert eventually(lambda: pool.metrics()['kvoffload_slots{state="writing"}'] <= POOL_BYTES // CHUNK_BYTES // 8)
    assert not engine.tracebacks


def test_requests_aborted_in_the_middle_of_transfers_leave_no_lease(
    engine: EngineProcess, small_pool: DaemonProcess
) -> None:
    loading, storing = make_prompt(30), make_prompt(31)
    cold = engine.generate_cold([loading])
    names = engine.hold_transfers([loading, storing])
    try:
        assert small_pool.metrics()['kvoffload_slots{state="leased"}'] > 0
        engine.do("abort", names=names, steps=0)
    finally:
        engine.rpc("probe_fault", "")
    again = engine.generate_cold([loading])
    assert again.cached[0] >= 256
    assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
    assert_nothing_is_held(engine, small_pool)


def test_requests_preempted_in_the_middle_of_transfers_give_the_right_tokens(
    engine: EngineProcess, small_pool: DaemonProcess
) -> None:
    prompts = [make_prompt(40), make_prompt(41), *(make_prompt(42 + index, 150) for index in range(4))]
    engine.generate_cold(prompts[:1])
    expected = expected_tokens(engine, prompts, 190)
    names = engine.hold_transfers(prompts[:2], max_tokens=190)
    try:
        names += engine.do("add", prompts=prompts[2:], max_tokens=190)
        assert eventually(lambda: min(engine.rpc("probe_preempted")) > 0, 120)
        assert small_pool.metrics()['kvoffload_slots{state="leased"}'] > 0, "the load was not held so long"
    finally:
        engine.rpc("probe_fault", "")
    assert engine.do("finish", names=names) == expected
    engine.generate_cold([make_prompt(49)])
    assert_nothing_is_held(engine, small_pool)


def test_a_daemon_killed_under_running_requests_costs_neither_tokens_nor_long_waits(
    engine: EngineProcess, small_pool: DaemonProcess
) -> None:
    prompts = [make_prompt(50 + index) for index in range(6)]
    engine.generate_cold(prompts[:2])
    begin = time.monotonic()
    expected = expected_tokens(engine, prompts, 60)
    usual_seconds = time.monotonic() - begin
    names = engine.hold_transfers(prompts[:3], max_tokens=60)
    names += engine.do("add", prompts=prompts[3:], max_tokens=60)
    begin = time.monotonic()
    small_pool.kill()
    engine.rpc("probe_fault", "")
    assert engine.do("finish", names=names) == expected
    assert time.monotonic() - begin < 3 * usual_seconds + 10
    small_pool.start()
    assert eventually(lambda: engine.generate_cold(prompts[:1]).cached[0] >= 256)
    assert_nothing_is_held(engine, small_pool)


def test_an_engine_that_ends_in_the_middle_of_transfers_ends_well_and_another_one_has_all_of_the_pool(
    engine: EngineProcess, small_pool: DaemonProcess
) -> None:
    """The last one: it ends the engine that the others used."""
    loading, storing = make_prompt(70), make_prompt(71)
    engine.generate_cold([loading])
    engine.hold_transfers([loading, storing])
    engine.close()
    assert engine.exit_status == 0
    assert not engine.tracebacks
    assert wait_for_slots(small_pool, "leased", 0)
    assert wait_for_slots(small_pool, "writing", 0)
    assert number_of_slots(small_pool.attach("pod-next")) == POOL_BYTES // CHUNK_BYTES


def number_of_slots(socket: Path) -> int:
    """How many slots of a chunk another engine can get to write, at most the whole pool."""
    other = TestEngine(socket, part_bytes=CHUNK_BYTES // 2, replicated=False)
    assert other.ready.slot_bytes == CHUNK_BYTES
    number = 0

    def has_all() -> bool:
        nonlocal number
        other.scheduler.send(Reserve(1, POOL_BYTES // CHUNK_BYTES - number))
        number += len(other.scheduler.wait_for(Reserved, 30).offsets) // OFFSET_BYTES
        return number == POOL_BYTES // CHUNK_BYTES

    eventually(has_all)
    other.close()
    return number
