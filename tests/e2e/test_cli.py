"""The kubectl plugin on the real cluster, beside what kubectl and the engines say."""

import json

import pytest

from e2e.user_tools import ToolOutputs, run_plugin
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import POOL

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


def test_every_command_ran_without_an_error(tools: ToolOutputs) -> None:
    failed = {name: done for name, done in tools.plugin.items() if done.status or done.errors}
    assert not failed


def test_doctor_finds_nothing_while_everything_works(tools: ToolOutputs) -> None:
    document = tools.plugin["doctor json"].document
    assert document["findings"] == []
    assert document["notChecked"] == []
    assert document["checked"]["pools"] == 1
    assert document["checked"]["labelled pods"] == 2


def test_status_shows_both_engines_replicated(tools: ToolOutputs) -> None:
    (pool,) = tools.plugin["status json"].document["pools"]
    engines = [engine for region in pool["regions"] for engine in region["status"]["engines"]]
    assert len(engines) == 2
    assert {engine["confirmedLayout"] for engine in engines} == {"replicated"}
    assert all(engine["podName"] in tools.plugin["status"].output for engine in engines)


def test_a_prompt_that_is_sent_as_the_examples_say_is_found_by_the_other_server(tools: ToolOutputs) -> None:
    first, of_the_other = tools.cached_by_hand
    assert first == 0
    assert of_the_other >= 256


def test_explain_shows_predicted_beside_confirmed_and_the_other_pod(tools: ToolOutputs) -> None:
    answers = {name: done.document for name, done in tools.plugin.items() if name.startswith("explain demo/")}
    assert len(answers) == 2
    for name, answer in answers.items():
        assert answer["injected"][0].startswith("yes")
        assert answer["layout"][0].startswith("predicted: auto (UnknownModel")  # the model is a path
        assert "replicated" in answer["layout"][1]
        (other,) = [one.removeprefix("explain ") for one in answers if one != name]
        assert other in answer["sharing"][-1]


def test_top_shows_the_node_with_its_figures(tools: ToolOutputs) -> None:
    lines = [line for line in tools.plugin["top"].output.splitlines() if f" {POOL} " in line]
    assert len(lines) == 2, "one for each reading"
    assert all("256 MiB" in line for line in lines)


def test_planned_bytes_are_those_of_the_running_engine(tools: ToolOutputs, demo_result) -> None:
    """The demo's model in float32, in blocks of as many tokens as the running server itself says."""
    plan = tools.plugin["plan json"].document
    assert plan["blockTokens"] == tools.block_tokens
    assert plan["slotBytes"] == demo_result.shared.figures.chunk_bytes
    assert plan["blocks"] == demo_result.shared.figures.capacity_chunks
    assert plan["layout"] == "replicated"
    lines = tools.plugin["plan"].output.splitlines()
    (chunk,) = [line for line in lines if line.startswith("Chunk ")]
    assert chunk.split()[1:5] == [str(tools.block_tokens), "tokens", "in", f"{plan['slotBytes']:,}"]
    assert "  capacity: 256Mi" in lines


def test_kubectl_completes_the_plugin(release) -> None:
    done = run_plugin(release.kubernetes, "pl", program="__complete")
    assert done.output.splitlines() == ["plan", ":4"]


def test_kubectl_completes_a_labelled_pod(alone: Kubernetes) -> None:
    done = run_plugin(alone, "explain", "pod", "demo/al", program="__complete")
    assert done.output.splitlines() == ["demo/alone", ":4"]


def test_explain_says_why_a_pod_is_not_injected(troubled: Kubernetes) -> None:
    answer = run_plugin(troubled, "explain", "pod", "demo/stray", "-o", "json").document
    assert answer["injected"][0] == "no: PoolNotFound"
    assert "never-made does not exist" in answer["pool"][0]


def test_unknown_pod_and_unreachable_cluster_end_with_2_and_one_line(release, tmp_path) -> None:
    done = run_plugin(release.kubernetes, "explain", "pod", "demo/nobody")
    assert (done.status, done.errors.count("\n")) == (2, 1)
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    done = run_plugin(release.kubernetes, "status", "--kubeconfig", str(config))
    assert done.status == 2
    assert "does not answer" in done.errors
