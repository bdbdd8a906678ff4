"""Greedy requests with shared prefixes, a pool that evicts all the time, preemption forced: token for token as without.

The short form runs in `make test-engine`; the form of 200 requests, again with every page checked by its checksum, in
`make test-long`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import EngineProcess, make_prompt
from pool_daemon import PoolDaemon

pytestmark = [pytest.mark.engine, pytest.mark.alone]
POOL_BYTES = 8 << 20
BLOCK_TOKENS = 32
CHUNK_BYTES = 65536
NUM_PREFIXES = 8
"""Eight prefixes of 8 chunks stay warm in a pool of 128; the 3 chunks that each request has of its own push each other
out."""
OPTIONS = {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 40, "max_num_seqs": 6}
"""40 blocks hold three of these requests, six run at once: the scheduler has to preempt."""


def soak_prompts(num_requests: int) -> list[list[int]]:
    prefixes = [make_prompt(100 + index, 256) for index in range(NUM_PREFIXES)]
    return [prefixes[index % NUM_PREFIXES] + make_prompt(1000 + index, 100) for index in range(num_requests)]


def run_soak(engine: EngineProcess, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, in batches with an empty prefix cache before each; and how many tokens were loaded."""
    tokens: list[list[int]] = []
    loaded = 0
    for begin in range(0, len(prompts), 20):
        got = engine.generate_cold(prompts[begin : begin + 20], max_tokens=64)
        tokens += got.tokens
        loaded += sum(got.cached)
    return tokens, loaded


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolDaemon]:
    with PoolDaemon(tmp_path_factory.mktemp("small-pool"), capacity_bytes=POOL_BYTES) as daemon:
        yield daemon


def check_soak(pool: PoolDaemon, folder: Path, num_requests: int, environment: dict[str, str]) -> None:
    prompts = soak_prompts(num_requests)
    with EngineProcess(folder / "without", model="tiny-llama", socket=None, **OPTIONS) as engine:
        expected, _ = run_soak(engine, prompts)
    with EngineProcess(
        folder / "with", model="tiny-llama", socket=pool.attach("pod-soak"), environment=environment, **OPTIONS
    ) as engine:
        tokens, loaded = run_soak(engine, prompts)
        preempted = engine.do("metrics")["vllm:num_preemptions"]
    assert tokens == expected
    assert loaded >= 0.3 * sum(len(prompt) for prompt in prompts)
    metrics = pool.metrics()
    evicted_bytes = sum(value for name, value in metrics.items() if name.startswith("kvoffload_evicted_bytes_total"))
    assert preempted >= num_requests / 20
    assert evicted_bytes >= num_requests / 2 * CHUNK_BYTES
    missed, steps = metrics["kvoffload_missed_deadlines_total"], metrics["kvoffload_scheduler_steps_total"]
    assert steps >= num_requests
    assert missed <= steps / 1000, "more than 0.1 % of the steps missed their deadline"


def test_sixty_requests_give_the_tokens_of_an_engine_without_offload(small_pool: PoolDaemon, tmp_path: Path) -> None:
    check_soak(small_pool, tmp_path, 60, {})


@pytest.mark.long
@pytest.mark.parametrize("checksum", ["off", "full"])
def test_two_hundred_requests_give_the_tokens_of_an_engine_without_offload(
    small_pool: PoolDaemon, tmp_path: Path, checksum: str
) -> None:
    check_soak(small_pool, tmp_path, 200, {"KVOFFLOAD_CHECKSUM": checksum})
