"""What `kvoffload_engine.compat` reads from this vLLM. Run by `check_runner.py`; needs no daemon."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from check_runner import check, run_checks
from vllm import envs
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload import base

from kvoffload_engine import compat
from kvoffload_engine.connector import KVOffloadConnector
from kvoffload_engine.facts import observe_layers, spec_values
from kvoffload_engine.manager import KVOffloadManager
from kvoffload_engine.spec import KVOffloadSpec
from kvoffload_engine.worker import KVOffloadWorker

NOT_IN_EVERY_VERSION = {
    "OffloadingConnector.register_cross_layers_kv_cache",  # 0.28
    "OffloadingConnector.get_transfer_results",  # 0.30 and newer
    "OffloadingConnector.get_external_cache_hit_sources",  # 0.32 and newer
}
CHOICE = ("LBNHC", "LBHNC")
MLA: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def is_since(minor: int) -> bool:
    return compat.require_supported_version(compat.installed_version()) >= (0, minor)


@check
def what_we_override_is_required(socket_path: str) -> None:
    required = {path for paths in compat.REQUIRED.values() for path in paths}
    pairs = [
        (KVOffloadManager, base.OffloadingManager),
        (KVOffloadWorker, base.OffloadingWorker),
        (KVOffloadSpec, base.OffloadingSpec),
        (KVOffloadConnector, OffloadingConnector),
    ]
    for ours, theirs in pairs:
        overridden = {name for name in vars(ours) if not name.startswith("_") and hasattr(theirs, name)}
        missing = {f"{theirs.__name__}.{name}" for name in overridden} - required - NOT_IN_EVERY_VERSION
        assert not missing, missing


@check
def the_batched_copy_is_there_and_takes_what_we_pass(socket_path: str) -> None:
    from vllm import _custom_ops

    names = ["source", "target", "sizes"]
    inspect.signature(_custom_ops.swap_blocks_batch).bind(*names, is_src_access_order_any=True)


@check
def another_layout_of_attention_pages_is_another_word(socket_path: str) -> None:
    words = set()
    for name in ("NHD", "HND"):
        config = SimpleNamespace(cache_config=CacheConfig())
        if is_since(29):
            utils.record_kv_cache_layout(config.cache_config, name)
        else:
            utils.set_kv_cache_layout(name)
        words.add(compat.kv_cache_layout(config))
    assert len(words) == 2
    assert not words & {"None", ""}, words


@check
def a_layout_that_nobody_chose_has_a_word_too(socket_path: str) -> None:
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    if is_since(29):
        utils.resolve_kv_cache_layout(config, [list(CHOICE)])
    else:
        utils.set_kv_cache_layout(None)
    assert compat.kv_cache_layout(config) not in {"None", ""}


@check
def the_other_layouts_of_a_page_are_read(socket_path: str) -> None:
    config = SimpleNamespace(cache_config=CacheConfig())
    if is_since(29):
        utils.record_kv_cache_layout(config.cache_config, "NHD")
    else:
        utils.set_kv_cache_layout("NHD")
    layouts = compat.page_layouts(config)
    assert layouts["convolution"] in {"SD", "DS"}
    assert layouts["shuffled"] == str(envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT) == "False"
    assert layouts["device"].startswith(current_platform.device_type)


@check
def a_compressed_state_says_how_many_tokens_it_holds(socket_path: str) -> None:
    name = "tokens_per_state" if is_since(29) else "compress_ratio"
    assert compat.tokens_per_state(MLAAttentionSpec(**MLA)) == 1
    assert compat.tokens_per_state(MLAAttentionSpec(**MLA, **{name: 4})) == 4
    assert compat.tokens_per_state(FullAttentionSpec(**MLA)) == 1
    spec = MLAAttentionSpec(**MLA, **{name: 4})
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["one"], kv_cache_spec=spec)])
    caches: Any = SimpleNamespace(group_data_refs=[[SimpleNamespace(mapping=None)]])
    (layer,) = observe_layers(groups.kv_cache_groups, caches, {"one": spec})
    assert layer.tokens_per_state == 4


@check
def the_tokens_of_a_hash_are_the_workers_or_the_users(socket_path: str) -> None:
    config = CacheConfig(prefix_match_unit=32)
    assert compat.tokens_per_hash(CacheConfig()) == 0
    if is_since(32):
        config.hash_block_size = 64
    assert compat.tokens_per_hash(config) == (64 if is_since(32) else 32)


@check
def a_spec_is_described_in_words_that_hold_no_address(socket_path: str) -> None:
    values = spec_values(MLAAttentionSpec(**MLA))
    assert values["dtype"] == "torch.bfloat16"
    assert values["block_size"] == "16"
    assert not any(" at 0x" in value or "object" in value for value in values.values()), values
    assert values == spec_values(MLAAttentionSpec(**MLA))


@check
def what_we_read_as_a_plain_attribute_is_there(socket_path: str) -> None:
    for kind, names in PLAIN.items():
        missing = {name for name in names.split() if name not in kind.__dataclass_fields__ and not hasattr(kind, name)}
        assert not missing, (kind, missing)
    assert "self.original_max_model_len = " in inspect.getsource(ModelConfig)


PLAIN = {
    VllmConfig: "use_v2_model_runner attention_config load_config speculative_config",
    AttentionConfig: "indexer_kv_dtype use_non_causal",
    CacheConfig: "cache_dtype enable_prefix_caching kv_offloading_size prefix_caching_hash_algo prefix_match_unit"
    " use_replayssm",
    LoadConfig: "load_format model_loader_extra_config ignore_patterns",
    ModelConfig: "model model_weights revision code_revision hf_config_path model_impl model_class_overrides dtype"
    " quantization quantization_config hf_overrides max_model_len generation_config override_generation_config"
    " enable_cumem_allocator multimodal_config",
    MultiModalConfig: "enable_mm_embeds allow_missing_mm_embeddings",
    ParallelConfig: "nnodes_within_dp prefill_context_parallel_size decode_context_parallel_size"
    " dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
    SpeculativeConfig: "method num_speculative_tokens draft_model_config draft_load_config",
}


if __name__ == "__main__":
    run_checks(with_control=False)
