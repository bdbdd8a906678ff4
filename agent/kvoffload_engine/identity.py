"""What this engine's KV bytes depend on, collected from vLLM's configuration and this worker's real layers.

Runs in vLLM's workers: they alone see every layer, and the KV dtype and attention backend as resolved. The digest
reaches the scheduler by vLLM's connector handshake, so that all sessions of an engine say the same. A pipeline stage
sees its own layers only: with several stages all sessions say what they have in common (`common_identity`), and the
scheduler binds the stages' whole identities together with the hash seed (`seed_of_keys`).

Left out on purpose:

- names of pods, hosts and served models, ports, data-parallel ranks, anything about speed
- what changes rounding and not meaning: kernels and their backends (but the attention backend, which lays out a page),
  graphs and compilation, expert placement, how many tokens a step has
- what the keys already say: prompt embeddings and cache salts are in vLLM's block hashes, NONE_HASH is bound beside the
  identity, tokenizer and chat template end in token ids
- adapters and multimodal inputs, with their processors' settings: such requests have keys of their engine alone
- `max_model_len`, but for the models whose keys depend on it (`length_facts`)
- code that replaces vLLM's (plug-ins, out-of-tree models): who changes that changes the weights' id
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from kvoffload.layout.fingerprint import Fingerprint, fingerprint
from kvoffload.layout.gate import LayerFacts
from kvoffload_engine.environment import WEIGHTS_ID_VARIABLE
from kvoffload_engine.log import logger

STAGE_FIELDS = frozenset({"attention_backends", "groups", "layers", "pages", "specs"})
"""What a worker says of the layers of its own pipeline stage."""
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")
"""What makes a model in a folder: weights, configuration, and code that is its own (`--trust-remote-code`)."""
QUANTIZING_VARIABLES = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
)
"""Variables by which vLLM quantizes the weights that it loads, whatever the configuration says."""
LENGTH_FREE_ROPES = frozenset(
    {"default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "proportional", "mrope"}
)
"""Kinds of rope whose rotation of a position depends on the model's configuration alone in vLLM 0.28 to 0.33."""


def weights_identity(model: str, revision: str | None, explicit: str = "") -> str:
    """Which weights: an explicit id wins; a local folder, or one file of it (GGUF), is names, lengths and times of the
    files; else name and revision.

    `revision` is the commit that the configuration was loaded from where transformers knows it: a branch can move.
    """
    if explicit:
        return f"explicit:{explicit}"
    place = Path(model)
    if place.exists():
        files = sorted(path for path in place.iterdir() if path.suffix in _WEIGHT_FILES) if place.is_dir() else [place]
        listed = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
        return "files:" + ",".join(listed)
    return f"hub:{model}@{revision or 'main'}"


def collect_identity(
    *,
    vllm_version_minor: tuple[int, int],
    vllm_config: Any,
    layers: Sequence[LayerFacts],
    specs: Sequence[Mapping[str, str]],
    groups: Sequence[tuple[int, Sequence[str]]],
    page_table: Sequence[Sequence[tuple[int, int]]],
    blocks_per_chunk: int,
    tokens_per_hash: int,
    page_layouts: Mapping[str, str],
    attention_backends: Sequence[str],
    has_checksums: bool,
) -> Fingerprint:
    """The fingerprint of one worker; equal on every rank of a pipeline stage.

    `specs` holds all that vLLM's spec of each layer says (the dtypes as this worker resolved them), in the order of
    `layers`; `groups` tokens per block and layer names; `page_table` each group's (tensor index, page bytes);
    `page_layouts` the order of a page's dimensions, by what it is of.
    """
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    attention = vllm_config.attention_config
    speculative = vllm_config.speculative_config
    context_parallel = [parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size]
    identity = fingerprint(
        {
            "vllm": list(vllm_version_minor),
            "model": model_facts(vllm_config.model_config, os.environ.get(WEIGHTS_ID_VARIABLE, "")),
            "load": load_facts(vllm_config.load_config),
            "online_quantization": {name: os.environ.get(name, "") for name in QUANTIZING_VARIABLES},
            "kv_cache_dtype": str(cache.cache_dtype),
            "page_layouts": dict(page_layouts),
            "attention": [str(attention.indexer_kv_dtype), bool(attention.use_non_causal)],
            "attention_backends": list(attention_backends),
            "model_runner_v2": bool(vllm_config.use_v2_model_runner),
            "hash": str(cache.prefix_caching_hash_algo),
            "tokens_per_hash": tokens_per_hash,
            "blocks_per_chunk": blocks_per_chunk,
            "groups": [[tokens, list(names)] for tokens, names in groups],
            "layers": [[one.name, one.spec_class, one.page_bytes, str(one.tokens_per_state)] for one in layers],
            "specs": [dict(one) for one in specs],
            "pages": [[[index, num] for index, num in group] for group in page_table],
            "checksums": has_checksums,
            "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size],
            "context_parallel": context_parallel,
            "interleave": interleave_facts(parallel) if max(context_parallel) > 1 else [],
            "speculative": speculative_facts(speculative) if speculative is not None else [],
        }
    )
    logger.debug("kvoffload: identity %s is of %s", identity.digest.hex(), json.dumps(identity.fields, sort_keys=True))
    return identity


