"""A real vLLM configuration and real KV cache tensors on the CPU, for checks of the connector without a model.

Only a `config.json` is written; no weights are made or read. No pytest here: it runs under the Python of a vLLM
environment.
"""

import functools
import inspect
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

NUM_BLOCKS, TOKENS = 8, 16
HEADS, HEAD_DIM = 2, 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@functools.cache
def model_config() -> ModelConfig:
    """Of two layers; vLLM takes some seconds for it."""
    folder = Path(tempfile.mkdtemp(prefix="kvoffload-bare-"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")


def engine_config(socket_path: str, *, ranks: int = 2, rank: int = 0) -> VllmConfig:
    """What vLLM gives a connector, with the transfer configuration that our plugin sets; one engine id a call."""
    parallel = ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else None)
    parallel.rank = rank
    return VllmConfig(
        model_config=model_config(),
        cache_config=CacheConfig(block_size=TOKENS),
        device_config=DeviceConfig("cpu"),
        parallel_config=parallel,
        scheduler_config=SchedulerConfig(max_model_len=512, max_num_batched_tokens=512, is_encoder_decoder=False),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVOffloadConnector",
            kv_connector_module_path="kvoffload_engine.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=f"bare-{os.getpid()}-{time.monotonic_ns()}",
            kv_connector_extra_config={
                "spec_name": "KVOffloadSpec",
                "spec_module_path": "kvoffload_engine.spec",
                "kvoffload_socket": socket_path,
                "blocks_per_chunk": 1,
            },
        ),
    )


def full_attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.float32)


def cache_config(specs: Sequence[KVCacheSpec]) -> KVCacheConfig:
    """One group for each spec, of one layer each; the first group has two."""
    groups = []
    for number, spec in enumerate(specs):
        layers = [f"model.layers.{number}.attn", *(["model.layers.9.attn"] if number == 0 else [])]
        groups.append(KVCacheGroupSpec(layers, spec))
    tensors = []
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:  # of 0.28, which finds the layers by it
        tensors = [
            KVCacheTensor(size=NUM_BLOCKS * group.kv_cache_spec.page_size_bytes, shared_by=[name])
            for group in groups
            for name in group.layer_names
        ]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


def cache_tensors(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """A tensor for each layer, in blocks of its own page size."""
    return {
        name: torch.zeros((NUM_BLOCKS, group.kv_cache_spec.page_size_bytes // 4), dtype=torch.float32)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }
