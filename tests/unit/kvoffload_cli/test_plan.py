"""`kubectl kvoffload plan`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvoffload.api.pool import KVOffloadPool
from kvoffload.errors import InvalidSpec
from kvoffload.layout.gate import LayoutDecision, LayoutReason
from kvoffload.layout.model_bytes import read_shape
from kvoffload_cli.__main__ import app
from kvoffload_cli.models import read_config
from kvoffload_cli.sizing import GIB, Engine, default_capacity, parse_quota, plan_sizing

DEEPSEEK_V3 = read_shape(read_config("deepseek-ai/DeepSeek-V3")[0])
LLAMA_70B = read_shape(read_config("meta-llama/Llama-3.1-70B-Instruct")[0])

GOLDEN_PLANS = {
    "plan-deepseek-v3": ["--model", "deepseek-ai/DeepSeek-V3", "--tp", "8", "--node-memory", "1Ti"],
    "plan-kimi-k2-1gi": [
        *("--model", "moonshotai/Kimi-K2-Instruct", "--tp", "16", "--nodes", "1", "--node-memory", "2Ti"),
        *("--page-size", "1Gi", "--quota", "team-a=256Gi:512Gi", "--quota", "team-b=64Gi"),
    ],
    "plan-llama-70b-tp4": ["--model", "meta-llama/Llama-3.1-70B-Instruct", "--tp", "4", "--capacity", "400Gi"],
    "plan-llama-70b-tp16": ["--model", "meta-llama/Llama-3.1-70B-Instruct", "--tp", "16", "--capacity", "400Gi"],
    "plan-deepseek-v32-fp8": [
        *("--model", "deepseek-ai/DeepSeek-V3.2", "--tp", "8", "--kv-dtype", "fp8", "--capacity", "512Gi"),
        "--never-replicated",
    ],
}


TINY = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def run_plan(*arguments: str) -> str:
    result = CliRunner().invoke(
        app, ["plan", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_text_is_the_golden_one(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", run_plan(*GOLDEN_PLANS[name]))


def test_json_holds_the_same_figures(golden: Callable[[str, str], None]) -> None:
    text = run_plan(*GOLDEN_PLANS["plan-deepseek-v3"], "-o", "json")
    golden("plan-deepseek-v3.json", text)
    document = json.loads(text)
    assert document["bytesPerToken"] == 70_272
    assert document["tokens"] == document["blocks"] * 64
    assert document["layout"] == LayoutDecision.REPLICATED.value


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_manifest_is_a_valid_pool_with_the_planned_pages(name: str) -> None:
    document = json.loads(run_plan(*GOLDEN_PLANS[name], "-o", "json"))
    spec = KVOffloadPool.from_manifest(yaml.safe_load(document["manifest"])).spec
    assert spec.capacity == document["capacityBytes"]
    assert spec.capacity == document["pages"] * spec.page_size.num_bytes
    assert [quota.namespace for quota in spec.quotas] == [quota["namespace"] for quota in document["quotas"]]


def test_a_quota_never_promises_more_tokens_than_fit() -> None:
    document = json.loads(run_plan(*GOLDEN_PLANS["plan-kimi-k2-1gi"], "-o", "json"))
    assert document["quotas"][1]["limit_tokens"] == document["tokens"]


def test_a_config_json_is_enough(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read_config("deepseek-ai/DeepSeek-V3")[0]))
    assert "70,272 per token" in run_plan("--model", str(tmp_path), "--tp", "2", "--capacity", "64Gi")
    assert "70,272 per token" in run_plan("--model", str(config), "--tp", "2", "--capacity", "64Gi")


@pytest.mark.parametrize(
    "config",
    [b"", b"[" * 100_000, b"\xff\xfe{}", json.dumps({**TINY, "num_hidden_layers": 10**30}).encode()],
    ids=["empty", "deep", "no text", "layers without end"],
)
def test_a_config_json_that_makes_no_sense_is_refused(tmp_path: Path, config: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(config)
    with pytest.raises(InvalidSpec):
        read_shape(read_config(str(path))[0])


def test_newest_snapshot_of_the_local_hub_cache_is_found(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    config, source = read_config("some/model", hub_cache=tmp_path)
    assert config == {"model_type": "llama"}
    assert source == str(snapshot / "config.json")


def test_a_folder_without_a_configuration_is_not_said_to_be_absent(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=rf"^{tmp_path} has no config\.json; give the folder of a model"):
        read_config(str(tmp_path), hub_cache=tmp_path)


def test_unknown_model_says_what_to_give() -> None:
    with pytest.raises(InvalidSpec, match=r"give the path of its config\.json"):
        read_config("no/such-model", hub_cache=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quota", "a=1:0"], "needed guaranteed <= limit <= capacity"),
        (["--quota", "a=3Gi", "--quota", "b=2Gi"], "spec.quotas: 5Gi are guaranteed in all, the capacity is 4Gi"),
        (["--quota", "a=1Gi", "--quota", "a=1Gi"], "spec.quotas[1].namespace: a has a quota already"),
        (["--quota", f"{'n' * 64}=1Gi"], "spec.quotas[0].namespace: String should have at most 63 characters"),
        (["--quota", "Team A: {=1Gi"], "spec.quotas[0].namespace: String should match pattern"),
        ([f"--quota=n{number}=1Mi" for number in range(129)], "spec.quotas: List should have at most 128 items"),
        (["--pool", "p" * 300], "(300 characters) is no DNS label of at most 40 characters"),
        (["--pool", "a\n  labels: {b: c}"], "metadata.name"),
        (["--pool", ""], "(0 characters) is no DNS label"),
        (["--tp", "1000000"], "1000000 ranks; the node daemon takes at most 64 of an engine"),
        (["--tp", "8", "--pp", "1000000"], "8000000 ranks"),
    ],
)
def test_a_manifest_that_the_api_server_would_refuse_is_not_printed(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "deepseek-ai/DeepSeek-V3", "--capacity", "4Gi", *arguments])
    assert isinstance(result.exception, InvalidSpec), result.output
    assert message in str(result.exception)
    assert len(str(result.exception)) < 600
    assert result.stdout == ""


def test_names_that_yaml_would_take_for_something_else_are_quoted() -> None:
    text = run_plan(*GOLDEN_PLANS["plan-deepseek-v3"], "--pool", "123", "--quota=on=1Gi", "--quota=1e3=1Gi")
    assert 'name: "123"' in text
    assert 'namespace: "on"' in text
    assert 'namespace: "1e3"' in text


def test_neither_capacity_nor_memory_is_refused() -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "deepseek-ai/DeepSeek-V3"])
    assert result.exit_code == 2
    assert "--node-memory" in result.output


def test_both_capacity_and_memory_are_refused() -> None:
    arguments = ["--model", "deepseek-ai/DeepSeek-V3", "--capacity", "4Gi", "--node-memory", "1Ti"]
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert "not both" in result.output


def test_ranks_that_do_not_divide_the_heads_are_refused_as_vllm_does() -> None:
    with pytest.raises(InvalidSpec, match="--tp 3 does not divide the model's 64 attention heads"):
        plan_sizing(Engine(shape=LLAMA_70B, tensor_parallel=3), capacity_bytes=GIB, page_name="2Mi")


def test_kv_heads_that_do_not_divide_are_said(tmp_path: Path) -> None:
    config = {**TINY, "num_hidden_layers": 2, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "note: 8 KV heads and --tp 12 do not divide" in run_plan(
        "--model", str(tmp_path), "--tp", "12", "--capacity", "4Gi"
    )
    assert "do not divide" not in run_plan("--model", str(tmp_path), "--tp", "16", "--capacity", "4Gi")


def test_the_planned_pool_runs_on_tainted_gpu_nodes() -> None:
    """By the API's own default, which the manifest leaves as it is."""
    document = json.loads(run_plan(*GOLDEN_PLANS["plan-deepseek-v3"], "-o", "json"))
    pool = KVOffloadPool.from_manifest(yaml.safe_load(document["manifest"]))
    (toleration,) = pool.spec.tolerations
    assert (toleration.key, toleration.operator, toleration.effect) == ("nvidia.com/gpu", "Exists", "NoSchedule")


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_a_replicated_pool_holds_the_same_tokens_for_any_number_of_ranks(tp: int) -> None:
    plan = plan_sizing(
        Engine(shape=DEEPSEEK_V3, tensor_parallel=tp, block_tokens=64), capacity_bytes=512 * GIB, page_name="1Gi"
    )
    assert plan.num_tokens == 512 * (GIB // (70_272 * 64)) * 64
    assert plan.plain_num_slots == 512 * GIB // (70_272 * 64 * tp)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Engine(shape=DEEPSEEK_V3, tensor_parallel=8), LayoutReason.REPLICATED),
        (Engine(shape=DEEPSEEK_V3, tensor_parallel=1), LayoutReason.ONE_RANK),
        (Engine(shape=DEEPSEEK_V3, tensor_parallel=8, pipeline_parallel=2), LayoutReason.PIPELINE_PARALLEL),
        (Engine(shape=DEEPSEEK_V3, tensor_parallel=8, replication_allowed=False), LayoutReason.FORBIDDEN),
        (Engine(shape=LLAMA_70B, tensor_parallel=8), LayoutReason.NOT_MLA),
        (Engine(shape=LLAMA_70B, tensor_parallel=16), LayoutReason.SHARED_HEADS),
    ],
)
def test_layout_is_what_the_gate_says(engine: Engine, reason: LayoutReason) -> None:
    assert plan_sizing(engine, capacity_bytes=64 * GIB, page_name="1Gi").verdict.reason is reason


