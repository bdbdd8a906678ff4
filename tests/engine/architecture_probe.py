"""Runs in vLLM's own Python: what its `use_mla` says of every architecture that it registers.

Prints JSON: architecture -> {"always": bool, "possible": bool} over the model types that transformers or vLLM map to
it, null where none is known; and "source": whether the module of the model class builds MLA attention.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

logging.disable(logging.CRITICAL)

import vllm  # noqa: E402
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402
from vllm.transformers_utils.config import _CONFIG_REGISTRY  # noqa: E402
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase  # noqa: E402

SITE = Path(vllm.__file__).parents[1]
SUFFIX = re.compile(r"(ForCausalLM|ForConditionalGeneration|Model|LMHeadModel)$")
MLA_SOURCE = re.compile(r"MLAAttention|MultiHeadLatentAttention|MLAModules")


def normal(name: str) -> str:
    """Names without case and punctuation: `deepseek_v3` and `DeepseekV3`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def model_types() -> dict[str, set[str]]:
    """Model types by architecture, as transformers' tables and equal names have them."""
    found: dict[str, set[str]] = {}
    for table in (vars(modeling_auto)[name] for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES")):
        for model_type, classes in table.items():
            for one in [classes] if isinstance(classes, str) else classes:
                found.setdefault(one, set()).add(model_type)
    by_name: dict[str, set[str]] = {}
    for model_type in {*configuration_auto.CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY}:
        by_name.setdefault(normal(model_type), set()).add(model_type)
    for architecture in ModelRegistry.get_supported_archs():
        found.setdefault(architecture, set()).update(by_name.get(normal(SUFFIX.sub("", architecture)), set()))
    return found


def uses_mla(model_type: str, *, with_latent: bool) -> bool | None:
    """vLLM's answer for the type's default config, or for one that has latent attention; None if there is no config."""
    try:
        known = model_type in _CONFIG_REGISTRY
        config: Any = (_CONFIG_REGISTRY if known else configuration_auto.CONFIG_MAPPING)[model_type]()
        text = config.get_text_config()
        if with_latent:
            text.kv_lora_rank, text.head_dim = 512, 128
        return bool(ModelArchConfigConvertorBase(config, text).is_deepseek_mla())
    except Exception:  # noqa: BLE001 -- remote code, missing packages, configs that need arguments
        return None


def main() -> None:
    """Print what is known of every architecture."""
    types, answer = model_types(), {}
    for architecture in sorted(ModelRegistry.get_supported_archs()):
        plain = [uses_mla(one, with_latent=False) for one in types.get(architecture, ())]
        latent = [uses_mla(one, with_latent=True) for one in types.get(architecture, ())]
        module = getattr(ModelRegistry.models[architecture], "module_name", "")
        path = SITE / (module.replace(".", "/") + ".py")
        answer[architecture] = {
            "always": any(plain) if any(one is not None for one in plain) else None,
            "possible": any(latent) if any(one is not None for one in latent) else None,
            "source": bool(path.exists() and MLA_SOURCE.search(path.read_text())),
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
