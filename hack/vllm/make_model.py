"""Write a tiny model with random weights: `python make_model.py CONFIG_FOLDER OUT_FOLDER`, in vLLM's environment.

The weights are large enough that the output depends on the KV cache. vLLM's own `load_format=dummy` draws weights of
about 1e-3: every token then has the same probability, and a test that compares outputs passes even if the cache is all
zeros. The same seed gives the same bytes.
"""

import pathlib
import shutil
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM  # type: ignore[import-not-found]

STANDARD_DEVIATION = 0.08


def main(source: pathlib.Path, target: pathlib.Path) -> None:
    """Build the model from its config.json, fill its weights and save both."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, STANDARD_DEVIATION)
    model.save_pretrained(target)
    # as it was given: saving rewrites fields under names that older vLLM versions do not read
    shutil.copy(source / "config.json", target / "config.json")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
