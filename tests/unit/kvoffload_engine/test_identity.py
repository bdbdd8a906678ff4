"""Case 4: one setting changed at a time changes the identity; names that mean nothing for the bytes do not."""

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.layout.fingerprint import Fingerprint
from kvoffload.layout.gate import LayerFacts
from kvoffload_engine.environment import WEIGHTS_ID_VARIABLE
from kvoffload_engine.identity import (
    QUANTIZING_VARIABLES,
    collect_identity,
    common_identity,
    seed_of_keys,
    weights_identity,
)


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


MODEL_DEFAULTS: dict[str, Any] = {
    "model_weights": "",
    "code_revision": None,
    "hf_config_path": None,
    "model_impl": "auto",
    "model_class_overrides": {},
    "quantization_config": None,
    "original_max_model_len": None,
    "generation_config": "auto",
    "override_generation_config": {},
}
SPEC = {"block_size": "16", "dtype": "torch.bfloat16", "cache_dtype_str": "auto"}
PAGE_LAYOUTS = {"attention": "LBHNC", "convolution": "SD", "shuffled": "False", "device": "cuda 9.0"}


KEY = "original_max_position_embeddings"


class Color(Enum):
    RED = 1
    BLUE = 2


def fields_of_identity(**changes: Any) -> Fingerprint:
    """The identity of one engine with single settings changed, named `section__attribute` or as collect_identity
    does."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            hf_config=HfConfig(
                architectures=["DeepseekV2ForCausalLM"],
                rope_parameters={"rope_theta": 10000.0, "factor": 1.0},
                kv_lora_rank=512,
                _commit_hash="c1",
                _name_or_path="/models/a",
                transformers_version="5.0",
            ),
            dtype="torch.bfloat16",
            quantization=None,
            hf_overrides={},
            served_model_name="a",
            max_model_len=4096,
            **MODEL_DEFAULTS,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            dcp_kv_cache_interleave_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=8,
            rank=0,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", gpu_memory_utilization=0.9),
        load_config=SimpleNamespace(
            load_format="auto", model_loader_extra_config={}, ignore_patterns=["original/**/*"]
        ),
        attention_config=SimpleNamespace(indexer_kv_dtype="auto", use_non_causal=False),
        speculative_config=None,
        use_v2_model_runner=False,
        kv_transfer_config=SimpleNamespace(engine_id="1"),
    )
    arguments: dict[str, Any] = {
        "vllm_version_minor": (0, 32),
        "layers": [LayerFacts("l0", "MLAAttentionSpec", 18432), LayerFacts("l1", "MLAAttentionSpec", 18432)],
        "groups": [(16, ["l0", "l1"])],
        "page_table": [[(0, 18432), (1, 18432)]],
        "blocks_per_chunk": 1,
        "tokens_per_hash": 16,
        "specs": [SPEC, SPEC],
        "page_layouts": PAGE_LAYOUTS,
        "attention_backends": ["FLASHMLA"],
        "has_checksums": False,
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        if not path and last in arguments:
            arguments[last] = value
            continue
        target: Any = config
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return collect_identity(vllm_config=config, **arguments)


def identity(**changes: Any) -> bytes:
    """Its digest."""
    return fields_of_identity(**changes).digest


@dataclass
class QuantizationArguments:
    linear: str = "fp8"


def speculative(
    method: str = "eagle",
    *,
    draft: str = "",
    commit: str = "c1",
    quantization: str | None = None,
    num_tokens: int = 1,
    load_format: str = "",
    **config: Any,
) -> SimpleNamespace:
    model = SimpleNamespace(
        model=draft,
        revision=None,
        hf_config=HfConfig(_commit_hash=commit, **config),
        dtype="torch.bfloat16",
        quantization=quantization,
        hf_overrides={},
        max_model_len=4096,
        **MODEL_DEFAULTS,
    )
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config={}, ignore_patterns=[])
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=num_tokens,
        draft_model_config=model if draft else None,
        draft_load_config=load if load_format else None,
    )


INTERLEAVED = {
    "parallel_config__decode_context_parallel_size": 2,
    "parallel_config__cp_kv_cache_interleave_size": 16,
}
MATTERS = {
    "tensor parallel size": {"parallel_config__tensor_parallel_size": 4, "parallel_config__world_size": 4},
    "block size": {"groups": [(32, ["l0", "l1"])]},
    "hash size": {"tokens_per_hash": 32},
    "chunk size": {"blocks_per_chunk": 4},
    "KV dtype asked for": {"cache_config__cache_dtype": "fp8"},
    "KV dtype as resolved by the workers": {"specs": [SPEC, SPEC | {"cache_dtype_str": "fp8_ds_mla"}]},
    "dtype of a Mamba state in a page of the same length": {"specs": [SPEC, SPEC | {"dtypes": "(torch.float16,)"}]},
    "attention backend": {"attention_backends": ["TRITON_MLA"]},
    "KV dtype of an indexer": {"attention_config__indexer_kv_dtype": "fp8"},
    "attention to what comes later": {"attention_config__use_non_causal": True},
    "rope factor": {"model_config__hf_config__rope_parameters": {"rope_theta": 10000.0, "factor": 4.0}},
    "architecture": {"model_config__hf_config__architectures": ["OtherForCausalLM"]},
    "commit of the model": {"model_config__hf_config___commit_hash": "c2"},
    "model": {"model_config__model": "org/other"},
    "weights' dtype": {"model_config__dtype": "torch.float16"},
    "load format": {"load_config__load_format": "dummy"},
    "quantization": {"model_config__quantization": "fp8"},
    "overrides": {"model_config__hf_overrides": {"rope_theta": 1e6}},
    "KV layout": {"page_layouts": PAGE_LAYOUTS | {"attention": "BLHNC"}},
    "layout of Mamba's convolution": {"page_layouts": PAGE_LAYOUTS | {"convolution": "DS"}},
    "ROCm's shuffled pages": {"page_layouts": PAGE_LAYOUTS | {"shuffled": "True"}},
    "kind of device": {"page_layouts": PAGE_LAYOUTS | {"device": "cuda 9.4"}},
    "pipeline of ranks": {"parallel_config__pipeline_parallel_size": 2},
    "context parallelism": {"parallel_config__decode_context_parallel_size": 2},
    "prefill's context parallelism": {"parallel_config__prefill_context_parallel_size": 2},
    "tokens in a row with one rank": INTERLEAVED,
    "tokens in a row with one rank, by the older name": {
        "parallel_config__decode_context_parallel_size": 2,
        "parallel_config__dcp_kv_cache_interleave_size": 16,
    },
    "tokens in a row with one rank of a prefill": {
        "parallel_config__prefill_context_parallel_size": 2,
        "parallel_config__cp_kv_cache_interleave_size": 16,
    },
    "where the weights are pulled from": {"model_config__model_weights": "s3://bucket/other"},
    "the loader's own settings": {"load_config__model_loader_extra_config": {"tensorizer_uri": "s3://bucket/other"}},
    "files that are not loaded": {"load_config__ignore_patterns": ["consolidated*"]},
    "commit of the model's code": {"model_config__code_revision": "c3"},
    "implementation of the model": {"model_config__model_impl": "transformers"},
    "another class for an architecture": {"model_config__model_class_overrides": {"A": "module:B"}},
    "what is quantized": {"model_config__quantization_config": QuantizationArguments()},
    "revision of weights whose configuration is another's": {
        "model_config__hf_config_path": "org/config",
        "model_config__revision": "c4",
    },
    "the same, of another revision": {
        "model_config__hf_config_path": "org/config",
        "model_config__revision": "c5",
    },
    "model runner": {"use_v2_model_runner": True},
    "hash algorithm": {"cache_config__prefix_caching_hash_algo": "xxhash"},
    "vLLM minor": {"vllm_version_minor": (0, 31)},
    "a layer's class": {
        "layers": [LayerFacts("l0", "MLAAttentionSpec", 18432), LayerFacts("l1", "FullAttentionSpec", 18432)]
    },
    "a layer's page bytes": {"page_table": [[(0, 18432), (1, 9216)]]},
    "order of layers": {"groups": [(16, ["l1", "l0"])]},
    "checksums": {"has_checksums": True},
    "speculative method": {"speculative_config": speculative("ngram")},
    "a draft model": {"speculative_config": speculative(draft="org/draft")},
    "commit of the draft": {"speculative_config": speculative(draft="org/draft", commit="c2")},
    "quantization of the draft": {"speculative_config": speculative(draft="org/draft", quantization="fp8")},
    "configuration of the draft": {"speculative_config": speculative(draft="org/draft", num_hidden_layers=2)},
    "how many tokens are drafted": {"speculative_config": speculative(draft="org/draft", num_tokens=3)},
    "format of the draft's weights": {"speculative_config": speculative(draft="org/draft", load_format="dummy")},
}


@pytest.mark.parametrize("changes", MATTERS.values(), ids=MATTERS.keys())
def test_a_setting_that_changes_bytes_or_keys_changes_the_identity(changes: dict[str, Any]) -> None:
    assert identity(**changes) != identity()


def test_every_one_of_these_settings_is_another_identity() -> None:
    digests = [identity(**changes) for changes in MATTERS.values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__served_model_name": "b"},
        {"model_config__hf_config___name_or_path": "/models/b"},
        {"model_config__hf_config__transformers_version": "5.1"},
        {"kv_transfer_config__engine_id": "2"},
        {"parallel_config__rank": 3},
        {"cache_config__gpu_memory_utilization": 0.5},
    ],
    ids=["served name", "where the model lies", "transformers", "engine id", "rank", "GPU memory"],
)
def test_a_setting_that_changes_nothing_shares(changes: dict[str, Any]) -> None:
    assert identity(**changes) == identity()


OTHER_STAGE = {
    "layers": [LayerFacts("l2", "FullAttentionSpec", 9216)],
    "groups": [(16, ["l2"])],
    "page_table": [[(0, 9216)]],
    "kv_dtypes": ["torch.uint8/fp8"],
    "attention_backends": ["FLASH_ATTN"],
}


def test_pipeline_stages_have_an_identity_in_common_that_other_settings_change() -> None:
    ours = common_identity(fields_of_identity())
    assert common_identity(fields_of_identity(**OTHER_STAGE)).digest == ours.digest
    assert common_identity(fields_of_identity(cache_config__cache_dtype="fp8")).digest != ours.digest


def test_keys_are_bound_to_what_each_stage_holds_and_to_vllms_own_seed_alone_where_there_is_one_stage() -> None:
    one, other = identity(), identity(**OTHER_STAGE)
    assert seed_of_keys(b"none", [one]) == b"none"
    seeds = [
        seed_of_keys(seed, stages)
        for seed in (b"none", b"other")
        for stages in ([one, other], [other, one], [one, one])
    ]
    assert len(set(seeds)) == len(seeds)
    assert max(map(len, seeds)) <= 64  # what `Bind` takes


def test_the_log_says_at_debug_what_an_identity_is_made_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="vllm.kvoffload"):
        digest = identity(cache_config__cache_dtype="fp8")
    (line,) = caplog.messages
    assert digest.hex() in line
    assert '"kv_cache_dtype": "fp8"' in line


PHI = {
    "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096, "long_factor": [1.0, 2.0]}
}
PHI_OF_TWO_KINDS = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 8192},
    }
}
INNER_PHI = {"text_config": HfConfig(rope_scaling={"type": "longrope", "factor": 2.0}, **{KEY: 4096})}
LLAMA_4 = {"text_config": {"attn_temperature_tuning": True}}


def identity_of_length(max_model_len: int, model: dict[str, Any], **changes: Any) -> bytes:
    """The identity of an engine with this longest request, whose model's configuration has these values more."""
    values = {f"model_config__hf_config__{name}": value for name, value in model.items()}
    return identity(model_config__max_model_len=max_model_len, **values, **changes)


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [
        (PHI, 4096, 4097),
        (PHI_OF_TWO_KINDS, 8192, 16384),
        (INNER_PHI, 4096, 8192),
        ({"rope_parameters": {"rope_type": "longrope"}}, 4096, 8192),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 4096, 8192),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, 4096, 8192),
        (LLAMA_4, 32768, 32769),
    ],
    ids=["longrope", "longrope in one kind of layer", "longrope inside", "no length", "dynamic", "su", "temperature"],
)
def test_the_longest_request_matters_where_keys_depend_on_it(model: dict[str, Any], one: int, other: int) -> None:
    assert identity_of_length(one, model) != identity_of_length(other, model)


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [
        ({}, 2048, 131072),
        (PHI, 2048, 4096),
        (PHI, 8192, 131072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 2048, 131072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048, 131072),
    ],
    ids=["no rope scaling", "longrope, both short", "longrope, both long", "yarn", "llama3"],
)
def test_the_longest_request_does_not_matter_where_no_key_depends_on_it(
    model: dict[str, Any], one: int, other: int
) -> None:
    assert identity_of_length(one, model) == identity_of_length(other, model)


