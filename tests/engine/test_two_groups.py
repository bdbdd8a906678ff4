"""A real engine whose layers are in two KV cache groups: what it loads, and a load that fails. One engine for all tests
here, which takes half a minute to start: `make test-long`.
"""

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, make_prompt

from daemon_process import DaemonProcess

pytestmark = [pytest.mark.engine, pytest.mark.long]
TWO_GROUPS = {
    "disable_hybrid_kv_cache_manager": False,
    "block_size": 32,
    "hf_overrides": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
}
"""Full attention in one layer, and a sliding window, which keeps the last blocks only, in the other."""


@pytest.fixture(scope="module")
def two_groups(pool: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("groups")
    with EngineProcess(folder, model="tiny-llama", socket=pool.attach("pod-groups"), **TWO_GROUPS) as engine:
        yield engine


def test_two_groups_of_layers_are_loaded_with_the_tokens_of_a_cold_run(two_groups: EngineProcess) -> None:
    engine = two_groups
    prompts = [make_prompt(8100 + index, 300 + 40 * index) for index in range(3)]
    engine.rpc("probe_take")
    cold = engine.generate_cold(prompts)
    warm = engine.generate_cold(prompts)
    records = engine.rpc("probe_take")
    engine.rpc("probe_fault", "zeros")
    control = engine.generate_cold(prompts)
    engine.rpc("probe_fault", "")
    assert min(warm.cached) >= 256
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    assert all(one != other for one, other in zip(control.tokens, cold.tokens, strict=True))
    num_blocks = sum(warm.cached) // 32
    for one in records:
        stored = {offset: digest for offset, _, digest in one["stored"]}
        loaded = {offset: digest for offset, _, digest in one["loaded"]}
        assert loaded.items() <= stored.items()
        assert num_blocks < len(loaded) < 2 * num_blocks, "all blocks of the one layer, the last ones of the other"


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one rank", "all ranks"])
def test_a_failed_load_of_two_groups_is_recomputed_with_the_tokens_of_a_cold_run(
    two_groups: EngineProcess, ranks: list[int]
) -> None:
    engine = two_groups
    prompts = [make_prompt(8110 + 10 * len(ranks) + index, 300 + 40 * index) for index in range(3)]
    cold = engine.generate_cold(prompts)
    failures = len(engine.lines("a load failed and is recomputed"))
    engine.rpc("probe_fault", "fail", ranks)
    failed = engine.generate_cold(prompts)
    engine.rpc("probe_fault", "")
    assert (failed.tokens, failed.logprobs) == (cold.tokens, cold.logprobs)
    assert len(engine.lines("a load failed and is recomputed")) == failures + len(ranks) * len(prompts)
    other = [make_prompt(8180 + len(ranks))]
    stored, loaded = engine.generate_cold(other), engine.generate_cold(other)
    assert loaded.cached[0] >= 256, "the engine goes on to store and to load"
    assert (loaded.tokens, loaded.logprobs) == (stored.tokens, stored.logprobs)
