"""A real engine on the GPU, under load and preemption: every page that was loaded has the digest of the one stored.

Blocks and the pool's chunks are taken away all the time, as in `test_soak`. Tokens are not compared with those of an
engine without offload: in half precision they depend on how requests are batched.
"""

from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from test_soak import OPTIONS, run_soak, soak_prompts

from daemon_process import DaemonProcess

POOL_BYTES = 4 << 20
NUM_REQUESTS = 60
WITHOUT_COMPILER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""FlashInfer would compile kernels with nvcc, which need not be there; Triton needs no more than gcc."""


def wrong_pages(pages: list[list[Any]]) -> list[list[Any]]:
    """Stores whose bytes did not arrive, and loads that are not what was stored there last."""
    stored: dict[int, str] = {}
    wrong = []
    for is_store, offset, in_cache, in_region in pages:
        expected = in_region if is_store else stored.get(offset)
        if in_cache != expected:
            wrong.append([is_store, offset, in_cache, in_region])
        if is_store:
            stored[offset] = in_region
    return wrong


def run_engine(folder: Path, python: Path, **options: Any) -> dict[str, Any]:
    """Figures of one run, with the pages that were wrong, and those of a control whose loads find zeros."""
    with DaemonProcess(folder / "pool", capacity_bytes=POOL_BYTES) as pool, EngineProcess(
        folder / "engine",
        model="tiny-llama",
        socket=pool.attach("pod-gpu"),
        python=python,
        modules=Path(__file__).parent,
        environment=WITHOUT_COMPILER,
        **{
            **OPTIONS,
            "tensor_parallel_size": 1,
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.3,
            "attention_backend": "FLASH_ATTN",
            "worker_extension_cls": "gpu_probe.GpuProbe",
            **options,
        },
    ) as engine:  # fmt: skip
        prompts = soak_prompts(NUM_REQUESTS)
        _, loaded = run_soak(engine, prompts)
        preempted = engine.do("metrics")["vllm:num_preemptions"]
        (taken,) = engine.rpc("probe_take")
        metrics = pool.metrics()
        last = [prompts[-1]]
        before = engine.generate_cold(last).tokens
        pages_before = taken["pages"] + engine.rpc("probe_take")[0]["pages"]
        engine.rpc("probe_zeros")
        control = engine.generate_cold(last)
        (zeros,) = engine.rpc("probe_take")
    pages = taken["pages"]
    return {
        "stored_pages": sum(is_store for is_store, *_ in pages),
        "loaded_pages": sum(not is_store for is_store, *_ in pages),
        "wrong_pages": wrong_pages(pages)[:5],
        "loaded_tokens": loaded,
        "prompt_tokens": sum(len(prompt) for prompt in prompts),
        "preemptions": preempted,
        "evicted_bytes": sum(
            value for name, value in metrics.items() if name.startswith("kvoffload_evicted_bytes_total")
        ),
        "registered_extents": taken["registered"],
        "registration_refused": taken["refused"],
        "control_cached_tokens": control.cached[0],
        "control_wrong_pages": len(wrong_pages(pages_before + zeros["pages"])) - len(wrong_pages(pages_before)),
        "control_tokens_differ": control.tokens != before,
    }