def test_engine_over_two_nodes_gets_no_plan() -> None:
    with pytest.raises(InvalidSpec, match="MultiNode"):
        plan_sizing(Engine(shape=DEEPSEEK_V3, tensor_parallel=8, num_nodes=2), capacity_bytes=64 * GIB, page_name="2Mi")


def test_chunk_larger_than_an_extent_is_refused_with_what_to_change() -> None:
    with pytest.raises(InvalidSpec, match="--page-size 1Gi"):
        plan_sizing(
            Engine(shape=LLAMA_70B, tensor_parallel=8, block_tokens=256), capacity_bytes=64 * GIB, page_name="2Mi"
        )


@pytest.mark.parametrize(
    ("capacity", "advice"),
    [("2Mi", "32Mi"), ("6Mi", "32Mi"), ("34Mi", "36Mi"), ("66Mi", "68Mi")],
)
def test_a_pool_that_is_cut_too_short_for_a_chunk_is_told_which_capacity_helps(capacity: str, advice: str) -> None:
    asked = ["plan", "--model", "Qwen/Qwen3-32B", "--tp", "4", "--capacity"]
    error = str(CliRunner().invoke(app, [*asked, capacity]).exception)
    assert error == (
        f"one chunk needs 4Mi (4,194,304 bytes), more than an extent of 2Mi, into which a pool of {capacity} is cut; "
        f"use --capacity {advice}"
    )
    assert CliRunner().invoke(app, [*asked, advice]).exit_code == 0


