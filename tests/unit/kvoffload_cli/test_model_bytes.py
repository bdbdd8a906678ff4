"""Bytes of a model's KV cache from its configuration. The same figures against vLLM's own classes: tests/engine."""

import pytest

from kvoffload.errors import InvalidSpec
from kvoffload.layout.model_bytes import AttentionKind, plan_kv_bytes, read_shape
from kvoffload_cli.models import packaged_models, read_config

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("model", "tp", "kv_dtype", "bytes_per_token"),
    [
        ("deepseek-ai/DeepSeek-V3", 8, "auto", 61 * 576 * 2),
        ("deepseek-ai/DeepSeek-V3", 1, "fp8", 61 * 576),
        ("deepseek-ai/DeepSeek-V3", 8, "fp8_ds_mla", 61 * 656),
        ("deepseek-ai/DeepSeek-V3.2", 8, "fp8", 61 * (656 + 132)),
        ("deepseek-ai/DeepSeek-V3.2", 8, "auto", 61 * (1152 + 132)),
        ("moonshotai/Kimi-K2-Instruct", 16, "auto", 70_272),
        ("meta-llama/Llama-3.1-70B-Instruct", 1, "auto", 80 * 2 * 8 * 128 * 2),
        ("meta-llama/Llama-3.1-70B-Instruct", 8, "auto", 80 * 2 * 1 * 128 * 2),
        ("meta-llama/Llama-3.1-70B-Instruct", 16, "auto", 80 * 2 * 1 * 128 * 2),
        ("Qwen/Qwen3-32B", 4, "float32", 64 * 2 * 2 * 128 * 4),
    ],
)
def test_bytes_per_token_of_published_models(model: str, tp: int, kv_dtype: str, bytes_per_token: int) -> None:
    shape = read_shape(read_config(model)[0])
    kv = plan_kv_bytes(shape, tensor_parallel=tp, block_tokens=64, kv_dtype=kv_dtype)
    assert kv.bytes_per_token == bytes_per_token
    assert kv.bytes_per_block == 64 * bytes_per_token


def test_stages_hold_the_larger_share_of_the_layers() -> None:
    shape = read_shape(read_config("deepseek-ai/DeepSeek-V3")[0])
    assert plan_kv_bytes(shape, tensor_parallel=1, pipeline_parallel=2).layers_per_stage == 31


def test_every_packaged_model_has_a_shape() -> None:
    assert packaged_models()
    for model in packaged_models():
        assert read_shape(read_config(model)[0]).num_layers > 0


def test_text_part_of_a_multimodal_configuration_counts() -> None:
    shape = read_shape({"model_type": "vlm", "architectures": ["X"], "text_config": TINY_LLAMA})
    assert (shape.model_type, shape.num_layers, shape.num_kv_heads) == ("llama", 2, 2)


def test_kv_heads_default_to_the_attention_heads() -> None:
    config = {key: value for key, value in TINY_LLAMA.items() if key != "num_key_value_heads"}
    assert read_shape(config).num_kv_heads == 4


def test_latent_rank_of_an_unknown_model_type_is_not_mla_and_is_said() -> None:
    shape = read_shape({**TINY_LLAMA, "kv_lora_rank": 512})
    assert shape.attention is AttentionKind.GROUPED_QUERY
    assert any("no MLA layout" in note for note in shape.notes)


def test_sliding_window_layers_are_said_to_be_an_upper_bound() -> None:
    bound = "; the figures count every layer as full attention and are an upper bound"
    some, all_or_some = "1 layers have a sliding window", "the configuration has a sliding window of 1024 tokens"
    of_gemma = {"sliding_window": 1024, "sliding_window_pattern": 2}
    for config, expected in (
        ({"layer_types": ["sliding_attention", "full_attention"]}, some),
        (of_gemma, some),
        ({"sliding_window": 1024}, f"{all_or_some}, and does not say for which layers"),
    ):
        assert read_shape({**TINY_LLAMA, **config}).notes == (expected + bound,)


def test_layers_that_keep_every_token_are_counted_under_any_of_their_names() -> None:
    for config in (
        {"layer_types": ["full_attention", "attention"]},
        {"layer_types": ["deepseek_sparse_attention", "indexed_attention"]},
        {"attn_type_list": [1, 1]},
    ):
        shape = read_shape({**TINY_LLAMA, **config})
        assert (shape.num_layers, shape.notes) == (2, ())