def common_identity(identity: Fingerprint) -> Fingerprint:
    """What the workers of all pipeline stages say alike."""
    return fingerprint({name: value for name, value in identity.fields.items() if name not in STAGE_FIELDS})


def seed_of_keys(none_hash: bytes, stages: Sequence[bytes]) -> bytes:
    """What the scheduler binds its keys to: vLLM's own seed, and with several stages their digests, in order."""
    return none_hash if len(stages) == 1 else hashlib.sha256(b"".join([none_hash, *stages])).digest()


def model_facts(model: Any, explicit_weights: str = "") -> dict[str, object]:
    """Weights, code and configuration of a model (the engine's or its draft), as vLLM uses them."""
    return {
        "weights": weights_identity(str(model.model), _revision(model), explicit_weights),
        "weights_uri": str(model.model_weights),  # where `model` is a local copy of the configuration alone
        "code": [str(model.code_revision), str(model.model_impl), _stable(model.model_class_overrides)],
        "architectures": list(getattr(model.hf_config, "architectures", None) or []),
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), _stable(model.quantization_config)],
        "hf_overrides": _stable(model.hf_overrides),
        "config": _stable(_model_values(model.hf_config)),
        "length": length_facts(model),
    }


def length_facts(model: Any) -> list[object]:
    """What of `max_model_len` decides how this model makes keys; empty for most models.

    longrope has two lists of factors, and vLLM takes the long one where `max_model_len` exceeds the original length:
    that answer is in. Llama 4 scales queries by position where it exceeds 32768 and nobody said otherwise, and other
    kinds of rope are not known: for these the length itself is in. And whether vLLM fits it to the memory (`auto`): the
    model is built before, with another one.
    """
    nested = list(_nested_values(_stable(_model_values(model.hf_config))))
    ropes = {str(one["rope_type"]) for one in nested if one.get("rope_type")}
    ropes |= {str(one["type"]) for one in nested if one.get("type") and "factor" in one}
    originals = {one.get("original_max_position_embeddings") for one in nested}
    lengths = sorted(one for one in originals if isinstance(one, int))
    facts: list[object] = []
    if "longrope" in ropes and lengths:
        facts += [bool(model.max_model_len > one) for one in lengths]
        ropes.remove("longrope")
    is_tuned = any("attn_temperature_tuning" in one for one in nested)
    if is_tuned or ropes - LENGTH_FREE_ROPES:
        facts.append(model.max_model_len)
    if is_tuned:
        facts += [str(model.generation_config), _stable(model.override_generation_config)]
    if facts:
        facts.append(model.original_max_model_len == -1)
    return facts


def load_facts(load: Any) -> list[object]:
    """Which files the weights are read from, and what the loader makes of them."""
    return [str(load.load_format), _stable(load.model_loader_extra_config), _stable(load.ignore_patterns)]


def interleave_facts(parallel: Any) -> list[int]:
    """How many tokens in a row stand with one rank, where ranks share out the tokens (the older name first)."""
    return [parallel.dcp_kv_cache_interleave_size, parallel.cp_kv_cache_interleave_size]


def speculative_facts(speculative: Any) -> list[object]:
    """The draft, whose layers have pages too."""
    facts: list[object] = [str(speculative.method)]
    if speculative.draft_model_config is not None:
        facts += [speculative.num_speculative_tokens, model_facts(speculative.draft_model_config)]
    if speculative.draft_load_config is not None:
        facts.append(load_facts(speculative.draft_load_config))
    return facts


def _revision(model: Any) -> str | None:
    """The commit of the weights. The configuration's own is that, but where it was read from another place."""
    of_config: str | None = getattr(model.hf_config, "_commit_hash", None)
    revision: str | None = model.revision
    return f"{revision}, configuration {of_config}" if model.hf_config_path else of_config or revision


def _model_values(hf_config: Any) -> dict[str, Any]:
    """The model's own configuration, without what changes nothing (the tool's version, where it came from)."""
    values = dict(hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version", "name_or_path", "_commit_hash"):
        values.pop(name, None)
    return values


def _nested_values(value: object) -> Iterator[dict[str, Any]]:
    """This mapping and all that stand inside it."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nested_values(one)


def _stable(value: Any) -> object:
    """A JSON form that is the same in every process: mappings and lists as they are, configurations and dataclasses
    by their values, anything odd by its type's name."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _stable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stable(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _stable(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if hasattr(value, "to_dict"):
        return _stable(value.to_dict())
    return str(value) if type(value).__module__ == "torch" else f"{type(value).__module__}.{type(value).__qualname__}"
