"""A second engine, started after the first has ended: warm from its first request, with the first one's bytes."""

import pytest
from engine_process import EngineProcess, make_prompt
from pool_daemon import PoolDaemon

pytestmark = pytest.mark.engine
SHARED_PROMPT = make_prompt(7000)
CHECKSUMS = {"KVOFFLOAD_CHECKSUM": "full"}  # as `mla_engine` has it: whoever checks pages has other slots


@pytest.fixture(scope="module")
def warm_of_first_engine(
    pool: PoolDaemon, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[int]], list[list[float]]]:
    """What an engine of another pod answers from what it stored itself; that engine has ended when this returns."""
    with EngineProcess(
        tmp_path_factory.mktemp("first"),
        model="tiny-deepseek",
        socket=pool.attach("pod-first"),
        environment=CHECKSUMS,
    ) as engine:
        engine.generate_cold([SHARED_PROMPT])
        warm = engine.generate_cold([SHARED_PROMPT])
        assert warm.cached[0] >= 256
    return warm.tokens, warm.logprobs


def test_the_first_request_of_another_engine_is_warm_with_equal_outputs(
    warm_of_first_engine: tuple[list[list[int]], list[list[float]]], mla_engine: EngineProcess, pool: PoolDaemon
) -> None:
    first = mla_engine.generate([SHARED_PROMPT])
    assert first.cached[0] >= 256
    assert (first.tokens, first.logprobs) == warm_of_first_engine
    assert pool.metrics()["kvoffload_cross_engine_hits_total"] >= 16
