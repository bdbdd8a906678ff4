"""A real vLLM with grouped-query attention on two ranks: a part for each rank, and token for token what it gives
without.

vLLM's own prefix cache is on here: it is reset before a prompt is asked again, or no look-up would reach us.
"""

import pytest
from engine_process import EngineProcess, make_prompt

pytestmark = pytest.mark.engine


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
