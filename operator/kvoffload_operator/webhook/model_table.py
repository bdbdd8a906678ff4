"""What is known of models before they run: architecture of well-known names, and which architectures use MLA. Pure
data.

`tests/engine/test_prediction_table.py` compares `MLA_ARCHITECTURES` with vLLM's own `use_mla` for every architecture
that it registers. The table only spares the engine a guess: it decides by its real layers, and its answer holds.
"""

import functools
import re
from enum import StrEnum


class Attention(StrEnum):
    """What the layers of an architecture keep."""

    MLA = "mla"
    """Every layer a latent that is equal on all ranks."""
    MLA_AND_OTHERS = "mla-and-others"
    """Some layers of another kind (state space, compressed, sliding window): not replicated as a whole."""
    HEADS = "heads"
    """Heads, divided over the ranks."""
    DEPENDS = "depends"
    """Some checkpoints of this architecture use MLA, others do not."""


MLA_ARCHITECTURES: dict[str, Attention] = {
    "AXK1ForCausalLM": Attention.MLA,
    "DeepseekV2ForCausalLM": Attention.MLA,
    "DeepseekV3ForCausalLM": Attention.MLA,
    "DeepseekV3BidirectionalModel": Attention.MLA,
    "DeepseekV32ForCausalLM": Attention.MLA,
    "DeepseekV4ForCausalLM": Attention.MLA_AND_OTHERS,
    "DeepseekV4ForConditionalGeneration": Attention.MLA_AND_OTHERS,
    "DeepseekV41ForCausalLM": Attention.MLA_AND_OTHERS,
    "DeepseekVLV2ForCausalLM": Attention.DEPENDS,
    "DeepseekOCRForCausalLM": Attention.DEPENDS,
    "DeepseekOCR2ForCausalLM": Attention.DEPENDS,
    "Dots3NoteForCausalLM": Attention.MLA_AND_OTHERS,
    "Glm4MoeLiteForCausalLM": Attention.MLA,
    "Glm5NextForCausalLM": Attention.MLA_AND_OTHERS,
    "Glm5NextForConditionalGeneration": Attention.MLA_AND_OTHERS,
    "GlmMoeDsaForCausalLM": Attention.MLA,
    "BailingMoeV2_5ForCausalLM": Attention.MLA_AND_OTHERS,
    "BailingMoeV3ForCausalLM": Attention.MLA_AND_OTHERS,
    "BailingMoeV3VLForConditionalGeneration": Attention.MLA_AND_OTHERS,
    "HYV4ForCausalLM": Attention.MLA_AND_OTHERS,
    "KimiK25ForConditionalGeneration": Attention.MLA,
    "KimiK3ForConditionalGeneration": Attention.MLA_AND_OTHERS,
    "KimiLinearForCausalLM": Attention.MLA_AND_OTHERS,
    "KimiVLForConditionalGeneration": Attention.MLA,
    "LongcatFlashForCausalLM": Attention.MLA,
    "LongcatFlashNgramForCausalLM": Attention.MLA,
    "MistralLarge3ForCausalLM": Attention.MLA,
    "PanguUltraMoEForCausalLM": Attention.MLA,
    "UnlimitedOCRForCausalLM": Attention.DEPENDS,
}
"""Architectures with MLA; the other registered ones divide heads."""

HEAD_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GptOssForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "DeepseekForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GraniteForCausalLM",
        "MiniMaxM2ForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "BailingMoeV2ForCausalLM",
        "InternLM2ForCausalLM",
        "OlmoForCausalLM",
        "Olmo2ForCausalLM",
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "FalconForCausalLM",
        "BloomForCausalLM",
        "Starcoder2ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "SeedOssForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "PixtralForConditionalGeneration",
        "LlavaForConditionalGeneration",
    }
)
"""Common architectures that divide heads: named, so that what is in neither table stays unknown."""

_NAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), architecture)
    for pattern, architecture in (
        (r"deepseek-(v2|coder-v2)(?!.*vl)", "DeepseekV2ForCausalLM"),
        (r"deepseek-v3\.2", "DeepseekV32ForCausalLM"),
        (r"deepseek-(v3|v3\.1|r1)(?!-distill)(?!\.2)", "DeepseekV3ForCausalLM"),
        (r"deepseek-r1-distill-llama", "LlamaForCausalLM"),
        (r"deepseek-r1-distill-qwen", "Qwen2ForCausalLM"),
        (r"kimi-k2\.5", "KimiK25ForConditionalGeneration"),
        (r"kimi-k2", "DeepseekV3ForCausalLM"),
        (r"kimi-linear", "KimiLinearForCausalLM"),
        (r"kimi-vl", "KimiVLForConditionalGeneration"),
        (r"longcat-flash", "LongcatFlashForCausalLM"),
        (r"glm-4\.7-flash", "Glm4MoeLiteForCausalLM"),
        (r"glm-5", "GlmMoeDsaForCausalLM"),
        (r"glm-4\.[567]", "Glm4MoeForCausalLM"),
        (r"mistral-large-3", "MistralLarge3ForCausalLM"),
        (r"qwen3.*-a\d+b", "Qwen3MoeForCausalLM"),
        (r"qwen3-(next|coder-next)", "Qwen3NextForCausalLM"),
        (r"qwen3-\d", "Qwen3ForCausalLM"),
        (r"qwen2(\.5)?-\d", "Qwen2ForCausalLM"),
        (r"llama-(2|3|3\.[123])\b", "LlamaForCausalLM"),
        (r"gpt-oss", "GptOssForCausalLM"),
    )
)


MAX_NAME_LENGTH = 255
"""Of a model or its folder; the patterns take longer for a long name than admission has, and none is well known."""


def architecture_of(model: str) -> str | None:
    """The architecture of a well-known model's name or path, None for any other."""
    name = model.rstrip("/").rpartition("/")[2]
    return _architecture_of_name(name) if len(name) <= MAX_NAME_LENGTH else None


@functools.lru_cache(maxsize=1024)
def _architecture_of_name(name: str) -> str | None:
    if re.search(r"(gguf|awq-?to|lora|adapter)", name, re.IGNORECASE):
        return None
    return next((architecture for pattern, architecture in _NAMES if pattern.search(name)), None)


def attention_of(architecture: str) -> Attention | None:
    """What the architecture's layers keep, None where it is not known here."""
    if architecture in MLA_ARCHITECTURES:
        return MLA_ARCHITECTURES[architecture]
    return Attention.HEADS if architecture in HEAD_ARCHITECTURES else None
