"""How many bytes of KV cache a model keeps: from its config.json to bytes per token and per block of one rank.

Pure. Called by `kubectl kvoffload plan`; an engine measures its real page sizes, and tests hold the two against each
other. Formulas (vLLM `v1/kv_cache_interface.py`, `AttentionSpec.page_size_bytes`):

    latent attention (MLA)   layers x (kv_lora_rank + qk_rope_head_dim) x element bytes, the same on every rank
    sparse MLA (V3.2)        the same + layers x (index_head_dim + 4 per 128 of them) bytes of indexer keys
    grouped-query            layers x 2 x max(1, KV heads / ranks) x head_dim x element bytes, on each rank

Pipeline stages divide the layers; the stage with most of them is what counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvoffload.errors import InvalidSpec


class AttentionKind(str, Enum):
    """What a model keeps for each token."""

    MLA = "multi-head latent attention"
    SPARSE_MLA = "multi-head latent attention with a sparse indexer"
    GROUPED_QUERY = "grouped-query attention"


MAX_LAYERS = 10_000
"""No model has so many; sizes are planned layer by layer."""

MAX_DIMENSION = 10_000_000
"""Of heads and elements: no model has so many either."""

MLA_MODEL_TYPES = frozenset(
    {
        "axk1",
        "bailing_hybrid",
        "deepseek_mtp",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "kimi_linear",
        "longcat_flash",
        "pangu_ultra_moe",
    }
)
"""`model_type` values whose KV cache vLLM 0.32 lays out as MLA, given a `kv_lora_rank`."""

LINEAR_KEYS = (
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_cfg",
    "state_size",
    "mamba_d_ssm",
    "conv_L_cache",
    "lru_width",
    "compress_ratios",
    "layers_block_type",
    "layer_group_size",
)
"""Keys of configurations with recurrent state or compressed layers: their bytes are not a sum over tokens."""

FULL_LAYERS = frozenset(
    {"full_attention", "attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"}
)
"""`layer_types` that keep every token (vLLM `config/model.py`, `_ATTENTION_LAYER_TYPES`)."""
WINDOWED_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
"""`layer_types` that keep a window of tokens, or the current piece of them."""

ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
PACKED_MLA_BYTES: Mapping[str, int] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of one token in one layer in vLLM's packed MLA formats (`mla_attention.py`, `get_kv_cache_spec`)."""


@dataclass(frozen=True)
class ModelShape:
    """What of a config.json decides the bytes of its KV cache."""

    model_type: str
    architecture: str
    attention: AttentionKind
    num_layers: int
    latent_elements: int
    """Elements per token and layer of an MLA model; 0 for the others."""
    indexer_bytes: int
    """Bytes per token and layer of the sparse indexer's keys."""
    num_kv_heads: int
    head_elements: int
    dtype: str
    num_attention_heads: int = 0
    """0 where the configuration does not say."""
    notes: tuple[str, ...] = ()

    @property
    def is_mla(self) -> bool:
        """Whether every rank of tensor parallelism holds the same bytes."""
        return self.attention is not AttentionKind.GROUPED_QUERY


@dataclass(frozen=True)
class KVBytes:
    """Bytes that one rank keeps, with the stage of most layers."""

    kv_dtype: str
    layers_per_stage: int
    bytes_per_token_layer: int
    block_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over the layers of a stage."""
        return self.bytes_per_token_layer * self.layers_per_stage

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of `block_tokens` tokens."""
        return self.bytes_per_token * self.block_tokens


