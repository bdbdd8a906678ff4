"""Every supported version of vLLM: the checks without a model on each, the oldest with a whole engine."""

import contextlib
import re
from pathlib import Path

import pytest
from engine_process import EngineProcess, eventually, make_prompt
from overlays import IMPORTABLE, RUNNABLE, ensure_overlay
from region_daemon import RegionDaemon
from test_no_model import run_with_daemon, run_with_faults, run_with_region
from test_two_groups import TWO_GROUPS

from daemon_process import DaemonProcess
from hack.vllm.environment import ensure_vllm_environment
from kvoffload_engine.compat import NEWEST, OLDEST, parse_minor

pytestmark = pytest.mark.engine


def failures(version: str, folder: Path, *, with_faults: bool) -> dict[str, str]:
    python = ensure_vllm_environment() / "bin" / "python"
    overlay = ensure_overlay(version)
    results = run_with_daemon(python, folder / "daemon", overlay)
    if with_faults:
        results |= run_with_faults(python, folder / "faults", overlay)
        results |= run_with_region(python, folder / "region", overlay)
    assert len(results) >= 8
    return {name: result for name, result in results.items() if result != "ok"}


def import_errors(engine: EngineProcess) -> set[str]:
    return set(re.findall(r"ImportError: .*", engine.log))


def start_or_skip(engine: EngineProcess, stack: contextlib.ExitStack, without: EngineProcess) -> None:
    """Start the engine. Where it cannot, and an engine without offload dies of the same ImportError of vLLM's own,
    there is nothing of ours to test."""
    try:
        stack.enter_context(engine)
    except AssertionError:
        with contextlib.suppress(AssertionError), without:
            pass
        errors = import_errors(engine)
        if not errors or import_errors(without) != errors:
            raise
        pytest.skip(f"this vLLM starts the model neither with offload nor without: {', '.join(sorted(errors))}")


def test_the_versions_tested_are_the_versions_supported() -> None:
    tested = [parse_minor(version) for version in (*RUNNABLE, "0.32.0", *IMPORTABLE)]
    assert tested == [(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]


def test_the_oldest_vllm_stores_and_loads_without_a_model(tmp_path: Path) -> None:
    assert failures(RUNNABLE[0], tmp_path, with_faults=False) == {}


@pytest.mark.long
@pytest.mark.parametrize("version", RUNNABLE + IMPORTABLE)
def test_every_version_passes_every_check_without_a_model(version: str, tmp_path: Path) -> None:
    assert failures(version, tmp_path, with_faults=True) == {}


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
@pytest.mark.parametrize("version", RUNNABLE)
def test_a_whole_engine_of_an_older_version_loads_what_it_stored(
    version: str, model: str, pool: DaemonProcess, tmp_path: Path
) -> None:
    uid = f"pod-{version}-{model}".replace(".", "-")  # a pod's, which has no dots
    overlay = ensure_overlay(version)
    engine = EngineProcess(tmp_path / "with", model=model, socket=pool.attach(uid), overlay=overlay)
    without = EngineProcess(tmp_path / "without", model=model, socket=None, overlay=overlay)
    with contextlib.ExitStack() as stack:
        start_or_skip(engine, stack, without)
        prompt = make_prompt(1)
        cold = engine.generate_cold([prompt])
        warm = engine.generate_cold([prompt])
        again = engine.generate_cold([prompt])
        engine.rpc("probe_fault", "fail", [1])
        failed = engine.generate_cold([prompt])
        engine.rpc("probe_fault", "zeros")
        other = make_prompt(2)
        engine.generate_cold([other])
        control, computed = engine.generate_cold([other]), engine.generate_cold([other], cache_salt="cold")
    assert warm.cached[0] >= 256
    assert (warm.tokens, warm.logprobs) == (again.tokens, again.logprobs)
    if model == "tiny-llama":
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    assert failed.tokens == cold.tokens
    assert control.tokens != computed.tokens


@pytest.mark.long
def test_ranks_that_hold_the_same_head_keep_one_copy(pool: DaemonProcess, tmp_path: Path) -> None:
    """One KV head on two ranks; the weights do not matter for where bytes go."""
    with EngineProcess(
        tmp_path,
        model="tiny-llama",
        socket=pool.attach("pod-heads"),
        load_format="dummy",
        hf_overrides={"num_key_value_heads": 1},
    ) as engine:
        engine.rpc("probe_take")
        engine.generate_cold([make_prompt(1)])
        assert engine.generate_cold([make_prompt(1)]).cached[0] >= 256
        records = engine.rpc("probe_take")
        assert engine.lines("shared-heads (SharedHeads)")
    written = [offset for one in records for offset, _, _ in one["stored"]]
    assert len(written) == len(set(written)) > 0
    stored = {offset: digest for one in records for offset, _, digest in one["stored"]}
    for one in records:
        assert {offset: digest for offset, _, digest in one["loaded"]}.items() <= stored.items()


@pytest.mark.long
def test_two_groups_are_declined_where_a_failed_load_would_end_the_engine(tmp_path: Path) -> None:
    prompt = make_prompt(8150)
    with (
        RegionDaemon(tmp_path / "daemon", capacity_bytes=16 << 20) as daemon,
        EngineProcess(
            tmp_path / "engine",
            model="tiny-llama",
            socket=daemon.attach("pod-old"),
            overlay=ensure_overlay("0.29.0"),
            probe=False,
            **TWO_GROUPS,
        ) as engine,
    ):
        first, again = engine.generate_cold([prompt]), engine.generate_cold([prompt])
        assert again.cached == [0]
        assert again.tokens == first.tokens
        message = "SeveralGroups: the model has 2 KV cache groups, needed 1: a failed load would end the engine"
        assert engine.lines(message)
        assert eventually(lambda: [one["reason"] for one in daemon.engines()] == ["SeveralGroups"], 60)
        assert daemon.engines()[0]["message"].startswith(message)
