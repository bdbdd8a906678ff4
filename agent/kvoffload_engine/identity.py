"""What this engine's KV bytes depend on, collected from vLLM's configuration and this worker's real layers.

Runs in vLLM's workers: they alone see every layer, and the KV dtype and attention backend as resolved. The digest
reaches the scheduler by vLLM's connector handshake, so that all sessions of an engine say the same. A pipeline stage
sees its own layers only: with several stages all sessions say what they have in common (`common_identity`), and the
scheduler binds the stages' whole identities together with the hash seed (`seed_of_keys`).

Left out on purpose: names of pods, hosts and served models, ports, data-parallel ranks, anything about speed.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.layout.fingerprint import Fingerprint, fingerprint
from kvoffload.layout.gate import LayerFacts
from kvoffload_engine.environment import WEIGHTS_ID_VARIABLE
from kvoffload_engine.log import logger

STAGE_FIELDS = frozenset({"kv_dtypes", "attention_backends", "groups", "layers", "pages"})
"""What a worker says of the layers of its own pipeline stage."""
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf", ".json")


def weights_identity(model: str, revision: str | None, explicit: str = "") -> str:
    """Which weights: an explicit id wins; a local folder is its files' names, lengths and times; else name and
    revision.

    `revision` is the commit that the configuration was loaded from where transformers knows it: a branch can move.
    """
    if explicit:
        return f"explicit:{explicit}"
    folder = Path(model)
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_FILES)
        listed = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
        return "files:" + ",".join(listed)
    return f"hub:{model}@{revision or 'main'}"


def collect_identity(
    *,
    vllm_version_minor: tuple[int, int],
    vllm_config: Any,
    layers: Sequence[LayerFacts],
    groups: Sequence[tuple[int, Sequence[str]]],
    page_table: Sequence[Sequence[tuple[int, int]]],
    blocks_per_chunk: int,
    tokens_per_hash: int,
    kv_dtypes: Sequence[str],
    attention_backends: Sequence[str],
    has_checksums: bool,
) -> Fingerprint:
    """The fingerprint of one worker; equal on every rank of a pipeline stage.

    `groups` holds tokens per block and layer names, `page_table` each group's (tensor index, page bytes),
    `kv_dtypes` the cache dtype of each layer as this worker resolved it.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    speculative = vllm_config.speculative_config
    explicit = os.environ.get(WEIGHTS_ID_VARIABLE, "")
    draft = getattr(speculative, "draft_model_config", None) if speculative is not None else None
    identity = fingerprint(
        {
            "vllm": list(vllm_version_minor),
            "model": weights_identity(str(model.model), _revision(model), explicit),
            "architectures": list(getattr(model.hf_config, "architectures", None) or []),
            "load_format": str(vllm_config.load_config.load_format),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "hf_overrides": _stable(getattr(model, "hf_overrides", None)),
            "config": _stable(_model_values(model.hf_config)),
            "kv_cache_dtype": str(cache.cache_dtype),
            "kv_dtypes": list(kv_dtypes),
            "kv_cache_layout": str(getattr(cache, "kv_cache_layout", None)),
            "attention_backends": list(attention_backends),
            "model_runner_v2": bool(getattr(vllm_config, "use_v2_model_runner", False)),
            "hash": str(cache.prefix_caching_hash_algo),
            "tokens_per_hash": tokens_per_hash,
            "blocks_per_chunk": blocks_per_chunk,
            "groups": [[tokens, list(names)] for tokens, names in groups],
            "layers": [[one.name, one.spec_class, one.page_bytes, str(one.tokens_per_state)] for one in layers],
            "pages": [[[index, num] for index, num in group] for group in page_table],
            "checksums": has_checksums,
            "parallel": [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                getattr(parallel, "prefill_context_parallel_size", 1),
                getattr(parallel, "decode_context_parallel_size", 1),
                parallel.world_size,
            ],
            "draft": weights_identity(str(draft.model), _revision(draft)) if draft is not None else "",
            "speculative": _stable(getattr(speculative, "method", None)),
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


def _revision(model: Any) -> str | None:
    return getattr(model.hf_config, "_commit_hash", None) or getattr(model, "revision", None)


def _model_values(hf_config: Any) -> object:
    """The model's own configuration, without what changes nothing (the tool's version, where it came from)."""
    values = dict(hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version", "name_or_path", "_commit_hash"):
        values.pop(name, None)
    return values


def _stable(value: Any) -> object:
    """A JSON form that is the same in every process: mappings and lists as they are, anything odd by its type's
    name."""
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
    return f"{type(value).__module__}.{type(value).__qualname__}"
