"""The prediction's decision table: what is told to the engine, and the first failed condition in words."""

import pytest

from kvoffload.api.keys import SkipReason
from kvoffload.layout.gate import LayoutReason
from kvoffload_operator.webhook.command_line import parse_command_line
from kvoffload_operator.webhook.model_table import Attention, architecture_of, attention_of
from kvoffload_operator.webhook.prediction import EngineFacts, find_refusal, image_version, predict_layout

DEEPSEEK = "deepseek-ai/DeepSeek-V3"


def facts(
    *args: str, model: str = DEEPSEEK, image: str = "vllm/vllm-openai:v0.32.0", architecture: str = "",
    allowed: bool = True, mla_disabled: bool = False,
) -> EngineFacts:  # fmt: skip
    return EngineFacts(
        line=parse_command_line(["vllm", "serve", model], args, {}),
        image=image,
        architecture=architecture,
        replication_allowed=allowed,
        mla_disabled=mla_disabled,
    )


@pytest.mark.parametrize(
    ("given", "layout", "reason"),
    [
        (facts("-tp", "8"), "replicated", LayoutReason.REPLICATED),
        (facts("-tp", "8", model="/models/x", architecture="DeepseekV3ForCausalLM"), "replicated", "Replicated"),
        (facts("-tp", "8", model="/models/x"), "auto", LayoutReason.UNKNOWN_MODEL),
        (facts("-tp", "1"), "per-rank", LayoutReason.ONE_RANK),
        (facts(), "per-rank", LayoutReason.ONE_RANK),
        (facts("-tp", "8", "-pp", "2"), "per-rank", LayoutReason.PIPELINE_PARALLEL),
        (facts("-tp", "8", "-dcp", "2"), "per-rank", LayoutReason.DECODE_CONTEXT_PARALLEL),
        (facts("-tp", "8", "-pcp", "2"), "per-rank", LayoutReason.PREFILL_CONTEXT_PARALLEL),
        (facts("-tp", "8", allowed=False), "per-rank", LayoutReason.FORBIDDEN),
        (facts("-tp", "8", model="meta-llama/Llama-3.1-70B-Instruct"), "per-rank", LayoutReason.NOT_MLA),
        (facts("-tp", "8", model="moonshotai/Kimi-Linear-48B"), "per-rank", LayoutReason.LAYER_NOT_REPLICATED),
        (facts("-tp", "8", mla_disabled=True), "per-rank", LayoutReason.NOT_MLA),
        (facts("-tp", "8", "--hf-overrides", "{}"), "auto", LayoutReason.UNKNOWN_MODEL),
        (facts("-tp", "8", "--speculative-config", '{"method": "mtp"}'), "auto", LayoutReason.UNKNOWN_MODEL),
        (facts("-tp", "8", "--speculative-config", '{"method": "ngram"}'), "replicated", LayoutReason.REPLICATED),
        (facts("-tp", "8", "--speculative-config", "not json"), "auto", LayoutReason.UNKNOWN_MODEL),
        (facts("-tp", "8", "--speculative-config", "[" * 50_000), "auto", LayoutReason.UNKNOWN_MODEL),
        (facts("--config", "f.yaml"), "auto", LayoutReason.UNKNOWN_MODEL),
        (facts("-tp", "many"), "auto", LayoutReason.UNKNOWN_MODEL),
    ],
)
def test_the_first_condition_that_fails_decides(given: EngineFacts, layout: str, reason: str) -> None:
    prediction = predict_layout(given)
    assert (prediction.layout, prediction.reason) == (layout, reason)
    assert prediction.annotation == f"{layout} ({prediction.reason.value}: {prediction.message})"
    assert prediction.message


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (facts("--kv-transfer-config", "{}"), SkipReason.USER_CONNECTOR),
        (facts("--kv-offloading-size", "10"), SkipReason.USER_CONNECTOR),
        (facts("-tp", "8", "--nnodes", "2", "--node-rank", "1"), SkipReason.MULTI_NODE),
        (facts("--distributed-executor-backend", "ray"), SkipReason.UNSUPPORTED_EXECUTOR),
        (facts("--distributed-executor-backend=external_launcher"), SkipReason.UNSUPPORTED_EXECUTOR),
        (facts(image="vllm/vllm-openai:v0.27.1"), SkipReason.UNSUPPORTED_VLLM),
        (facts(image="vllm/vllm-openai:v0.34.0"), SkipReason.UNSUPPORTED_VLLM),
        (facts("--distributed-executor-backend", "mp"), None),
        (facts(image="vllm/vllm-openai:latest"), None),
        (facts(image="me/llm:v0.2.0"), None),
        (facts("--nnodes", "1"), None),
    ],
)
def test_an_engine_that_offload_would_break_is_left_alone(given: EngineFacts, reason: SkipReason | None) -> None:
    refusal = find_refusal(given)
    assert (refusal and refusal.reason) == reason


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.32.0", (0, 32)),
        ("vllm/vllm-openai:v0.32.0-cu129", (0, 32)),
        ("registry:5000/team/vllm:0.29", (0, 29)),
        ("registry:5000/team/vllm", None),
        ("vllm/vllm-openai:v0.32.0@sha256:abc", (0, 32)),
        ("vllm/vllm-openai:nightly", None),
        ("me/llm:0.32.0", None),
        ("", None),
    ],
)
def test_only_a_tag_of_an_image_named_vllm_tells_its_version(image: str, version: tuple[int, int] | None) -> None:
    assert image_version(image) == version


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ("deepseek-ai/DeepSeek-V2-Lite", Attention.MLA),
        ("deepseek-ai/DeepSeek-V3.1", Attention.MLA),
        ("deepseek-ai/DeepSeek-V3.2-Exp", Attention.MLA),
        ("deepseek-ai/DeepSeek-R1-0528", Attention.MLA),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", Attention.HEADS),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", Attention.HEADS),
        ("moonshotai/Kimi-K2-Instruct", Attention.MLA),
        ("zai-org/GLM-4.6", Attention.HEADS),
        ("zai-org/GLM-5", Attention.MLA),
        ("Qwen/Qwen3-235B-A22B", Attention.HEADS),
        ("/models/deepseek-v3/", Attention.MLA),
        ("someone/finetune", None),
        ("deepseek-ai/deepseek-vl2", None),
    ],
)
def test_well_known_models_are_known_by_name(model: str, attention: Attention | None) -> None:
    architecture = architecture_of(model)
    assert (attention_of(architecture) if architecture else None) == attention


@pytest.mark.parametrize("image", [f"vllm:{'9' * 5000}.1", f"{'x' * 2000}/vllm:v0.32.0"])
def test_a_tag_that_no_version_has_tells_none(image: str) -> None:
    assert image_version(image) is None


def test_a_name_longer_than_any_is_not_looked_up() -> None:
    """The patterns take as long as the square of its length."""
    assert architecture_of("me/qwen3-8b") is not None
    assert architecture_of(f"me/qwen3-8b{'x' * 255}") is None
