"""Prints, as JSON, the KV page sizes that vLLM's own classes give for each model folder: run with vLLM's interpreter.

    python page_sizes.py FOLDER... -> {folder: {"use_mla", "layers", "pages": {tensor parallel size: bytes}}}

Pages have 16 tokens of one layer, in the model's own type.
"""

import json
import sys
from types import SimpleNamespace

from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec


def page_bytes(model: ModelConfig, tensor_parallel_size: int) -> int:
    """One layer's page, built as vLLM's attention layers build their spec."""
    spec_class = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    spec = spec_class(
        block_size=16,
        num_kv_heads=model.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=tensor_parallel_size)),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    return spec.page_size_bytes


def main(folders: list[str]) -> None:
    answers = {}
    for folder in folders:
        model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True)
        answers[folder] = {
            "use_mla": model.use_mla,
            "layers": model.get_total_num_hidden_layers(),
            "pages": {size: page_bytes(model, size) for size in (1, 2, 8, 16)},
        }
    print("PAGES " + json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