@pytest.mark.parametrize(("block_size", "helps"), [("65536", False), ("256", True)])
def test_large_pages_are_advised_only_where_they_hold_a_chunk(block_size: str, helps: bool) -> None:
    asked = ["plan", "-m", "meta-llama/Llama-3.1-70B-Instruct", "--tp", "8", "--capacity", "64Gi"]
    error = str(CliRunner().invoke(app, [*asked, "--block-size", block_size]).exception)
    assert ("--page-size 1Gi" in error) is helps
    assert "a smaller --block-size" in error


def test_options_have_vllm_s_own_names_as_well() -> None:
    ours = ["--tp", "8", "--pp", "2", "--nodes", "1", "--kv-dtype", "fp8"]
    names = ("--tensor-parallel-size", "--pipeline-parallel-size", "--nnodes", "--kv-cache-dtype")
    theirs = [word for name, value in zip(names, ours[1::2], strict=True) for word in (name, value)]
    asked = ["-m", "deepseek-ai/DeepSeek-V3", "--capacity", "64Gi", "-o", "json"]
    assert run_plan(*asked, *theirs) == run_plan(*asked, *ours)


def test_capacity_between_pages_names_the_nearest() -> None:
    with pytest.raises(InvalidSpec, match="100Mi and 102Mi"):
        plan_sizing(Engine(shape=DEEPSEEK_V3, tensor_parallel=1), capacity_bytes=100 * 2**20 + 1, page_name="2Mi")
    for too_small in (0, 1 << 20):
        with pytest.raises(InvalidSpec, match=r"the nearest is 2Mi$"):
            plan_sizing(Engine(shape=DEEPSEEK_V3, tensor_parallel=1), capacity_bytes=too_small, page_name="2Mi")


