"""A real vLLM with latent attention on two ranks: one copy of each chunk, written half by each, read whole by
both."""

import signal
import statistics
from pathlib import Path

import pytest
from engine_process import CHECKSUMS, EngineProcess, eventually, make_prompt, wait_for_slots

from daemon_process import DaemonProcess

pytestmark = [pytest.mark.engine, pytest.mark.alone]


def pages(records: list[list[list]], kind: str) -> list[list[list]]:
    return [one[kind] for one in records]


def test_the_plugin_attaches_and_all_ranks_share_one_copy(mla_engine: EngineProcess) -> None:
    assert mla_engine.lines("this engine offloads its KV cache to pool test")
    mla_engine.generate([make_prompt(1)])
    assert mla_engine.lines("offload is on: one copy for all ranks")


def test_each_page_is_stored_once_and_each_rank_writes_half(mla_engine: EngineProcess) -> None:
    mla_engine.rpc("probe_take")
    mla_engine.generate_cold([make_prompt(2)])
    mla_engine.generate([make_prompt(3, 20)])
    stored = pages(mla_engine.rpc("probe_take"), "stored")
    written = [offset for of_rank in stored for offset, _, _ in of_rank]
    assert len(written) == len(set(written)) > 0
    num_bytes = [sum(size for _, size, _ in of_rank) for of_rank in stored]
    assert num_bytes[0] == num_bytes[1]


def test_loaded_bytes_are_the_stored_bytes_in_every_rank(mla_engine: EngineProcess) -> None:
    mla_engine.rpc("probe_take")
    mla_engine.generate_cold([make_prompt(4)])
    again = mla_engine.generate_cold([make_prompt(4)])
    assert again.cached[0] >= 256
    records = mla_engine.rpc("probe_take")
    stored = {offset: digest for of_rank in pages(records, "stored") for offset, _, digest in of_rank}
    for of_rank in pages(records, "loaded"):
        assert len(of_rank) * 2 >= len(stored) > 0
        assert {offset: digest for offset, _, digest in of_rank}.items() <= stored.items()


def test_warm_outputs_are_equal_and_depend_on_the_loaded_bytes(mla_engine: EngineProcess) -> None:
    prompt = make_prompt(5)
    mla_engine.generate_cold([prompt])
    warm = mla_engine.generate_cold([prompt])
    again = mla_engine.generate_cold([prompt])
    assert warm.cached[0] >= 256
    assert (again.tokens, again.logprobs) == (warm.tokens, warm.logprobs)
    mla_engine.rpc("probe_fault", "zeros")
    try:
        control = mla_engine.generate_cold([prompt])
    finally:
        mla_engine.rpc("probe_fault", "")
    assert control.tokens != warm.tokens


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one-rank", "all-ranks"])
def test_a_failed_load_is_recomputed_once_and_not_tried_again(mla_engine: EngineProcess, ranks: list[int]) -> None:
    prompt = make_prompt(60 + len(ranks))
    cold = mla_engine.generate_cold([prompt])
    mla_engine.rpc("probe_fault", "fail", ranks)
    try:
        failed_before = len(mla_engine.lines("a load failed and is recomputed"))
        recomputed = mla_engine.generate_cold([prompt])
        again = mla_engine.generate_cold([prompt])
        failed = len(mla_engine.lines("a load failed and is recomputed")) - failed_before
    finally:
        mla_engine.rpc("probe_fault", "")
    assert recomputed.tokens == again.tokens == cold.tokens
    assert failed == len(ranks)
    assert again.cached == [0]


def test_a_byte_flipped_in_the_region_is_never_served_and_the_slot_is_dropped(
    mla_engine: EngineProcess, pool: DaemonProcess
) -> None:
    prompt = make_prompt(650)
    mla_engine.rpc("probe_take")
    cold = mla_engine.generate_cold([prompt])
    offsets = [offset for one in mla_engine.rpc("probe_take") for offset, _, _ in one["stored"]]
    ready = pool.metrics()['kvoffload_slots{state="ready"}']
    mla_engine.do("rpc", method="probe_flip_byte", args=[min(offsets) + 17])
    failed_before = len(mla_engine.lines("does not have the checksum"))
    again = mla_engine.generate_cold([prompt])
    assert len(mla_engine.lines("does not have the checksum")) > failed_before
    assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
    assert eventually(lambda: pool.metrics()['kvoffload_slots{state="ready"}'] < ready)


