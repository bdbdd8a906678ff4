"""Preflight: would our connector break or change this engine? Then vLLM runs as if we were not there.

Runs in every vLLM process that builds a configuration, called by `kvoffload_engine.plugin` with the configuration
that the user asked for. A connector is not neutral: each check names one thing that vLLM does differently, or not at
all, with one. `observe_engine` reads facts from vLLM's configuration, `first_obstacle` is pure.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvoffload.layout.gate import SUPPORTED_EXECUTORS
from kvoffload_engine import compat

DEVICES = frozenset({"cpu", "cuda"})
"""vLLM's device types whose KV caches we can copy; `cuda` is ROCm's too."""


class PreflightReason(str, Enum):
    """Why an engine is left alone; a closed set."""

    UNSUPPORTED_VERSION = "UnsupportedVersion"
    MISSING_NAME = "MissingName"
    OTHER_CONNECTOR = "OtherConnector"
    NATIVE_OFFLOAD = "NativeOffload"
    EXECUTOR_UNSUPPORTED = "ExecutorUnsupported"
    MULTI_NODE = "MultiNode"
    DEVICE_UNSUPPORTED = "DeviceUnsupported"
    EXPANDABLE_SEGMENTS = "ExpandableSegments"
    REPLAY_SSM = "ReplaySSM"
    ENCODER_DECODER = "EncoderDecoder"
    NOT_GENERATING = "NotGenerating"
    HOST_RESIDENT_CACHE = "HostResidentCache"
    PREFIX_MATCH_UNIT = "PrefixMatchUnit"
    CONFIGURATION_FAILED = "ConfigurationFailed"
    PLUGIN_ERROR = "PluginError"
    CONNECTOR_FAILED = "ConnectorFailed"
    WORKERS_DIFFER = "WorkersDiffer"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What of the user's configuration a connector would meet."""

    connector: str | None
    native_offload: bool
    executor: str
    num_nodes: int
    device: str
    allocator_configuration: str
    has_cumem_allocator: bool
    uses_replay_ssm: bool
    is_encoder_decoder: bool
    runner: str
    has_host_resident_cache: bool
    has_prefix_match_unit: bool
    prefix_caching: bool


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The first reason to leave the engine alone, with what was found and what would help."""

    reason: PreflightReason
    message: str


Check = Callable[[EngineFacts], Obstacle | None]


def has_other_connector(facts: EngineFacts) -> Obstacle | None:
    """The user chose a connector: vLLM has room for one."""
    if facts.connector is None:
        return None
    return Obstacle(
        PreflightReason.OTHER_CONNECTOR,
        f"kv_transfer_config names {facts.connector}; it is left alone: remove it to offload",
    )


def has_native_offload(facts: EngineFacts) -> Obstacle | None:
    """`--kv-offloading-size` sets vLLM's own connector, over any other."""
    if not facts.native_offload:
        return None
    return Obstacle(
        PreflightReason.NATIVE_OFFLOAD,
        "--kv-offloading-size is set: vLLM's own offload runs; remove it to use the pool",
    )


def has_unsupported_executor(facts: EngineFacts) -> Obstacle | None:
    """Ray's workers stand elsewhere; external launchers run a scheduler in each rank."""
    if facts.executor in SUPPORTED_EXECUTORS:
        return None
    return Obstacle(
        PreflightReason.EXECUTOR_UNSUPPORTED,
        f"executor is {facts.executor!r}, needed {' or '.join(sorted(SUPPORTED_EXECUTORS))}: "
        "start vLLM with --distributed-executor-backend mp",
    )


def spans_several_nodes(facts: EngineFacts) -> Obstacle | None:
    """A region belongs to one node."""
    if facts.num_nodes == 1:
        return None
    return Obstacle(PreflightReason.MULTI_NODE, f"the engine spans {facts.num_nodes} nodes, needed 1")