def test_no_window_is_seen_where_the_configuration_switches_it_off() -> None:
    for config in ({"sliding_window": None}, {"sliding_window": 0}, {"sliding_window": 9, "use_sliding_window": False}):
        assert read_shape({**TINY_LLAMA, **config}).notes == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**TINY_LLAMA, "linear_attn_config": {"head_dim": 128}}, "linear_attn_config"),
        (
            {**TINY_LLAMA, "layer_types": ["linear_attention", "linear_attention", "mamba", "full_attention"]},
            "`layer_types` with 3 of 4 layers linear_attention, mamba in the configuration",
        ),
        ({**TINY_LLAMA, "linear_num_value_heads": 32, "full_attention_interval": 4}, "linear_num_value_heads"),
        ({**TINY_LLAMA, "attn_type_list": [0, 1]}, "attn_type_list"),
        ({**TINY_LLAMA, "layer_types": ["compressed_sparse_attention", "full_attention"]}, "1 of 2 layers compressed"),
        ({"model_type": "clip"}, "num_hidden_layers"),
        ({"model_type": "x", "num_hidden_layers": 2}, "neither num_key_value_heads nor num_attention_heads"),
        (
            {"model_type": "x", "num_hidden_layers": 2, "num_key_value_heads": 2},
            "neither head_dim nor num_attention_heads",
        ),
        ({"model_type": "x", "num_hidden_layers": 2, "head_dim": 64}, "neither num_key_value_heads nor num_attention"),
        ({**TINY_LLAMA, "head_dim": None, "hidden_size": 3}, "hidden_size is less than its 4 attention heads"),
        ({**TINY_LLAMA, "layer_types": [{"full_attention": 1}, "full_attention"]}, "1 of 2 layers"),
    ],
)
def test_configuration_that_cannot_be_sized_is_refused_with_the_reason(config: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        read_shape(config)


TINY_MLA = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}
OF_LLAMA = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
OF_MLA = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
FIELDS = [(TINY_LLAMA, key) for key in OF_LLAMA] + [(TINY_MLA, key) for key in OF_MLA]


@pytest.mark.parametrize(("config", "key"), [*FIELDS, ({**TINY_LLAMA, "head_dim": None}, "hidden_size")])
@pytest.mark.parametrize("value", [0, -1, "64", 64.0, True, [64], 10**30])
@pytest.mark.parametrize("nested", [False, True])
def test_a_field_of_the_formula_that_is_no_dimension_is_refused_by_name(
    config: dict[str, object], key: str, value: object, nested: bool
) -> None:
    wrong = {**config, key: value}
    with pytest.raises(InvalidSpec, match=key if value != 10**30 else f"{key}|layers"):
        read_shape({"model_type": "vlm", "text_config": wrong} if nested else wrong)


@pytest.mark.parametrize("key", ["num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim"])
def test_a_field_of_the_formula_for_latents_is_not_guessed(key: str) -> None:
    assert plan_kv_bytes(read_shape(TINY_MLA), tensor_parallel=1).bytes_per_token == 2 * ((512 + 64) * 2 + 132)
    with pytest.raises(InvalidSpec, match=f"no positive {key}"):
        read_shape({name: value for name, value in TINY_MLA.items() if name != key})


def test_a_model_type_with_latents_and_none_in_the_configuration_is_planned_by_its_heads() -> None:
    """As vLLM does, which takes `null` for the answer."""
    shape = read_shape({**TINY_MLA, "kv_lora_rank": None, "head_dim": 64})
    assert (shape.attention, shape.num_kv_heads) == (AttentionKind.GROUPED_QUERY, 4)


def test_unknown_kv_dtype_names_the_known_ones() -> None:
    with pytest.raises(InvalidSpec, match="'turboquant_4bit_nc' is not one of float32"):
        plan_kv_bytes(read_shape(TINY_LLAMA), tensor_parallel=1, kv_dtype="turboquant_4bit_nc")


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="3 pipeline stages are more than the model's 2 layers"):
        plan_kv_bytes(read_shape(TINY_LLAMA), tensor_parallel=1, pipeline_parallel=3)


@pytest.mark.parametrize("key", ["kv_cache_scheme", "kv_cache_quant_algo"])
def test_a_checkpoint_with_scales_for_a_quantized_cache_is_noted(key: str) -> None:
    shape = read_shape({**TINY_LLAMA, "quantization_config": {"quant_method": "x", key: "FP8"}})
    assert any("--kv-dtype fp8" in note for note in shape.notes)
    assert not read_shape({**TINY_LLAMA, "quantization_config": {"quant_method": "awq"}}).notes
