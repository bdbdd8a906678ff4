"""Case 4: one setting changed at a time changes the identity; names that mean nothing for the bytes do not."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.layout.fingerprint import Fingerprint
from kvoffload.layout.gate import LayerFacts
from kvoffload_engine.environment import WEIGHTS_ID_VARIABLE
from kvoffload_engine.identity import collect_identity, common_identity, seed_of_keys, weights_identity


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


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
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=8,
            rank=0,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_cache_layout="LBHNC", prefix_caching_hash_algo="sha256", gpu_memory_utilization=0.9
        ),
        load_config=SimpleNamespace(load_format="auto"),
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
        "kv_dtypes": ["torch.bfloat16/auto"],
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


MATTERS = {
    "tensor parallel size": {"parallel_config__tensor_parallel_size": 4, "parallel_config__world_size": 4},
    "block size": {"groups": [(32, ["l0", "l1"])]},
    "hash size": {"tokens_per_hash": 32},
    "chunk size": {"blocks_per_chunk": 4},
    "KV dtype asked for": {"cache_config__cache_dtype": "fp8"},
    "KV dtype as resolved by the workers": {"kv_dtypes": ["torch.uint8/fp8_ds_mla"]},
    "attention backend": {"attention_backends": ["TRITON_MLA"]},
    "rope factor": {"model_config__hf_config__rope_parameters": {"rope_theta": 10000.0, "factor": 4.0}},
    "architecture": {"model_config__hf_config__architectures": ["OtherForCausalLM"]},
    "commit of the model": {"model_config__hf_config___commit_hash": "c2"},
    "model": {"model_config__model": "org/other"},
    "weights' dtype": {"model_config__dtype": "torch.float16"},
    "load format": {"load_config__load_format": "dummy"},
    "quantization": {"model_config__quantization": "fp8"},
    "overrides": {"model_config__hf_overrides": {"rope_theta": 1e6}},
    "KV layout name": {"cache_config__kv_cache_layout": "BLHNC"},
    "model runner": {"use_v2_model_runner": True},
    "hash algorithm": {"cache_config__prefix_caching_hash_algo": "xxhash"},
    "vLLM minor": {"vllm_version_minor": (0, 31)},
    "a layer's class": {
        "layers": [LayerFacts("l0", "MLAAttentionSpec", 18432), LayerFacts("l1", "FullAttentionSpec", 18432)]
    },
    "a layer's page bytes": {"page_table": [[(0, 18432), (1, 9216)]]},
    "order of layers": {"groups": [(16, ["l1", "l0"])]},
    "checksums": {"has_checksums": True},
    "speculative method": {"speculative_config": SimpleNamespace(method="ngram")},
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


def test_draft_weights_are_part_of_it() -> None:
    def draft(commit: str) -> bytes:
        model = SimpleNamespace(model="org/draft", revision=None, hf_config=SimpleNamespace(_commit_hash=commit))
        return identity(speculative_config=SimpleNamespace(method="eagle", draft_model_config=model))

    assert len({draft("a"), draft("b"), identity()}) == 3


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