def test_a_quarter_of_the_node_is_left_to_vllm_and_never_less_than_16_gib() -> None:
    assert default_capacity("512Gi", "2Mi") == 384 * GIB
    assert default_capacity("32Gi", "2Mi") == 16 * GIB
    with pytest.raises(InvalidSpec, match="--capacity"):
        default_capacity("16Gi", "2Mi")


CASE_28 = {
    "107374182400": 107374182400,
    "100Gi": 107374182400,
    "1e11": "95366Mi and 95368Mi",
    "0.5Gi": 536870912,
    "100G": "95366Mi and 95368Mi",
    "-1": "2Mi",
    "9007199254740993": "8Pi and 8589934594Mi",
    "9007199254740992": 9007199254740992,
    "9007199256838144": 9007199256838144,
    "1e30": "8796093022206Mi",
    "0.3": "2Mi",
}
"""Capacities as flags, and the exact bytes or the nearest multiples; case 28's seven, and what lies around them."""


@pytest.mark.parametrize(("text", "expected"), CASE_28.items())
@pytest.mark.parametrize("joined", [True, False])
def test_a_capacity_is_exact_or_refused_with_the_nearest_multiples(
    text: str, expected: int | str, joined: bool
) -> None:
    flag = [f"--capacity={text}"] if joined else ["--capacity", text]
    arguments = ["plan", "-m", "deepseek-ai/DeepSeek-V3", "--tp", "8", *flag, "-o", "json"]
    done = CliRunner().invoke(app, arguments)
    if isinstance(expected, int):
        assert json.loads(done.output)["capacityBytes"] == expected
        return
    verb = "are" if " and " in expected else "is"
    message = f"capacity {text} is no positive multiple of 2Mi pages; the nearest {verb} {expected}"
    assert (type(done.exception), str(done.exception)) == (InvalidSpec, message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("107374182400", 80530636800),
        ("100Gi", 80530636800),
        ("1e11", 74998349824),
        ("100G", 74998349824),
        ("9007199254740993", 6755399441055744),
        ("0.5Gi", "--node-memory 0.5Gi leaves a pool nothing"),
        ("-1", "--node-memory -1 leaves a pool nothing after 16Gi for vLLM and the system: the least is 16386Mi;"),
    ],
)
def test_a_node_s_memory_is_exact_and_its_pool_whole_pages(text: str, expected: int | str) -> None:
    done = CliRunner().invoke(
        app, ["plan", "-m", "deepseek-ai/DeepSeek-V3", "--tp", "8", f"--node-memory={text}", "-o", "json"]
    )
    if isinstance(expected, int):
        assert json.loads(done.output)["capacityBytes"] == expected
    else:
        assert str(done.exception).startswith(expected)


@pytest.mark.parametrize("text", ["team-a", "=4Gi", "team-a=", "team-a=:4Gi", "team-a=4Gi:"])
def test_malformed_quota_shows_the_form(text: str) -> None:
    with pytest.raises(InvalidSpec, match="NAMESPACE=GUARANTEED"):
        parse_quota(text)


def test_quota_above_capacity_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="guaranteed <= limit <= capacity"):
        plan_sizing(
            Engine(shape=DEEPSEEK_V3, tensor_parallel=1),
            capacity_bytes=64 * GIB,
            page_name="2Mi",
            quotas=[("a", 65 * GIB, None)],
        )