def read_shape(config: Mapping[str, object]) -> ModelShape:
    """Read the shape out of a parsed config.json; raises InvalidSpec where its bytes cannot be told from it."""
    text = _text_config(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    found = _other_layers(text)
    if found:
        raise InvalidSpec(
            f"{model_type}: {found} in the configuration means layers whose state is not a number of bytes per "
            "token; start the engine on a small pool: its log says how many bytes a slot has ('bytes a slot')"
        )
    num_layers = _required(text, "num_hidden_layers", "n_layer", "num_layers")
    if num_layers > MAX_LAYERS:
        raise InvalidSpec(f"{model_type}: {num_layers} layers in the configuration, at most {MAX_LAYERS} are planned")
    latent = rope = indexer = 0
    if model_type in MLA_MODEL_TYPES and text.get("kv_lora_rank", 1) is not None:  # null: it has no latent attention
        latent, rope = _required(text, "kv_lora_rank"), _required(text, "qk_rope_head_dim")
        indexer = _required(text, "index_head_dim") if text.get("index_topk") is not None else 0
    is_mla = latent > 0
    heads = _dimension(text, "num_attention_heads", "n_head") or 0
    kv_heads = head_elements = 0
    if not is_mla:
        kv_heads = (
            _dimension(text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or heads
        )
        head_elements = _dimension(text, "head_dim") or 0
        if not kv_heads:
            raise InvalidSpec(
                f"{model_type}: neither num_key_value_heads nor num_attention_heads is in the configuration; "
                "is this the config.json of a language model?"
            )
        if not head_elements and not heads:
            raise InvalidSpec(f"{model_type}: neither head_dim nor num_attention_heads is in the configuration")
        head_elements = head_elements or _required(text, "hidden_size", "n_embd") // heads
        if not head_elements:
            raise InvalidSpec(
                f"{model_type}: hidden_size is less than its {heads} attention heads, and there is no head_dim"
            )
    return ModelShape(
        model_type=model_type,
        architecture=_architecture(config),
        attention=AttentionKind.GROUPED_QUERY
        if not is_mla
        else AttentionKind.SPARSE_MLA
        if indexer
        else AttentionKind.MLA,
        num_layers=num_layers,
        latent_elements=latent + rope,
        indexer_bytes=indexer + indexer // 128 * 4,
        num_kv_heads=1 if is_mla else kv_heads,
        head_elements=head_elements,
        dtype=str(
            text.get("torch_dtype")
            or text.get("dtype")
            or config.get("torch_dtype")
            or config.get("dtype")
            or "bfloat16"
        ),
        num_attention_heads=heads,
        notes=_notes(text, num_layers=num_layers, is_mla=is_mla, model_type=model_type),
    )


def plan_kv_bytes(
    shape: ModelShape,
    *,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    block_tokens: int = 16,
    kv_dtype: str = "auto",
) -> KVBytes:
    """Bytes that one rank keeps of `shape`. `kv_dtype` is vLLM's `--kv-cache-dtype`."""
    for name, value in (("tensor", tensor_parallel), ("pipeline", pipeline_parallel), ("block", block_tokens)):
        if value < 1:
            raise InvalidSpec(f"{name} size {value} is below 1")
    if pipeline_parallel > shape.num_layers:
        raise InvalidSpec(f"{pipeline_parallel} pipeline stages are more than the model's {shape.num_layers} layers")
    resolved = shape.dtype if kv_dtype == "auto" else kv_dtype
    if shape.attention is AttentionKind.SPARSE_MLA and resolved in ("fp8", "fp8_e4m3"):
        resolved = "fp8_ds_mla"
    if resolved in PACKED_MLA_BYTES and shape.is_mla:
        of_token = PACKED_MLA_BYTES[resolved]
    elif resolved not in ELEMENT_BYTES:
        known = ", ".join([*ELEMENT_BYTES, *PACKED_MLA_BYTES])
        raise InvalidSpec(f"KV dtype {resolved!r} is not one of {known}; give one of them with --kv-dtype")
    elif shape.is_mla:
        of_token = shape.latent_elements * ELEMENT_BYTES[resolved]
    else:
        heads_per_rank = max(1, shape.num_kv_heads // tensor_parallel)
        of_token = 2 * heads_per_rank * shape.head_elements * ELEMENT_BYTES[resolved]
    return KVBytes(
        kv_dtype=resolved,
        layers_per_stage=-(-shape.num_layers // pipeline_parallel),
        bytes_per_token_layer=of_token + shape.indexer_bytes,
        block_tokens=block_tokens,
    )


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model's part of a multimodal configuration, or the whole of a plain one."""
    for key in ("text_config", "language_config", "llm_config"):
        part = config.get(key)
        if isinstance(part, Mapping):
            return part
    return config


def _architecture(config: Mapping[str, object]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown"


def _other_layers(text: Mapping[str, object]) -> str:
    """What says that layers keep something else than keys and values of tokens; empty where nothing does."""
    for key in LINEAR_KEYS:
        if text.get(key):
            return f"`{key}`"
    layer_types, attention_types = text.get("layer_types"), text.get("attn_type_list")
    if isinstance(layer_types, list):
        other = [kind for kind in map(str, layer_types) if kind not in FULL_LAYERS | WINDOWED_LAYERS]
        if other:
            return f"`layer_types` with {len(other)} of {len(layer_types)} layers {', '.join(sorted(set(other)))}"
    if isinstance(attention_types, list) and any(kind != 1 for kind in attention_types):
        return "`attn_type_list` with other values than 1"
    return ""


def _windowed_layers(text: Mapping[str, object], num_layers: int) -> str:
    """Which layers keep only a window of tokens, in words; empty where none does, as far as the configuration tells."""
    layer_types, window = text.get("layer_types"), _optional(text, "sliding_window")
    if isinstance(layer_types, list):
        windowed = sum(1 for kind in map(str, layer_types) if kind in WINDOWED_LAYERS)
        return f"{windowed} layers have a sliding window" if windowed else ""
    if window < 1 or text.get("use_sliding_window") is False:
        return ""
    every = _optional(text, "sliding_window_pattern")
    if every > 0:
        return f"{num_layers - num_layers // every} layers have a sliding window"
    return f"the configuration has a sliding window of {window} tokens, and does not say for which layers"


def _notes(text: Mapping[str, object], *, num_layers: int, is_mla: bool, model_type: str) -> tuple[str, ...]:
    notes = []
    windowed = _windowed_layers(text, num_layers)
    if windowed:
        notes.append(f"{windowed}; the figures count every layer as full attention and are an upper bound")
    if text.get("kv_lora_rank") and not is_mla:
        notes.append(f"kv_lora_rank is set, but vLLM 0.32 has no MLA layout for model_type {model_type!r}")
    if _optional(text, "num_nextn_predict_layers"):
        notes.append("speculative decoding with the model's own MTP layers adds their KV cache, which is not counted")
    quantization = text.get("quantization_config")
    if isinstance(quantization, Mapping) and (
        quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    ):
        notes.append(
            "the checkpoint brings scales for a quantized KV cache: vLLM may take fp8; plan with --kv-dtype fp8"
        )
    return tuple(notes)


def _required(config: Mapping[str, object], *keys: str) -> int:
    value = _dimension(config, *keys)
    if value is None:
        raise InvalidSpec(
            f"the configuration has no positive {' or '.join(keys)}; is this the config.json of a language model?"
        )
    return value


def _dimension(config: Mapping[str, object], *keys: str) -> int | None:
    """What the bytes are multiplied by: of the first key that is there and not null; None where none is."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_DIMENSION:
            shown = f"{str(value)[:40]!r}" if isinstance(value, str) else str(value)[:40]
            raise InvalidSpec(f"{key} is {shown} in the configuration, needed a whole number from 1 to {MAX_DIMENSION}")
        return value
    return None


def _optional(config: Mapping[str, object], key: str) -> int:
    """Something that is only told; 0 where it is no number."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
