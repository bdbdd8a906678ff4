"""Each thing that a connector would break or change is one check, and leaves the engine alone."""

import dataclasses
from types import SimpleNamespace

import pytest

from kvoffload_engine.preflight import EngineFacts, PreflightReason, first_obstacle, observe_engine

FINE = EngineFacts(
    connector=None,
    native_offload=False,
    executor="mp",
    num_nodes=1,
    device="cuda",
    allocator_configuration="",
    has_cumem_allocator=False,
    uses_replay_ssm=False,
    is_encoder_decoder=False,
    runner="generate",
    has_host_resident_cache=False,
    has_prefix_match_unit=False,
    prefix_caching=True,
)


def test_a_plain_engine_is_attached() -> None:
    assert first_obstacle(FINE) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"connector": "NixlConnector"}, PreflightReason.OTHER_CONNECTOR),
        ({"native_offload": True}, PreflightReason.NATIVE_OFFLOAD),
        ({"executor": "ray"}, PreflightReason.EXECUTOR_UNSUPPORTED),
        ({"executor": "external_launcher"}, PreflightReason.EXECUTOR_UNSUPPORTED),
        ({"executor": "MyExecutor"}, PreflightReason.EXECUTOR_UNSUPPORTED),
        ({"num_nodes": 2}, PreflightReason.MULTI_NODE),
        ({"device": "tpu"}, PreflightReason.DEVICE_UNSUPPORTED),
        ({"allocator_configuration": "expandable_segments:True"}, PreflightReason.EXPANDABLE_SEGMENTS),
        ({"uses_replay_ssm": True}, PreflightReason.REPLAY_SSM),
        ({"is_encoder_decoder": True}, PreflightReason.ENCODER_DECODER),
        ({"runner": "pooling"}, PreflightReason.NOT_GENERATING),
        ({"has_host_resident_cache": True}, PreflightReason.HOST_RESIDENT_CACHE),
        ({"has_prefix_match_unit": True, "prefix_caching": False}, PreflightReason.PREFIX_MATCH_UNIT),
    ],
)
def test_what_a_connector_would_break_is_left_alone(change: dict[str, object], reason: PreflightReason) -> None:
    obstacle = first_obstacle(dataclasses.replace(FINE, **change))
    assert obstacle is not None
    assert obstacle.reason is reason
    assert obstacle.message


@pytest.mark.parametrize(
    "change",
    [
        {"allocator_configuration": "expandable_segments:True", "has_cumem_allocator": True},
        {"allocator_configuration": "expandable_segments:False"},
        {"has_prefix_match_unit": True},
        {"prefix_caching": False},
        {"executor": "uni"},
        {"device": "cpu"},
    ],
)
def test_what_a_connector_does_not_break_is_attached(change: dict[str, object]) -> None:
    assert first_obstacle(dataclasses.replace(FINE, **change)) is None


def vllm_config(**changes: object) -> SimpleNamespace:
    """The attributes that every supported version has; newer ones may be missing."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=False, runner_type="generate", enable_cumem_allocator=False),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, kv_offloading_size=None, use_replayssm=False, prefix_match_unit=None
        ),
        attention_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", nnodes_within_dp=1),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
    )
    for name, value in changes.items():
        section, _, attribute = name.partition("__")
        setattr(getattr(config, section) if attribute else config, attribute or section, value)
    return config


def test_facts_are_read_from_a_configuration_that_lacks_what_newer_versions_have() -> None:
    assert observe_engine(vllm_config(), {}) == dataclasses.replace(FINE, device="cpu")


def test_facts_see_the_users_settings() -> None:
    facts = observe_engine(
        vllm_config(
            kv_transfer_config=SimpleNamespace(kv_connector="LMCacheConnector"),
            cache_config__kv_offloading_size=4.0,
            cache_config__use_replayssm=True,
            cache_config__prefix_match_unit=64,
            parallel_config__distributed_executor_backend=None,
            parallel_config__nnodes_within_dp=2,
            model_config__enable_cumem_allocator=True,
            attention_config=SimpleNamespace(hisparse_config=object()),
        ),
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    assert facts.connector == "LMCacheConnector"
    assert facts.native_offload
    assert facts.uses_replay_ssm
    assert facts.has_prefix_match_unit
    assert facts.executor == "uni"
    assert facts.num_nodes == 2
    assert facts.has_cumem_allocator
    assert facts.has_host_resident_cache
    assert "expandable_segments:True" in facts.allocator_configuration
