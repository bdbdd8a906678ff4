"""Predicts what an engine's gate will decide, from its command line. Pure; called by `injection.py`.

A prediction is never trusted with bytes: `replicated` has to be confirmed by every rank, `per-rank` is a veto that
costs memory at most, `auto` leaves it to the engine. The reasons are the gate's own (`kvoffload.layout.gate`).
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.api.keys import PredictedLayout, SkipReason
from kvoffload.layout.gate import SUPPORTED_EXECUTORS, LayoutReason
from kvoffload_operator.webhook.command_line import CommandLine
from kvoffload_operator.webhook.model_table import Attention, architecture_of, attention_of

MIN_VLLM = (0, 28)
MAX_VLLM = (0, 33)
MAX_IMAGE_LENGTH = 1024
"""Longer ones name nothing that could be pulled, and are not kept in memory."""
DRAFTS_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix", "[ngram]"})
"""Speculative methods that bring no attention layer of their own."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the prediction looks at."""

    line: CommandLine
    image: str
    architecture: str
    """By the user's annotation, empty if none."""
    replication_allowed: bool
    """The pool's `replicatedLayout` is not Never."""
    mla_disabled: bool
    """`VLLM_MLA_DISABLE` is set in the container."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the engine is told, and why."""

    layout: PredictedLayout
    reason: LayoutReason
    message: str

    @property
    def annotation(self) -> str:
        """Value of `kvoffload.io/replicated-layout`."""
        return f"{self.layout} ({self.reason.value}: {self.message})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Offload would break or change this engine: leave the pod alone."""

    reason: SkipReason
    message: str


Check = Callable[[EngineFacts], Prediction | None]


def find_refusal(facts: EngineFacts) -> Refusal | None:
    """Why this pod must not be touched, None if it may be."""
    if facts.line.has("kv-transfer-config") or facts.line.has("kv-offloading-size"):
        return Refusal(SkipReason.USER_CONNECTOR, "the command line brings a KV connector or offloading of its own")
    nodes = facts.line.number("nnodes", 1)
    if nodes is not None and nodes > 1:
        return Refusal(SkipReason.MULTI_NODE, f"--nnodes is {nodes}, needed 1: a region belongs to one node")
    executor = facts.line.text("distributed-executor-backend")
    if executor and executor not in SUPPORTED_EXECUTORS:
        return Refusal(
            SkipReason.UNSUPPORTED_EXECUTOR, f"--distributed-executor-backend is {executor}, needed mp or uni"
        )
    if facts.line.uses_ray and executor is None:
        return Refusal(
            SkipReason.UNSUPPORTED_EXECUTOR, "the script starts Ray, and no --distributed-executor-backend mp"
        )
    version = image_version(facts.image)
    if version is not None and not MIN_VLLM <= version <= MAX_VLLM:
        found = ".".join(map(str, version))
        return Refusal(
            SkipReason.UNSUPPORTED_VLLM,
            f"image {facts.image} names vLLM {found}, needed {_text(MIN_VLLM)} to {_text(MAX_VLLM)}",
        )
    return None


def image_version(image: str) -> tuple[int, int] | None:
    """vLLM's minor version as a tag of an image named vllm tells it, None if it does not."""
    return _image_version(image) if len(image) <= MAX_IMAGE_LENGTH else None


@functools.lru_cache(maxsize=1024)
def _image_version(image: str) -> tuple[int, int] | None:
    name, _, tag = image.partition("@")[0].rpartition(":")
    if "/" in tag or "vllm" not in name.rpartition("/")[2].lower():
        return None
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.\d+)?(?:$|[-.+a-z])", tag)
    return (int(match.group(1)), int(match.group(2))) if match else None


def predict_layout(facts: EngineFacts) -> Prediction:
    """The first check that is decided decides."""
    for check in CHECKS:
        prediction = check(facts)
        if prediction is not None:
            return prediction
    tensor_parallel = facts.line.number("tensor-parallel-size", 1)
    return Prediction(
        PredictedLayout.REPLICATED,
        LayoutReason.REPLICATED,
        f"{tensor_parallel} ranks of a model with multi-head latent attention",
    )


