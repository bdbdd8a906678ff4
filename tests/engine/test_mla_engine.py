"""A real vLLM with latent attention on two ranks: one copy of each chunk, written half by each, read whole by
both."""

import pytest
from engine_process import EngineProcess, make_prompt

pytestmark = pytest.mark.engine


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