def test_aborted_requests_leave_no_lease_and_no_exception(mla_engine: EngineProcess, pool: DaemonProcess) -> None:
    prompts = [make_prompt(70 + index) for index in range(6)]
    mla_engine.generate_cold(prompts)
    for steps in (0, 1, 2, 3):
        mla_engine.reset_prefix_cache()
        mla_engine.do("abort", prompts=prompts, steps=steps)
        mla_engine.reset_prefix_cache()
        mla_engine.do("abort", prompts=[make_prompt(80 + 10 * steps + index) for index in range(6)], steps=steps)
    mla_engine.generate_cold([make_prompt(79)])
    assert wait_for_slots(pool, "leased", 0)
    assert not mla_engine.tracebacks


def test_a_salted_prompt_does_not_hit_another_salt(mla_engine: EngineProcess) -> None:
    prompt = make_prompt(900)
    mla_engine.generate_cold([prompt], cache_salt="a")
    assert mla_engine.generate_cold([prompt], cache_salt="a").cached[0] >= 256
    assert mla_engine.generate_cold([prompt], cache_salt="b").cached == [0]
    assert mla_engine.generate_cold([prompt]).cached == [0]


def test_a_cache_reset_with_connector_forgets_what_was_stored(mla_engine: EngineProcess) -> None:
    prompt = make_prompt(901)
    mla_engine.generate_cold([prompt])
    assert mla_engine.generate_cold([prompt]).cached[0] >= 256
    mla_engine.reset_prefix_cache(connector=True)
    assert mla_engine.generate([prompt]).cached == [0]
    assert mla_engine.generate_cold([prompt]).cached[0] >= 256


def test_a_stopped_daemon_delays_no_request_and_is_used_again_when_it_goes_on(
    mla_engine: EngineProcess, pool: DaemonProcess
) -> None:
    prompt = make_prompt(910)
    mla_engine.generate_cold([prompt])
    warm = mla_engine.generate_cold([prompt])
    usual = mla_engine.generate_cold([make_prompt(911)]).seconds
    assert pool.process is not None
    pool.process.send_signal(signal.SIGSTOP)
    try:
        stopped = [mla_engine.generate_cold([make_prompt(9120 + index)]) for index in range(5)]
    finally:
        pool.process.send_signal(signal.SIGCONT)
    assert all(one.cached == [0] for one in stopped)
    # The first waits two deadlines of 0.25 s, the others for nothing.
    assert max(one.seconds for one in stopped) < usual + 2.0
    assert statistics.median(one.seconds for one in stopped) < usual + 1.0
    assert eventually(lambda: mla_engine.generate_cold([prompt]).cached[0] >= 256)
    assert mla_engine.generate_cold([prompt]).tokens == warm.tokens


def test_a_killed_daemon_is_used_again_after_its_return_with_what_was_stored_before(
    mla_engine: EngineProcess, pool: DaemonProcess
) -> None:
    prompt, other = make_prompt(920), make_prompt(921)
    mla_engine.generate_cold([prompt])
    warm = mla_engine.generate_cold([prompt])
    assert wait_for_slots(pool, "leased", 0)
    pool.kill()
    without = mla_engine.generate_cold([prompt])
    assert without.cached == [0]
    pool.start()
    assert eventually(lambda: mla_engine.generate_cold([prompt]).cached[0] >= 256)
    assert mla_engine.generate_cold([prompt]).tokens == warm.tokens
    mla_engine.generate_cold([other])
    assert eventually(lambda: mla_engine.generate_cold([other]).cached[0] >= 256)


def test_another_engine_is_warm_from_its_first_request_with_equal_outputs(
    mla_engine: EngineProcess, pool: DaemonProcess, tmp_path: Path
) -> None:
    """The last one: it ends the engine that the others used, as there is one vLLM at a time on this machine."""
    prompt = make_prompt(7000)
    mla_engine.generate_cold([prompt])
    warm = mla_engine.generate_cold([prompt])
    assert warm.cached[0] >= 256
    mla_engine.close()
    before = pool.metrics()["kvoffload_cross_engine_hits_total"]
    with EngineProcess(
        tmp_path, model="tiny-deepseek", socket=pool.attach("pod-second"), environment=CHECKSUMS
    ) as second:
        first = second.generate([prompt])
    assert first.cached[0] >= 256
    assert (first.tokens, first.logprobs) == (warm.tokens, warm.logprobs)
    assert pool.metrics()["kvoffload_cross_engine_hits_total"] - before >= 16