def test_a_length_fitted_to_the_memory_is_not_that_of_the_model_as_it_was_built() -> None:
    for model in (PHI, LLAMA_4):
        fitted = identity_of_length(2048, model, model_config__original_max_model_len=-1)
        assert fitted != identity_of_length(2048, model, model_config__original_max_model_len=2048)
    assert identity(model_config__original_max_model_len=-1) == identity()


def test_who_says_how_queries_are_scaled_matters_where_they_are() -> None:
    tuned = {"model_config__override_generation_config": {"attn_temperature_tuning": False}}
    assert identity_of_length(2048, LLAMA_4, **tuned) != identity_of_length(2048, LLAMA_4)
    assert identity(**tuned) == identity()


def test_how_tokens_are_interleaved_matters_only_where_ranks_share_them_out() -> None:
    alone = {name: value for name, value in INTERLEAVED.items() if "interleave" in name}
    assert identity(**alone) == identity()


def test_values_inside_a_configuration_count_as_they_are_and_odd_ones_by_their_type() -> None:
    def of(value: Any) -> bytes:
        return identity(model_config__hf_config__thing=value)

    assert of(HfConfig(one=1)) != of(HfConfig(one=2))
    assert of([HfConfig(one=1)]) != of([HfConfig(one=2)])
    assert of(Color.RED) != of(Color.BLUE)
    assert of(QuantizationArguments("fp8")) != of(QuantizationArguments("int8"))
    assert of(object()) == of(object())


