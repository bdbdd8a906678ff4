"""Write a tiny model with random weights: `python make_model.py CONFIG_FOLDER OUT_FOLDER`, in vLLM's environment.

The weights are large enough that the output depends on the KV cache. vLLM's own `load_format=dummy` draws weights of
about 1e-3: every token then has the same probability, and a test that compares outputs passes even if the cache is all
zeros. The same seed gives the same bytes.

A model that takes images (`vision_config`) gets the processor that vLLM needs for it: a tokenizer with a word for each
number and one for the image, and the size of its images. It needs torchvision, which the others must be without
(`hack.vllm.environment`).
"""

import json
import pathlib
import shutil
import sys
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

STANDARD_DEVIATION = 0.08


def main(source: pathlib.Path, target: pathlib.Path) -> None:
    """Build the model from its config.json, fill its weights and save both."""
    torch.manual_seed(0)
    config = json.loads((source / "config.json").read_text())
    takes_images = "vision_config" in config
    kind = transformers.AutoModelForImageTextToText if takes_images else transformers.AutoModelForCausalLM
    model = kind.from_config(transformers.AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, STANDARD_DEVIATION)
    model.save_pretrained(target)
    # as it was given: saving rewrites fields under names that older vLLM versions do not read
    shutil.copy(source / "config.json", target / "config.json")
    if takes_images:
        restore_vision_names(target / "model.safetensors")
        write_processor(config, target)


def restore_vision_names(path: pathlib.Path) -> None:
    """Name the vision tower's weights as checkpoints on the hub do, and as vLLM reads them."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = load_file(path)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_processor(config: dict[str, Any], target: pathlib.Path) -> None:
    """What turns a picture and a prompt of numbers into the model's input."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vision, image_token = config["vision_config"], config["image_token_index"]
    words = {"<image>" if number == image_token else f"t{number}": number for number in
             range(config["text_config"]["vocab_size"])}  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = vision["image_size"]
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        ),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="t2",
            bos_token="t0",
            eos_token="t1",
            pad_token="t3",
            additional_special_tokens=["<image>"],
        ),
        patch_size=vision["patch_size"],
        vision_feature_select_strategy=config["vision_feature_select_strategy"],
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(target)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
