"""A real vLLM with grouped-query attention on two ranks: a part for each rank, and token for token what it gives
without.

vLLM's own prefix cache is on here: it is reset before a prompt is asked again, or no look-up would reach us.
"""

import pytest
from engine_process import EngineProcess, make_prompt, wait_for_slots

from daemon_process import DaemonProcess

pytestmark = [pytest.mark.engine, pytest.mark.alone]


def test_each_rank_has_a_part_of_its_own_and_loads_what_it_stored(gqa_engine: EngineProcess) -> None:
    gqa_engine.rpc("probe_take")
    gqa_engine.generate_cold([make_prompt(1)])
    assert gqa_engine.lines("offload is on: a part for each rank")
    again = gqa_engine.generate_cold([make_prompt(1)])
    assert again.cached[0] >= 256
    records = gqa_engine.rpc("probe_take")
    stored = [{offset: digest for offset, _, digest in one["stored"]} for one in records]
    loaded = [{offset: digest for offset, _, digest in one["loaded"]} for one in records]
    assert not stored[0].keys() & stored[1].keys()
    for mine, back in zip(stored, loaded, strict=True):
        assert back
        assert back.items() <= mine.items()


def test_loaded_tokens_are_those_of_a_cold_run_and_depend_on_the_loaded_bytes(gqa_engine: EngineProcess) -> None:
    prompts = [make_prompt(10 + index) for index in range(3)]
    cold = gqa_engine.generate_cold(prompts)
    warm = gqa_engine.generate_cold(prompts)
    assert sum(warm.cached) >= 3 * 256
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    gqa_engine.rpc("probe_fault", "zeros")
    try:
        control = gqa_engine.generate_cold(prompts)
    finally:
        gqa_engine.rpc("probe_fault", "")
    assert all(one != other for one, other in zip(control.tokens, cold.tokens, strict=True))


def test_a_failed_load_gives_the_tokens_of_a_cold_run(gqa_engine: EngineProcess) -> None:
    prompt = make_prompt(20)
    cold = gqa_engine.generate_cold([prompt])
    gqa_engine.rpc("probe_fault", "fail", [1])
    try:
        recomputed = gqa_engine.generate_cold([prompt])
    finally:
        gqa_engine.rpc("probe_fault", "")
    assert (recomputed.tokens, recomputed.logprobs) == (cold.tokens, cold.logprobs)


def test_a_cache_reset_in_the_middle_of_transfers_leaves_no_key_no_lease_and_the_right_tokens(
    gqa_engine: EngineProcess, pool: DaemonProcess
) -> None:
    before, loading, storing = (make_prompt(seed) for seed in (30, 31, 32))
    cold = gqa_engine.generate_cold([before, loading])
    expected = [cold.tokens[1], *gqa_engine.generate_cold([storing], cache_salt="apart").tokens]
    names = gqa_engine.hold_transfers([loading, storing])
    try:
        gqa_engine.do("reset_prefix_cache", connector=True)
    finally:
        gqa_engine.rpc("probe_fault", "")
    assert gqa_engine.do("finish", names=names) == expected
    after = gqa_engine.generate_cold([before])
    assert after.cached == [0]
    assert after.tokens == cold.tokens[:1]
    assert wait_for_slots(pool, "leased", 0)
    assert gqa_engine.generate_cold([before]).cached[0] >= 256


def test_an_engine_put_to_sleep_in_the_middle_of_transfers_wakes_without_their_keys_and_leases(
    gqa_engine: EngineProcess, pool: DaemonProcess
) -> None:
    """The CPU worker has no memory to give back in its sleep; all that the engine core does around it is done."""
    before, loading, storing = (make_prompt(seed) for seed in (40, 41, 42))
    cold = gqa_engine.generate_cold([before, loading])
    names = gqa_engine.hold_transfers([loading, storing])
    try:
        assert gqa_engine.do("sleep_during_transfers")
    finally:
        gqa_engine.rpc("probe_fault", "")
    gqa_engine.do("finish", names=[])
    assert len(names) == 2
    after = gqa_engine.generate_cold([before, loading])
    assert after.cached == [0, 0]
    assert after.tokens == cold.tokens
    assert wait_for_slots(pool, "leased", 0)
    assert sum(gqa_engine.generate_cold([before, loading]).cached) >= 2 * 256


def test_weights_updated_in_the_middle_of_transfers_are_never_mixed_with_what_they_moved(
    gqa_engine: EngineProcess, pool: DaemonProcess
) -> None:
    """The last one here: from then on this engine shares with nobody."""
    before, loading, storing = (make_prompt(seed) for seed in (50, 51, 52))
    gqa_engine.generate_cold([before, loading])
    names = gqa_engine.hold_transfers([loading, storing])
    try:
        gqa_engine.rpc("probe_update_weights", 1.25)
    finally:
        gqa_engine.rpc("probe_fault", "")
    gqa_engine.do("finish", names=names)
    prompts = [before, loading, storing]
    expected = gqa_engine.generate_cold(prompts, cache_salt="apart-again")
    assert expected.cached == [0, 0, 0]
    for minimum in (0, 256):
        got = gqa_engine.generate_cold(prompts)
        assert min(got.cached) >= minimum
        assert minimum or got.cached == [0, 0, 0]
        assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)
    gqa_engine.rpc("probe_update_weights", 0.8)
    assert gqa_engine.generate_cold([before]).cached == [0]
    assert wait_for_slots(pool, "leased", 0)