def has_unsupported_device(facts: EngineFacts) -> Obstacle | None:
    """We copy from host memory and by CUDA's (or ROCm's) batched copies."""
    if facts.device in DEVICES:
        return None
    return Obstacle(
        PreflightReason.DEVICE_UNSUPPORTED, f"device is {facts.device!r}, needed {' or '.join(sorted(DEVICES))}"
    )


def has_expandable_segments(facts: EngineFacts) -> Obstacle | None:
    """vLLM refuses any connector then: the allocator may move the KV cache to other pages."""
    if "expandable_segments:True" not in facts.allocator_configuration or facts.has_cumem_allocator:
        return None
    return Obstacle(
        PreflightReason.EXPANDABLE_SEGMENTS,
        "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: unset it, or enable the cumem allocator",
    )


def uses_replay_ssm(facts: EngineFacts) -> Obstacle | None:
    """vLLM refuses any connector with it."""
    if not facts.uses_replay_ssm:
        return None
    return Obstacle(PreflightReason.REPLAY_SSM, "--use-replayssm does not go with a connector: remove it to offload")


def is_encoder_decoder(facts: EngineFacts) -> Obstacle | None:
    """vLLM's scheduler asserts that there is no connector."""
    if not facts.is_encoder_decoder:
        return None
    return Obstacle(PreflightReason.ENCODER_DECODER, "encoder-decoder models do not go with a connector")


def is_not_generating(facts: EngineFacts) -> Obstacle | None:
    """Pooling and draft runners have no KV cache that outlives a request."""
    if facts.runner == "generate":
        return None
    return Obstacle(PreflightReason.NOT_GENERATING, f"the runner is {facts.runner!r}, needed 'generate'")


def has_host_resident_cache(facts: EngineFacts) -> Obstacle | None:
    """HiSparse keeps its KV in host memory already."""
    if not facts.has_host_resident_cache:
        return None
    return Obstacle(PreflightReason.HOST_RESIDENT_CACHE, "HiSparse keeps the KV cache in host memory already")


def has_prefix_match_unit(facts: EngineFacts) -> Obstacle | None:
    """With a connector vLLM validates this setting also where prefix caching is off, and may raise."""
    if not facts.has_prefix_match_unit or facts.prefix_caching:
        return None
    return Obstacle(
        PreflightReason.PREFIX_MATCH_UNIT, "prefix_match_unit is set while prefix caching is off: unset it to offload"
    )


CHECKS: tuple[Check, ...] = (
    has_other_connector,
    has_native_offload,
    has_unsupported_executor,
    spans_several_nodes,
    has_unsupported_device,
    has_expandable_segments,
    uses_replay_ssm,
    is_encoder_decoder,
    is_not_generating,
    has_host_resident_cache,
    has_prefix_match_unit,
)


def first_obstacle(facts: EngineFacts) -> Obstacle | None:
    """The first check that fails, None where the connector can be set."""
    for check in CHECKS:
        obstacle = check(facts)
        if obstacle is not None:
            return obstacle
    return None


def observe_engine(config: Any, environment: Mapping[str, str] = os.environ) -> EngineFacts:
    """Read the facts from a VllmConfig."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    transfer = config.kv_transfer_config
    return EngineFacts(
        connector=transfer.kv_connector if transfer is not None else None,
        native_offload=cache.kv_offloading_size is not None,
        executor=compat.executor_name(parallel),
        num_nodes=compat.num_nodes(parallel),
        device=str(config.device_config.device_type),
        allocator_configuration=environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
        + environment.get("PYTORCH_ALLOC_CONF", ""),
        has_cumem_allocator=bool(model.enable_cumem_allocator),
        uses_replay_ssm=bool(cache.use_replayssm),
        is_encoder_decoder=bool(model.is_encoder_decoder),
        runner=str(model.runner_type),
        has_host_resident_cache=compat.has_host_resident_cache(config),
        has_prefix_match_unit=cache.prefix_match_unit is not None,
        prefix_caching=bool(cache.enable_prefix_caching),
    )
