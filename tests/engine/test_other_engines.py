"""Real engines of kinds that the other tests do not have: one rank, chunks of several blocks, adapters, pictures,
workers that cannot offload.

Each starts an engine of its own, which takes half a minute: `make test-long`.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from engine_process import CHECKSUMS, EngineProcess, eventually, make_prompt, wait_for_slots
from region_daemon import RegionDaemon

from daemon_process import DaemonProcess
from hack.vllm.environment import ensure_torchvision

pytestmark = [pytest.mark.engine, pytest.mark.long]
HIDDEN, LAYERS, RANK = 256, 2, 4
IMAGE_TOKEN = 1000


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA for the tiny Llama, on the output projections, large enough to change what it says."""
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{side}.weight": numbers.normal(0, 0.5, shape)
        for layer in range(LAYERS)
        for side, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK)))
    }
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    configuration = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    return folder


def test_requests_with_an_adapter_share_with_those_of_the_same_adapter_only(
    pool: DaemonProcess, tmp_path: Path
) -> None:
    adapters = [
        ["one", 1, str(write_adapter(tmp_path / "one", 1))],
        ["two", 2, str(write_adapter(tmp_path / "two", 2))],
    ]
    prompt = make_prompt(8000)
    with EngineProcess(
        tmp_path / "engine",
        model="tiny-llama",
        socket=pool.attach("pod-adapters"),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    ) as engine:
        base = engine.generate_cold([prompt])
        cold = [engine.generate_cold([prompt], adapter=adapter) for adapter in adapters]
        assert [one.cached for one in (base, *cold)] == [[0]] * 3
        assert len({str(one.tokens) for one in (base, *cold)}) == 3
        warm = [engine.generate_cold([prompt], adapter=adapter) for adapter in adapters]
        assert all(one.cached[0] >= 256 for one in warm)
        assert [(one.tokens, one.logprobs) for one in warm] == [(one.tokens, one.logprobs) for one in cold]
        again = engine.generate_cold([prompt])
        assert again.cached[0] >= 256
        assert (again.tokens, again.logprobs) == (base.tokens, base.logprobs)
    assert wait_for_slots(pool, "leased", 0)


def test_an_engine_whose_workers_cannot_offload_serves_as_a_plain_one_and_the_status_says_why(tmp_path: Path) -> None:
    prompts = [make_prompt(8160), make_prompt(8161)]
    with (
        RegionDaemon(tmp_path / "daemon", capacity_bytes=16 << 20) as daemon,
        EngineProcess(
            tmp_path / "engine",
            model="tiny-llama",
            socket=daemon.attach("pod-failing"),
            probe=False,
            worker_extension_cls="failing_worker.Extension",
        ) as engine,
    ):
        first = engine.generate_cold(prompts)
        engine.reset_prefix_cache(connector=True)
        again = engine.generate(prompts)
        assert eventually(lambda: len(daemon.engines()) == 1, 60)
        (told,) = daemon.engines()
        assert (told["confirmedLayout"], told["reason"]) == ("left-alone", "ConnectorFailed")
        assert "NotImplementedError in register_kv_caches, failing_worker.py" in told["message"]
        assert "(in 2 of 2 workers)" in told["message"]
        assert daemon.metrics()['kvoffload_engines{layout="left-alone"}'] == 1
        assert daemon.metrics()['kvoffload_engines{layout="pending"}'] == 0
    with EngineProcess(tmp_path / "plain", model="tiny-llama", socket=None) as engine:
        plain = engine.generate_cold(prompts)
    assert first.cached == again.cached == [0, 0]
    assert (first.tokens, first.logprobs) == (plain.tokens, plain.logprobs)
    assert (again.tokens, again.logprobs) == (plain.tokens, plain.logprobs)


def test_one_rank_with_latent_attention_loads_what_it_stored(pool: DaemonProcess, tmp_path: Path) -> None:
    prompt = make_prompt(8050)
    with EngineProcess(
        tmp_path,
        model="tiny-deepseek",
        socket=pool.attach("pod-alone"),
        environment=CHECKSUMS,
        tensor_parallel_size=1,
        distributed_executor_backend="uni",
    ) as engine:
        engine.generate_cold([prompt])
        warm = engine.generate_cold([prompt])
        again = engine.generate_cold([prompt])
        engine.rpc("probe_fault", "zeros")
        other = make_prompt(8051)
        engine.generate_cold([other])
        control, computed = engine.generate_cold([other]), engine.generate_cold([other], cache_salt="cold")
        assert engine.lines("per-rank (OneRank)")
    assert warm.cached[0] >= 256
    assert (warm.tokens, warm.logprobs) == (again.tokens, again.logprobs)
    assert control.tokens != computed.tokens


def test_chunks_of_three_blocks_are_loaded_from_the_middle_of_one(pool: DaemonProcess, tmp_path: Path) -> None:
    """300 tokens are nine blocks of 32 and three chunks; four blocks are in vLLM's own cache, five come from the
    pool."""
    prompt = make_prompt(8200)
    with EngineProcess(
        tmp_path,
        model="tiny-llama",
        socket=pool.attach("pod-chunks"),
        environment={"KVOFFLOAD_BLOCKS_PER_CHUNK": "3"},
        block_size=32,
    ) as engine:
        engine.rpc("probe_take")
        cold = engine.generate_cold([prompt])
        stored = [one["stored"] for one in engine.rpc("probe_take")]
        engine.generate_cold([prompt[:130]], max_tokens=1)
        engine.rpc("probe_take")
        warm = engine.generate([prompt])
        loaded = [one["loaded"] for one in engine.rpc("probe_take")]
    assert warm.cached == [288]
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    for of_rank, back in zip(stored, loaded, strict=True):
        assert len(back) * 9 == len(of_rank) * 5 > 0
        assert {(offset, digest) for offset, _, digest in back} <= {(offset, digest) for offset, _, digest in of_rank}


def test_pictures_are_loaded_by_their_own_engine_only_whatever_name_they_have(
    pool: DaemonProcess, tmp_path: Path
) -> None:
    """vLLM's keys hold the name that the caller gives a picture, and two pods may give one name to two pictures."""
    text = make_prompt(8300)
    prompt = [IMAGE_TOKEN, *text]
    pictures = [(1, "picture"), (2, "another")]

    def engine_of(pod: str) -> EngineProcess:
        return EngineProcess(
            tmp_path / pod,
            model="tiny-llava",
            socket=pool.attach(pod),
            overlay=ensure_torchvision(),
            skip_tokenizer_init=False,
            limit_mm_per_prompt={"image": 1},
            block_size=32,
        )

    with engine_of("pod-a") as engine:
        cold = [engine.generate_cold([prompt], picture=picture) for picture in pictures]
        assert [one.cached for one in cold] == [[0], [0]]
        assert cold[0].tokens != cold[1].tokens
        warm = [engine.generate_cold([prompt], picture=picture) for picture in pictures]
        assert min(one.cached[0] for one in warm) >= 288
        assert [(one.tokens, one.logprobs) for one in warm] == [(one.tokens, one.logprobs) for one in cold]
        without = engine.generate_cold([text])
    with engine_of("pod-b") as engine:
        other = engine.generate_cold([prompt], picture=(2, "picture"))
        assert (other.cached, other.tokens, other.logprobs) == ([0], cold[1].tokens, cold[1].logprobs)
        same = engine.generate_cold([text])
        assert same.cached[0] >= 256, "what has no picture is shared"
        assert (same.tokens, same.logprobs) == (without.tokens, without.logprobs)