@pytest.mark.parametrize("name", QUANTIZING_VARIABLES)
def test_a_variable_that_quantizes_weights_is_part_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = identity()
    monkeypatch.setenv(name, "1")
    assert identity() != plain


def folder_of_weights(folder: Path, content: bytes = b"weights", nanoseconds: int = 10**18) -> str:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(nanoseconds, nanoseconds))
    (folder / "README.md").write_text(folder.name)
    return weights_identity(str(folder), None)


def test_a_local_folder_is_its_files_and_not_its_path(tmp_path: Path) -> None:
    one = folder_of_weights(tmp_path / "one")
    assert one == folder_of_weights(tmp_path / "two")
    assert one != folder_of_weights(tmp_path / "longer", content=b"more weights")
    assert one != folder_of_weights(tmp_path / "later", nanoseconds=2 * 10**18)


def test_an_explicit_weights_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of_weights(tmp_path / "one")
    folder_of_weights(tmp_path / "two", content=b"other")
    monkeypatch.setenv(WEIGHTS_ID_VARIABLE, "release-7")
    one = identity(model_config__model=str(tmp_path / "one"))
    assert one == identity(model_config__model=str(tmp_path / "two"))
    monkeypatch.setenv(WEIGHTS_ID_VARIABLE, "release-8")
    assert one != identity(model_config__model=str(tmp_path / "one"))


def test_a_model_in_one_file_is_that_file_and_not_its_path(tmp_path: Path) -> None:
    def file_of(folder: str, content: bytes) -> str:
        path = tmp_path / folder / "model.gguf"
        path.parent.mkdir()
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))
        return weights_identity(str(path), None)

    one = file_of("one", b"weights")
    assert one == file_of("two", b"weights")
    assert one != file_of("longer", b"more weights")


def test_code_in_the_folder_is_part_of_the_model(tmp_path: Path) -> None:
    one = folder_of_weights(tmp_path / "one")
    folder_of_weights(tmp_path / "two")
    (tmp_path / "two" / "modeling_own.py").write_text("")
    assert one != weights_identity(str(tmp_path / "two"), None)