def replication_is_forbidden(facts: EngineFacts) -> Prediction | None:
    """The pool says Never."""
    if facts.replication_allowed:
        return None
    return Prediction(PredictedLayout.PER_RANK, LayoutReason.FORBIDDEN, "the pool's replicatedLayout is Never")


def command_line_is_unread(facts: EngineFacts) -> Prediction | None:
    """It grows beyond what is read of a pod."""
    if not facts.line.unread:
        return None
    return Prediction(PredictedLayout.AUTO, LayoutReason.UNKNOWN_MODEL, f"{facts.line.unread}: the engine decides")


def model_is_split(facts: EngineFacts) -> Prediction | None:
    """Several stages or context shards."""
    for option, reason in (
        ("pipeline-parallel-size", LayoutReason.PIPELINE_PARALLEL),
        ("prefill-context-parallel-size", LayoutReason.PREFILL_CONTEXT_PARALLEL),
        ("decode-context-parallel-size", LayoutReason.DECODE_CONTEXT_PARALLEL),
    ):
        number = facts.line.number(option, 1)
        if number is not None and number > 1:
            return Prediction(PredictedLayout.PER_RANK, reason, f"--{option} is {number}, needed 1")
    return None


def is_one_rank(facts: EngineFacts) -> Prediction | None:
    """Nothing to save with one rank."""
    if facts.line.number("tensor-parallel-size", 1) != 1 or facts.line.number("pipeline-parallel-size", 1) != 1:
        return None
    return Prediction(PredictedLayout.PER_RANK, LayoutReason.ONE_RANK, "--tensor-parallel-size is 1: one copy anyway")


def model_is_not_mla(facts: EngineFacts) -> Prediction | None:
    """By the annotation, or the well-known name of the model."""
    if facts.mla_disabled:
        return Prediction(PredictedLayout.PER_RANK, LayoutReason.NOT_MLA, "VLLM_MLA_DISABLE is set")
    model = facts.line.text("model") or ""
    architecture = facts.architecture or architecture_of(model) or ""
    attention = attention_of(architecture)
    named = f"{architecture} (model {model})" if architecture and model else architecture
    if attention is Attention.HEADS:
        return Prediction(PredictedLayout.PER_RANK, LayoutReason.NOT_MLA, f"{named} divides KV heads over the ranks")
    if attention is Attention.MLA_AND_OTHERS:
        return Prediction(
            PredictedLayout.PER_RANK,
            LayoutReason.LAYER_NOT_REPLICATED,
            f"{named} has layers besides multi-head latent attention",
        )
    if attention is Attention.MLA and not facts.line.has("hf-overrides"):
        return None
    found = f"{named} is not known to use or not to use MLA" if named else f"the model {model!r} is not known"
    return Prediction(
        PredictedLayout.AUTO,
        LayoutReason.UNKNOWN_MODEL,
        f"{found}: the engine decides (annotation kvoffload.io/model-architecture tells)",
    )


def draft_may_have_heads(facts: EngineFacts) -> Prediction | None:
    """A draft model's attention layers may divide heads; the engine sees them, the manifest does not."""
    if not facts.line.has("speculative-config"):
        return None
    try:
        config = json.loads(facts.line.text("speculative-config") or "")
        method = str(config.get("method", "")) if isinstance(config, dict) else ""
    except (ValueError, RecursionError):
        method = ""
    if method in DRAFTS_WITHOUT_LAYERS:
        return None
    return Prediction(
        PredictedLayout.AUTO,
        LayoutReason.UNKNOWN_MODEL,
        f"speculative decoding by {method or 'an unknown method'} may bring layers of another kind: the engine decides",
    )


def something_is_unknown(facts: EngineFacts) -> Prediction | None:
    """Numbers that cannot be told from the manifest."""
    for option in (
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "prefill-context-parallel-size",
        "decode-context-parallel-size",
        "nnodes",
    ):
        if facts.line.number(option, 1) is None:
            return Prediction(
                PredictedLayout.AUTO,
                LayoutReason.UNKNOWN_MODEL,
                f"--{option} cannot be told from the manifest: the engine decides",
            )
    return None


CHECKS: tuple[Check, ...] = (
    replication_is_forbidden,
    command_line_is_unread,
    model_is_split,
    is_one_rank,
    model_is_not_mla,
    draft_may_have_heads,
    something_is_unknown,
)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
